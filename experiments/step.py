"""Time of a decoding round at full size, by phase, against plain decoding and the memory floor.

    python -m experiments.step [--preset qwen3.6-27b] [--out DIR]

Weights are random: time does not depend on their values. Whole rounds run the program of
`generate`; phases are parts of it, each in a device loop of its own. Writes `step_<device>.json`.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console
from rich.table import Table

from experiments.checkout import commit_id
from experiments.kernels import read_rate
from experiments.loops import compile_loop
from experiments.options import check_positive, refusing, tree_of
from experiments.profiles import busy, by_name, kernels
from experiments.progress import log
from experiments.store import device_file, store
from pallas_kernels.benchmark import Chain, compile_chain
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.accept import Acceptance
from tfm_jax.decoding.commit import commit
from tfm_jax.decoding.draft import draft
from tfm_jax.decoding.generate import bucket
from tfm_jax.decoding.prefill import prefill
from tfm_jax.decoding.round import accept_within, draft_depth, grow_tree, shape_for
from tfm_jax.decoding.state import (
    DecodeState,
    Request,
    Trio,
    empty_state,
    make_request,
    networks_for,
)
from tfm_jax.decoding.verify import verify
from tfm_jax.files import check_new_file
from tfm_jax.model import random_model
from tfm_jax.presets import geometry
from tfm_jax.training.arithmetic import matrix_rate
from tfm_jax.tree import NO_PARENT, ROOT, Tree

RESULTS = pathlib.Path(__file__).parent / "results"
ROUNDS = 24
REPEATS = 5
LONGEST = 60  # kernels named in the report
ONCE_A_ROUND = "commit_kv"
METHODS = ("ar", "dflash", "ddtree", "tfm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of decoding at one length of text: method, shape of its trees, tokens committed."""

    method: str
    shape: TreeConfig
    context: int

    @property
    def capacity(self) -> int:
        return bucket(self.context, self.context + 32 * ROUNDS, 15)

    @property
    def name(self) -> str:
        budget = "" if self.method == "ar" else f" B={self.shape.budget}"
        return f"{self.method}{budget} context={self.context}"


