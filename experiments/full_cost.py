"""Real acceptance at real cost: a small trio, embedded into full-size networks, writes real text.

    python -m experiments.full_cost [--preset qwen3.6-27b] [--trio DIR] [--out DIR]

Every method continues the evaluation prompts on one device, single stream, in the device loop of
`generate`. Writes `full_cost_<device>.json` after each method; `--add` keeps what is there and adds
the rows as those of a further run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.acceptance import DOMAINS, load_prompts
from experiments.checkout import commit_id
from experiments.embedding import embed
from experiments.embedding_check import largest_differences
from experiments.loops import compile_loop
from experiments.options import check_positive, refusing, tree_of
from experiments.progress import log
from experiments.store import device_file, store
from tfm_jax.checkpoints import StoredTrio, read_trio
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.generate import Stats, bucket, rounds_limit, summarise, text_so_far
from tfm_jax.decoding.prefill import plan, prefill
from tfm_jax.decoding.round import shape_for
from tfm_jax.decoding.state import DecodeState, make_request, networks_for
from tfm_jax.files import check_new_file, read_json
from tfm_jax.model import POCKET, Model, default_dtype, directory, load
from tfm_jax.presets import geometry

RESULTS = pathlib.Path(__file__).parent / "results"
METHODS = ("ar", "dflash", "ddtree", "tfm")
WARM_ROUNDS = 3
CHECKED = 192  # tokens of the float32 comparison
# What further runs share with the first one.
COMMON = (
    "device",
    "dtype",
    "timed",
    "trio",
    "preset",
    "new_tokens",
    "longest_prompt",
    "prompt_form",
    "expand",
    "children",
    "pool",
    "shared_noise",
    "prompts",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A method and the shape of its trees; a budget of 0 is plain decoding."""

    method: str
    budget: int

    @property
    def shape(self) -> TreeConfig:
        return tree_of(max(self.budget, 1))

    @property
    def name(self) -> str:
        return f"{self.method} B={self.budget}" if self.budget else self.method


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A text and what writing it took."""

    tokens: list[int]
    stats: Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A model and the one cache capacity of all its runs.

    Attributes:
      model: with all three networks.
      new_tokens: of every run; end tokens do not stop it.
      capacity: rows of every cache.
    """

    model: Model
    new_tokens: int
    capacity: int

    def prefill(self, tokens: list[int]) -> DecodeState:
        """The state after a text, for drafted methods; its last token is the anchor."""
        trio = networks_for(self.model.trio, "dflash")
        return prefill(trio, np.asarray(tokens, np.int32), self.capacity)

    def compile(self, settings: list[Setting], prompts: list[list[int]]) -> dict[Setting, Callable]:
        """All loops, and the prefill of the prompts' piece sizes, at the same time."""
        by_pieces = {tuple(rows for _, rows, _ in plan(len(p) - 1)): p for p in prompts}
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            loops = pool.map(self._compile, settings)
            filled = pool.map(self.prefill, by_pieces.values())
            jax.block_until_ready(list(filled))
            return dict(zip(settings, loops, strict=True))

    def _compile(self, setting: Setting) -> Callable:
        trio = networks_for(self.model.trio, setting.method)
        shape = shape_for(trio, setting.method, setting.shape)
        return compile_loop(trio, setting.method, shape, self.capacity)

    def run(
        self,
        loop: Callable,
        setting: Setting,
        prompt: list[int],
        sampling: Sampling,
        rounds: int | None = None,
    ) -> Run:
        """Continues a prompt; timed without prefill."""
        state = self.prefill(prompt)
        if setting.method == "ar":
            state = dataclasses.replace(state, context=None)
        request = make_request(
            sampling,
            end_tokens=(),
            vocab_limit=self.model.vocab_limit,
            total=len(prompt) + self.new_tokens,
        )
        trio = networks_for(self.model.trio, setting.method)
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state = jax.block_until_ready(loop(trio, state, request, rounds_limit(rounds)))
        seconds = time.perf_counter() - begin
        stats = summarise(state, prefill_seconds=0.0, decode_seconds=seconds, compile_seconds=0.0)
        return Run(tokens=text_so_far(state, len(prompt)), stats=stats)

    def next_logits(self, text: list[int]) -> np.ndarray:
        """Logits [vocabulary] after a text, by the program that prefills prompts."""
        state = self.prefill([*text, 0])  # an anchor is not run
        logits = _logits(self.model.trio.verifier, state.hidden)
        return np.asarray(logits[: self.model.vocab_limit])


_logits = jax.jit(lambda verifier, hidden: verifier.logits(hidden))


def settings_for(methods: list[str], budgets: list[int], depth: int) -> list[Setting]:
    """Plain decoding first, then the others in order of budget."""
    found = [Setting(method="ar", budget=0)]
    if "dflash" in methods:
        found.append(Setting(method="dflash", budget=depth))
    trees = [method for method in ("ddtree", "tfm") if method in methods]
    return found + [Setting(method=method, budget=b) for b in budgets for method in trees]


def measure(
    bench: Bench,
    loop: Callable,
    setting: Setting,
    prompts: dict[str, list[list[int]]],
    temperature: float,
) -> dict[str, list[Run]]:
    """Runs of every domain; prompt i is sampled with seed i, as in `experiments.acceptance`."""
    first = next(iter(prompts.values()))[0]
    sampling = Sampling(temperature=temperature)
    bench.run(loop, setting, first, sampling, rounds=WARM_ROUNDS)
    return {
        domain: [
            bench.run(loop, setting, prompt, dataclasses.replace(sampling, seed=i))
            for i, prompt in enumerate(texts)
        ]
        for domain, texts in prompts.items()
    }


def rows_of(
    setting: Setting,
    temperature: float,
    runs: dict[str, list[Run]],
    plain: dict[str, list[Run]],
) -> list[dict[str, Any]]:
    """A row for each domain; the speed-up is over plain decoding of the same prompts."""

    def speed(runs: list[Run]) -> float:
        return _total(runs, "emitted_tokens") / _total(runs, "decode_seconds")

    return [
        {
            "domain": domain,
            "temperature": temperature,
            "budget": setting.budget,
            "method": setting.method,
            "tokens_per_second": round(speed(found), 2),
            "mean_accepted_length": round(
                _total(found, "emitted_tokens") / _total(found, "rounds"), 4
            ),
            "round_ms": round(1e3 * _total(found, "decode_seconds") / _total(found, "rounds"), 3),
            "speedup": round(speed(found) / speed(plain[domain]), 4),
            "prompts": len(found),
            "differing_prompts": sum(
                a.tokens != b.tokens for a, b in zip(found, plain[domain], strict=True)
            ),
        }
        for domain, found in runs.items()
    ]


def _total(runs: list[Run], name: str) -> float:
    return sum(getattr(run.stats, name) for run in runs)


def differences(
    bench: Bench,
    setting: Setting,
    runs: dict[str, list[Run]],
    plain: dict[str, list[Run]],
    prompts: dict[str, list[list[int]]],
) -> list[dict[str, Any]]:
    """Where greedy texts first leave those of plain decoding.

    `gap` is how far the worse of the two tokens lies below the best one in the target's logits,
    which is the top-2 gap where the two are the best.
    """
    found = []
    for domain, texts in runs.items():
        for i, (one, other) in enumerate(zip(plain[domain], texts, strict=True)):
            apart = np.flatnonzero(np.array(one.tokens) != np.array(other.tokens))
            if not apart.size:
                continue
            at = int(apart[0])
            logits = bench.next_logits(prompts[domain][i] + one.tokens[:at])
            pair = [one.tokens[at], other.tokens[at]]
            found.append(
                {
                    "method": setting.method,
                    "budget": setting.budget,
                    "domain": domain,
                    "prompt": i,
                    "position": at,
                    "tokens": pair,
                    "gap": round(float(logits.max() - logits[pair].min()), 5),
                }
            )
    return found