def typical(budgets: list[int]) -> int:
    """The budget that is timed at all contexts, and profiled."""
    return 64 if 64 in budgets else budgets[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The networks under test."""

    trio: Trio

    def setting(self, method: str, budget: int, context: int) -> Setting:
        trio = networks_for(self.trio, method)
        shape = shape_for(trio, method, tree_of(max(budget, 1)))
        return Setting(method=method, shape=shape, context=context)

    def settings(
        self, methods: list[str], budgets: list[int], contexts: list[int], everywhere: bool
    ) -> list[Setting]:
        """All methods and budgets at the first context; plain decoding and `tfm` at the others.

        There `tfm` has the typical budget, or each of them if that is wanted `everywhere`.
        """
        first, middle = contexts[0], typical(budgets)
        found = [self.setting("ar", middle, context) for context in contexts]
        if "dflash" in methods:
            found.append(self.setting("dflash", middle, first))
        trees = [m for m in ("ddtree", "tfm") if m in methods]
        found += [self.setting(method, budget, first) for method in trees for budget in budgets]
        if "tfm" in methods:
            later = budgets if everywhere else [middle]
            found += [self.setting("tfm", b, context) for context in contexts[1:] for b in later]
        return found

    def networks(self, setting: Setting) -> Trio:
        return networks_for(self.trio, setting.method)

    def state(self, setting: Setting) -> DecodeState:
        """A state of the setting's length with noise in every cache."""
        key = jax.random.key(1)

        def fill(x: jax.Array) -> jax.Array:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return 0.05 * jax.random.normal(key, x.shape, x.dtype)

        empty = jax.jit(empty_state, static_argnums=1)(self.networks(setting), setting.capacity)
        state = jax.tree.map(fill, empty)
        return dataclasses.replace(state, length=jnp.int32(setting.context))

    def request(self, setting: Setting) -> Request:
        vocab = self.trio.verifier.config.vocab_size
        total = setting.capacity
        return make_request(Sampling(), end_tokens=(), vocab_limit=vocab, total=total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled loop over rounds, as `generate` runs it."""

    setting: Setting
    compiled: Callable
    seconds: float

    @property
    def temporary_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes  # pyright: ignore

    @property
    def argument_bytes(self) -> int:
        return self.compiled.memory_analysis().argument_size_in_bytes  # pyright: ignore


def compile_rounds(bench: Bench, setting: Setting) -> Program:
    """Compiles the device loop; nothing is allocated."""
    trio = bench.networks(setting)
    begin = time.perf_counter()
    compiled = compile_loop(trio, setting.method, setting.shape, setting.capacity)
    return Program(setting=setting, compiled=compiled, seconds=time.perf_counter() - begin)


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """An empty folder of compiled programs: compilations are cold, and can be fetched again."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]

    def use(values: Iterable[Any]) -> None:
        compilation_cache.reset_cache()
        for name, value in zip(names, values, strict=True):
            jax.config.update(name, value)

    with tempfile.TemporaryDirectory() as folder:
        use((folder, 0.0))
        try:
            yield
        finally:
            use(before)


def compile_again(bench: Bench, setting: Setting) -> float:
    """Seconds to trace a loop and fetch it from the persistent cache, as a new process does."""
    jax.clear_caches()
    return round(compile_rounds(bench, setting).seconds, 1)


def time_rounds(bench: Bench, program: Program) -> dict[str, Any]:
    """Milliseconds a round, median and range over runs of ROUNDS rounds each."""
    setting = program.setting
    trio, request = bench.networks(setting), bench.request(setting)
    state = bench.state(setting)
    times = []
    for run in range(REPEATS + 1):
        begin = time.perf_counter()
        state = program.compiled(trio, state, request, jnp.int32((run + 1) * ROUNDS))
        jax.block_until_ready(state)
        times.append((time.perf_counter() - begin) / ROUNDS * 1e3)
    assert int(state.rounds) == (REPEATS + 1) * ROUNDS, "a run ended early"
    times = times[1:]
    return {
        "method": setting.method,
        "budget": 0 if setting.method == "ar" else setting.shape.budget,
        "context": setting.context,
        "round_ms": round(statistics.median(times), 3),
        "round_ms_spread": [round(min(times), 3), round(max(times), 3)],
        "argument_bytes": program.argument_bytes,
        "temporary_bytes": program.temporary_bytes,
        "compile_seconds": round(program.seconds, 1),  # side by side with the others
    }


def profile_rounds(bench: Bench, program: Program, round_ms: float) -> dict[str, Any]:
    """Milliseconds of a round in which a kernel runs, kernels a round, the longest of them.

    `idle_share` is what is left of `round_ms`, a round without a profiler: the way from one kernel
    to the next. Under a profiler XLA may launch kernel by kernel, or one graph of which a single
    round is reported; so rounds are counted by a kernel that each has once.
    """
    setting = program.setting
    trio, request = bench.networks(setting), bench.request(setting)
    state = program.compiled(trio, bench.state(setting), request, jnp.int32(2))
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program.compiled(trio, state, request, jnp.int32(2 + ROUNDS)))
        events = kernels(folder)
    nanoseconds, count = busy(events)
    kinds = by_name(events)
    rounds = sum(kind.count for kind in kinds if kind.name.startswith(ONCE_A_ROUND))
    if not rounds:
        log(f"{setting.name}: no profile, since it holds no {ONCE_A_ROUND}")
        return {}
    kernels_ms = nanoseconds / rounds / 1e6
    return {
        "kernels_ms": round(kernels_ms, 3),
        "idle_share": round(1 - kernels_ms / round_ms, 4),
        "kernels_a_round": round(count / rounds, 1),
        "longest_kernels": [
            {"name": kind.name[:80]}
            | {n: round(getattr(kind, n) / rounds, 1) for n in ("us", "idle_us", "count")}
            for kind in kinds[:LONGEST]
        ],
    }


def spine(rows: int, depth: int) -> Tree:
    """A full tree: a chain down to `depth`, then leaves along it."""
    row = np.arange(rows)
    parent = np.where(row <= depth, row - 1, row % max(depth, 1))
    depths = np.zeros(rows, np.int32)
    for i in range(1, rows):
        depths[i] = depths[parent[i]] + 1
    parent[ROOT] = NO_PARENT
    return Tree(
        token=jnp.asarray(row + 5, jnp.int32),
        parent=jnp.asarray(parent, jnp.int32),
        depth=jnp.asarray(depths),
        score=jnp.zeros(rows),
        logprob=jnp.zeros(rows),
        rank=jnp.zeros(rows, jnp.int32),
        valid=jnp.ones(rows, bool),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a round that is timed in a loop of its own.

    Attributes:
      name: "draft", "propose" (draft and growth), "verify" or "accept+commit".
      method, shape: what the proposal depends on; None elsewhere.
      rows: of the tree that is verified or committed; 0 elsewhere.
    """

    name: str
    method: str | None = None
    shape: TreeConfig | None = None
    rows: int = 0


def phases_of(setting: Setting) -> list[Phase]:
    """The phases of a round, in order; settings share those that are alike."""
    rows = 1 if setting.method == "ar" else setting.shape.budget + 1
    judged = [Phase(name="verify", rows=rows), Phase(name="accept+commit", rows=rows)]
    if setting.method == "ar":
        return judged
    proposal = Phase(name="propose", method=setting.method, shape=setting.shape)
    return [Phase(name="draft"), *([] if setting.method == "dflash" else [proposal]), *judged]


def compile_phase(bench: Bench, phase: Phase, context: int) -> Chain:
    """The loop of one phase, on a state of `context` tokens."""
    method = phase.method or ("ar" if phase.rows == 1 else "dflash")
    setting = bench.setting(method, 64, context)
    trio, request = bench.networks(setting), bench.request(setting)
    state, depth = bench.state(setting), 0 if phase.rows == 1 else draft_depth(trio, method)
    tree = spine(max(phase.rows, 1), depth)

    def late(state: DecodeState, token: jax.Array) -> DecodeState:
        return dataclasses.replace(state, length=state.length + token.astype(jnp.int32))

    def drafted(token, trio, state):
        return (draft(trio, late(state, token), request, setting.shape.pool),)

    def proposed(token, trio, state):
        assert phase.shape is not None
        state = late(state, token)
        pools = draft(trio, state, request, phase.shape.pool)
        anchor = state.tokens[state.length]
        return (grow_tree(trio, anchor, pools, state.hidden, method, phase.shape),)

    def verified(token, trio, state):
        return (verify(trio, late(state, token), tree, request, depth),)

    def committed(token, state, trio, verification):
        acceptance = accept_within(state, tree, verification, request, depth)
        chain = jnp.minimum(jnp.arange(depth + 1), depth // 2)
        acceptance = Acceptance(
            path=chain,
            count=jnp.int32(depth // 2 + 1) + token.astype(jnp.int32),
            emitted=acceptance.emitted,
            bonus=acceptance.bonus,
        )
        rewound = dataclasses.replace(state, length=jnp.int32(setting.context))
        after = commit(trio, rewound, tree, verification, acceptance, request)
        return after, after.length

    if phase.name == "accept+commit":
        outline = jax.eval_shape(lambda: verified(jnp.float32(0), trio, state)[0])
        # Decaying: a growing state would become infinite, which the chain counts into its token.
        verification = jax.tree.map(_small, outline)
        return compile_chain(committed, [(state, trio, verification)], rounds=ROUNDS, carried=1)
    functions = {"draft": drafted, "propose": proposed, "verify": verified}
    return compile_chain(functions[phase.name], [(trio, state)], rounds=ROUNDS)


def _small(x: jax.ShapeDtypeStruct) -> jax.Array:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.full(x.shape, -0.01 if floating else 1, x.dtype)


def compile_all(
    bench: Bench, settings: list[Setting], phases: list[Phase], context: int
) -> tuple[list[Program], dict[Phase, Chain]]:
    """The loops of all settings and the phases, at one context, side by side."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(max((os.cpu_count() or 1) - 2, 2)) as pool:
        programs = pool.map(functools.partial(compile_rounds, bench), settings)
        chains = pool.map(lambda phase: compile_phase(bench, phase, context), phases)
        made = list(programs), dict(zip(phases, chains, strict=True))
    seconds = time.perf_counter() - begin
    log(f"{len(settings)} loops and {len(phases)} phases compiled in {seconds:.0f} s")
    return made


def add_phases(
    rows: list[dict[str, Any]], settings: list[Setting], chains: dict[Phase, Chain]
) -> None:
    """Adds to each row the milliseconds of draft, growth, verification, and accept + commit."""
    times = {phase: chain.measure(REPEATS).median_us / 1e3 for phase, chain in chains.items()}
    for row, setting in zip(rows, settings, strict=True):
        ms = {phase.name: times[phase] for phase in phases_of(setting)}
        if "propose" in ms:
            grown = ms.pop("propose") - ms["draft"]
            ms = {"draft": ms["draft"], "grow": grown, **ms}
        row["phases_ms"] = {name: round(value, 3) for name, value in ms.items()}
        log(f"{setting.name}: {row['phases_ms']}")


def floor_bytes(bench: Bench, context: int) -> int:
    """What plain decoding reads a token: weights but the embedding, state, keys and values."""
    verifier = bench.trio.verifier
    weights = sum(x.nbytes for x in jax.tree.leaves(verifier))
    if verifier.lm_head is not None:
        weights -= verifier.embed_tokens.weight[...].nbytes
    one = jax.eval_shape(lambda: verifier.empty_caches(1))
    more = jax.eval_shape(lambda: verifier.empty_caches(2))
    size = lambda caches: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))
    a_row = size(more) - size(one)
    return weights + size(one) - a_row + context * a_row


def time_prefill(bench: Bench, lengths: list[int], flops_rate: float) -> list[dict[str, Any]]:
    """Tokens a second of the verifier's prefill and its share of the matrix rate."""
    trio = networks_for(bench.trio, "ar")
    head = trio.verifier.output_rows.size
    parameters = sum(x.size for x in jax.tree.leaves(trio.verifier)) - 2 * head
    rows = []
    for length in lengths:
        tokens = np.random.default_rng(0).integers(5, 1000, length).astype(np.int32)
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            jax.block_until_ready(prefill(trio, tokens, bucket(length, length + 1, 0)))
            times.append(time.perf_counter() - begin)
        rate = length / min(times[1:])
        share = 2 * parameters * rate / flops_rate if flops_rate else 0.0
        rows.append(
            {
                "tokens": length,
                "tokens_per_second": round(rate),
                "share_of_matrix_rate": round(share, 3),
            }
        )
        log(f"prefill {rows[-1]}")
    return rows


def measure(
    bench: Bench,
    *,
    methods: list[str],
    budgets: list[int],
    contexts: list[int],
    everywhere: bool,
    prefills: list[int],
    phased: bool,
    profiled: bool,
) -> Iterator[dict[str, Any]]:
    """Runs everything; yields what is known so far, at the end the whole report."""
    rates = {"read": read_rate(), "matrix": matrix_rate()} if on_gpu() else {}
    settings = bench.settings(methods, budgets, contexts, everywhere)
    first = [setting for setting in settings if setting.context == contexts[0]]
    phases = list(dict.fromkeys(phase for setting in first for phase in phases_of(setting)))
    programs, chains = compile_all(bench, settings, phases if phased else [], contexts[0])
    floors = {c: floor_bytes(bench, c) for c in contexts}
    floor = lambda c: round(floors[c] / rates["read"] * 1e3, 3) if rates else None
    rounds = [time_rounds(bench, program) for program in programs]
    plain = {row["context"]: row["round_ms"] for row in rounds if row["method"] == "ar"}
    for row, setting in zip(rounds, settings, strict=True):
        row["ratio_to_ar"] = round(row["round_ms"] / plain[row["context"]], 4)
        log(f"{setting.name}: {row}")
    report: dict[str, Any] = {
        "floor_ms": floor(contexts[0]),
        "floors_ms": {str(c): floor(c) for c in contexts},
        "floor_bytes": {str(c): floors[c] for c in contexts},
        "read_bandwidth_gbs": round(rates["read"] / 1e9, 1) if rates else None,
        "matrix_tflops": round(rates["matrix"] / 1e12, 1) if rates else None,
        "ar_ms": plain[contexts[0]],
        "rounds": rounds,
        "prefill": [],
        "peak_memory_bytes": max(row["argument_bytes"] + row["temporary_bytes"] for row in rounds),
        "timed": on_gpu(),
    }
    yield report
    if phased:
        add_phases([row for row in rounds if row["context"] == contexts[0]], first, chains)
    chains.clear()
    gc.collect()
    yield report
    report["prefill"] = time_prefill(bench, prefills, rates.get("matrix", 0.0))
    yield report
    for row, program in zip(rounds, programs, strict=True):
        is_typical = row["method"] in ("ar", "dflash") or row["budget"] == typical(budgets)
        if profiled and is_typical and program.setting in first:
            row |= profile_rounds(bench, program, row["round_ms"])
    report["cached_compile_seconds"] = compile_again(bench, settings[-1])
    yield report


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def show(report: dict[str, Any], lengths: list[float]) -> None:
    """Prints the rounds, and what accepted lengths make of them."""
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    # The method with the most phases has all of them, in order.
    parts = max((list(row.get("phases_ms", {})) for row in report["rounds"]), key=len)
    table = Table("method", "B", "context", "round, ms", "x plain", *parts, title="A round")
    for row in report["rounds"]:
        phases = row.get("phases_ms", {})
        table.add_row(
            row["method"],
            str(row["budget"]),
            str(row["context"]),
            f"{row['round_ms']:.2f}",
            f"{row['ratio_to_ar']:.3f}",
            *(f"{phases[p]:.2f}" if p in phases else "" for p in parts),
        )
    console.print(table)
    if report["floor_ms"]:
        share = report["ar_ms"] / report["floor_ms"]
        console.print(
            f"plain decoding {report['ar_ms']:.2f} ms, {share:.3f} times the floor of "
            f"{report['floor_ms']:.2f} ms at {report['read_bandwidth_gbs']:.0f} GB/s"
        )
    gains = Table(
        "method", "B", "breaks even at", *(f"{x:g} tokens a round" for x in lengths),
        title="Speed-up over plain decoding, by mean accepted length",
    )  # fmt: skip
    for row in report["rounds"]:
        if row["method"] != "ar" and row["context"] == report["rounds"][0]["context"]:
            ratio = row["ratio_to_ar"]
            gains.add_row(
                row["method"], str(row["budget"]), f"{ratio:.2f}",
                *(f"{x / ratio:.2f}x" for x in lengths),
            )  # fmt: skip
    console.print(gains)


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for an unknown preset, or a number that no measurement could have."""
    for name in ("budgets", "contexts", "prefill"):
        for value in getattr(options, name):
            check_positive(**{name: value})
    for budget in options.budgets:
        TreeConfig(budget=budget)
    geometry(options.preset)
    for value in options.accepted:
        if not 0 < value < float("inf"):
            raise ValueError(f"accepted must be positive and finite, got {value}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times decoding rounds at full size.")
    parser.add_argument("--preset", default="qwen3.6-27b" if on_gpu() else "pocket")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument(
        "--all-contexts", action="store_true", help="time tfm with every budget at all contexts"
    )
    parser.add_argument("--prefill", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--accepted", type=float, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--no-phases", action="store_true", help="time whole rounds only")
    parser.add_argument("--no-profile", action="store_true", help="skip the device profile")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the report")
    parser.add_argument("--json", action="store_true", help="print the report instead of tables")
    options = parser.parse_args(arguments)
    device = jax.devices()[0].device_kind
    path = device_file(options.out, "step")
    with refusing(parser):
        check_options(options)
        check_new_file(path)
    setting = {
        "device": device,
        "jax": jax.__version__,
        "commit": commit_id(),
        "preset": options.preset,
        "temperature": Sampling().temperature,
        "expand": "ceil(B / 16)",
        "children": TreeConfig().children,
        "pool": TreeConfig().pool,
        "rounds_a_run": ROUNDS,
        "runs": REPEATS,
    }
    begin = time.perf_counter()
    model = random_model(options.preset)
    jax.block_until_ready(jax.tree.leaves(model.trio))
    log(f"{options.preset}: weights made in {time.perf_counter() - begin:.0f} s")
    setting["dtype"] = str(model.trio.verifier.dtype)
    report: dict[str, Any] = {}
    with fresh_cache():
        for found in measure(
            Bench(trio=model.trio),
            methods=options.methods,
            budgets=options.budgets,
            contexts=options.contexts,
            everywhere=options.all_contexts,
            prefills=options.prefill,
            phased=not options.no_phases,
            profiled=on_gpu() and not options.no_profile,
        ):
            report = setting | found
            store(path, report)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report, options.accepted)
    log(f"written to {path}")


if __name__ == "__main__":
    main()