def macro(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over domains, one row for each temperature, method and budget."""
    names = ("temperature", "method", "budget")
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    figures = ("tokens_per_second", "mean_accepted_length", "round_ms", "speedup")
    return [
        dict(zip(names, key, strict=True))
        | {name: round(float(np.mean([row[name] for row in group])), 4) for name in figures}
        for key, group in groups.items()
    ]


def check_joins(found: dict[str, Any], setting: dict[str, Any]) -> None:
    """Raises ValueError where a run of this setting is no further run of a stored result."""
    for name in COMMON:
        if found["setting"][name] != setting[name]:
            raise ValueError(
                f"--add needs the {name} of the result that is there, {found['setting'][name]!r}, "
                f"got {setting[name]!r}"
            )


def joined(found: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A stored result with the rows of a further run, each marked with its number.

    Speed-ups stay those over the run's own plain decoding, whose rows are left out: their times
    are in the entry that the run gets in the setting's `runs`.
    """
    runs = found["setting"].get("runs", [])
    number = len(runs) + 2
    own = {name: value for name, value in new["setting"].items() if name not in COMMON}
    plain = {f"{r['temperature']:g}": r["round_ms"] for r in new["macro"] if r["method"] == "ar"}
    entry = {"run": number, **own, "plain_round_ms": plain}
    result = {"setting": found["setting"] | {"runs": [*runs, entry]}}
    for name in ("rows", "macro", "differences"):
        rows = [row | {"run": number} for row in new[name] if row["method"] != "ar"]
        result[name] = found[name] + rows
    return result


def last_logits(
    trio: pathlib.Path, dtype: str, prompts: dict[str, list[list[int]]]
) -> list[np.ndarray]:
    """The small trio's logits after every prompt."""
    model = load(trio, dtype=dtype)
    limit = model.vocab_limit
    return [model.logits(prompt)[-1, :limit] for texts in prompts.values() for prompt in texts]


def compare_logits(
    bench: Bench,
    prompts: dict[str, list[list[int]]],
    exact: list[np.ndarray],
    small: list[np.ndarray],
) -> dict[str, Any]:
    """Logits after every prompt against those of the small trio in float32.

    `small` are the small trio's in the type of the wide one: what rounding alone does.
    """
    found = [bench.next_logits(prompt) for texts in prompts.values() for prompt in texts]

    def largest(logits: list[np.ndarray]) -> float:
        off = [np.abs(a - b).max() for a, b in zip(logits, exact, strict=True)]
        return round(float(np.max(off)), 6)  # `max` would lose a NaN

    same = [int(a.argmax() == b.argmax()) for a, b in zip(found, exact, strict=True)]
    return {
        "prompts": len(same),
        "same_best_token": sum(same),
        "largest_difference": largest(found),
        "largest_difference_small_trio": largest(small),
    }


def check_lengths(small: StoredTrio, sizes: Any, longest: int) -> None:
    """Raises ValueError if a sliding window would cut a text of `longest` tokens and a block."""
    assert small.drafter is not None
    for name, config in (("small", small.drafter.config), ("wide", sizes.drafter)):
        window = config.sliding_window
        if window is not None and longest + config.block_size > window:
            raise ValueError(
                f"prompt and new tokens may be at most {window - config.block_size}, as the "
                f"{name} drafter's window is {window}; got {longest}"
            )


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for a number that no run could have."""
    check_positive(
        count=options.count,
        new_tokens=options.new_tokens,
        longest_prompt=options.longest_prompt,
    )
    for budget in options.budgets:
        tree_of(budget)
    for temperature in options.temperatures:
        Sampling(temperature=temperature)


def show(result: dict[str, Any]) -> None:
    """Prints the macro averages and where greedy texts part."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(
        "T", "method", "B", "tokens/s", "accepted", "round, ms", "speed-up",
        title="Means over domains",
    )  # fmt: skip
    for row in sorted(result["macro"], key=lambda row: (row["temperature"], row["budget"])):
        table.add_row(
            f"{row['temperature']:g}",
            row["method"],
            str(row["budget"] or "-"),
            f"{row['tokens_per_second']:.1f}",
            f"{row['mean_accepted_length']:.2f}",
            f"{row['round_ms']:.2f}",
            f"{row['speedup']:.2f}x",
        )
    console.print(table)
    apart, greedy = result["differences"], any(not row["temperature"] for row in result["rows"])
    if apart:
        worst = max(one["gap"] for one in apart)
        console.print(f"{len(apart)} greedy texts part from plain decoding; largest gap {worst}")
    elif greedy:
        console.print("every greedy text is that of plain decoding")
    sampled = sum(row["differing_prompts"] for row in result["rows"] if row["temperature"])
    if sampled:
        console.print(f"{sampled} sampled texts part from plain decoding")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Real text at full cost.")
    parser.add_argument("--trio", default=POCKET, help='"pocket" or a directory with a trio')
    parser.add_argument("--preset", default="qwen3.6-27b", help="sizes to embed it into")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--count", type=int, default=4, help="prompts of each domain")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--longest-prompt", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0, help="of the weights that do not matter")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--check", action="store_true", help="compare part after part in float32 first; minutes"
    )
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--add", action="store_true", help="to the result there, as a further run")
    parser.add_argument("--json", action="store_true", help="print the result instead of tables")
    options = parser.parse_args(arguments)

    device = jax.devices()[0].device_kind
    path = device_file(options.out, "full_cost")
    with refusing(parser):
        check_options(options)
        trio, sizes = directory(options.trio), geometry(options.preset)
        before = read_json(path) if options.add else None
        check_new_file(path)
    setting: dict[str, Any] = {
        "device": device,
        "jax": jax.__version__,
        "commit": commit_id(),
        "dtype": default_dtype(options.dtype),
        "timed": jax.default_backend() == "gpu",
        "trio": options.trio,
        "preset": options.preset,
        "seed": options.seed,
        "methods": options.methods,
        "budgets": options.budgets,
        "temperatures": options.temperatures,
        "new_tokens": options.new_tokens,
        "longest_prompt": options.longest_prompt,
        "prompt_form": "plain continuation, no chat template; end tokens do not stop",
        "expand": "ceil(B / 16)",
        "children": TreeConfig().children,
        "pool": TreeConfig().pool,
        "shared_noise": Sampling().shared_noise,
    }
    small, exact = (read_trio(trio, dtype=dtype) for dtype in (setting["dtype"], "float32"))
    longest = options.longest_prompt + options.new_tokens
    check_lengths(small, sizes, longest)
    encoder = load(trio)
    prompts = {
        domain: load_prompts(encoder, domain, options.count, options.longest_prompt)
        for domain in DOMAINS
    }
    setting["prompts"] = {domain: len(texts) for domain, texts in prompts.items()}
    if before is not None:
        with refusing(parser):
            check_joins(before, setting)
    every = [prompt for texts in prompts.values() for prompt in texts]
    checks: dict[str, Any] = {}
    if options.check:
        checks["float32"] = _timed(
            "parts compared in float32",
            lambda: largest_differences(
                exact,
                sizes,
                [token for prompt in every for token in prompt][:CHECKED],
                seed=options.seed,
            ),
        )
        log(f"largest differences: {checks['float32']}")
    model = _timed("weights made", lambda: _ready(embed(small, sizes, seed=options.seed)))
    bench = Bench(
        model=model,
        new_tokens=options.new_tokens,
        capacity=bucket(options.longest_prompt, longest, model.trio.depth),
    )
    setting["capacity"] = bench.capacity
    settings = settings_for(options.methods, options.budgets, model.trio.depth)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        types = ("float32", setting["dtype"])
        logits = [pool.submit(last_logits, trio, dtype, prompts) for dtype in types]
        loops = _timed(f"{len(settings)} loops compiled", lambda: bench.compile(settings, every))
    checks["logits"] = compare_logits(bench, prompts, *(one.result() for one in logits))
    log(f"logits: {checks['logits']}")

    rows, apart = [], []
    plain: dict[float, dict[str, list[Run]]] = {}
    for one in settings:
        for temperature in options.temperatures:
            runs = measure(bench, loops[one], one, prompts, temperature)
            reference = plain.setdefault(temperature, runs)
            new = rows_of(one, temperature, runs, reference)
            rows += new
            if temperature == 0:
                apart += differences(bench, one, runs, reference, prompts)
            (mean,) = macro(new)
            log(f"{one.name} T={temperature:g}: {mean}")
            result = {"setting": setting | {"checks": checks, **_peak()}, "rows": rows}
            result |= {"macro": macro(rows), "differences": apart}
            result = result if before is None else joined(before, result)
            store(path, result)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    log(f"written to {path}")


def _timed(what: str, call: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = call()
    log(f"{what} in {time.perf_counter() - begin:.0f} s")
    return result


def _ready(model: Model) -> Model:
    jax.block_until_ready(jax.tree.leaves(model.trio))
    return model


def _peak() -> dict[str, int]:
    statistics = jax.devices()[0].memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    return {} if peak is None else {"peak_memory_bytes": peak}


if __name__ == "__main__":
    main()
