"""Accepted length of every method on the evaluation prompts, and whether their texts agree.

    python -m experiments.acceptance --out experiments/results/acceptance.json

The file is written again after every row, so that a stop keeps what was found.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import tfm_jax
from experiments import bootstrap
from experiments.checkout import commit_id
from experiments.options import (
    DOMAINS,
    check_positive,
    prompt_parser,
    read_prompt_options,
    tree_of,
)
from experiments.progress import log
from experiments.store import store
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.model import POCKET, Generation, Model

RESULT = Path(__file__).parent / "results" / "acceptance.json"
BUDGETS = (16, 32, 64, 128)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, shared_noise=False),
)


def load_prompts(model: Model, domain: str, count: int, longest: int) -> list[list[int]]:
    """The first `count` prompts of a domain as ids, each cut to its first `longest` tokens."""
    text = (resources.files("tfm_jax") / "assets" / "prompts" / f"{domain}.jsonl").read_text()
    rows = [json.loads(line)["prompt"] for line in text.splitlines()[:count]]
    return [model.encode(row)[:longest].tolist() for row in rows]


def interval(runs: list[Generation]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean accepted length, resampling prompts."""
    emitted = np.array([run.stats.emitted_tokens for run in runs])
    rounds = np.array([run.stats.rounds for run in runs])
    (chosen,) = bootstrap.draws([len(runs)])
    low, high = bootstrap.interval(emitted[chosen].sum(1) / rounds[chosen].sum(1))
    return float(low), float(high)


def measure(
    model: Model,
    *,
    budgets: Iterable[int] = BUDGETS,
    samplings: Iterable[Sampling] = SAMPLINGS,
    count: int = 80,
    new_tokens: int = 128,
    longest_prompt: int = 256,
    domains: Iterable[str] = DOMAINS,
    name: str = POCKET,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Decodes every prompt in every setting; returns `{"setting", "rows", "macro"}`.

    Every run emits exactly `new_tokens` tokens (end tokens do not stop); prompt i of a domain is
    sampled with seed i. A row's `identical` says whether all its texts equal those of plain
    decoding; `tokens_per_second` is single stream. `keep` gets the result after every row.
    """
    check_positive(count=count, new_tokens=new_tokens, longest_prompt=longest_prompt)
    settings = _settings(budgets)
    prompts = {domain: load_prompts(model, domain, count, longest_prompt) for domain in domains}
    setting = {
        **common_setting(model, name),
        "prompts": {domain: len(texts) for domain, texts in prompts.items()},
        "new_tokens": new_tokens,
        "longest_prompt": longest_prompt,
        "prompt_form": "plain continuation, no chat template; end tokens do not stop",
        "expand": "ceil(B / 16)",
        "children": TreeConfig().children,
        "pool": TreeConfig().pool,
        "acceptance": "target-only; shared_noise rows grow the tree under the target's noise",
    }
    rows: list[dict[str, Any]] = []
    # The plain text depends on neither the method nor the shared noise.
    references: dict[tuple[float, str], list[Generation]] = {}
    for sampling in samplings:
        for domain, texts in prompts.items():
            for method, shape in settings:
                if method == "ar" and (sampling.temperature, domain) in references:
                    continue
                runs = [
                    model.generate(
                        prompt,
                        max_new_tokens=new_tokens,
                        method=method,
                        tree=shape,
                        sampling=dataclasses.replace(sampling, seed=i),
                        end_tokens=[],
                    )
                    for i, prompt in enumerate(texts)
                ]
                plain = references.setdefault((sampling.temperature, domain), runs)
                names = {
                    "domain": domain,
                    "temperature": sampling.temperature,
                    "shared_noise": sampling.shared_noise and sampling.temperature > 0,
                    "budget": shape.budget,
                    "method": method,
                }
                rows.append(names | _figures(runs, plain))
                log(json.dumps(rows[-1]))
                keep({"setting": setting, "rows": rows, "macro": summarise(rows)})
    return {"setting": setting, "rows": rows, "macro": summarise(rows)}


def _figures(runs: list[Generation], plain: list[Generation]) -> dict[str, Any]:
    """What a row says of its runs, beside those of plain decoding."""
    emitted = sum(run.stats.emitted_tokens for run in runs)
    rounds = sum(run.stats.rounds for run in runs)
    seconds = sum(run.stats.decode_seconds for run in runs)
    differing = sum(a.tokens != b.tokens for a, b in zip(runs, plain, strict=True))
    return {
        "mean_accepted_length": round(emitted / rounds, 4),
        "ci95": [round(x, 4) for x in interval(runs)],
        "rounds": rounds,
        "round_ms": round(1e3 * seconds / rounds, 4),
        "tokens_per_second": round(emitted / seconds, 1),
        "identical": differing == 0,
        "differing_prompts": differing,
    }


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Macro average over domains for each method and setting."""
    names = ("temperature", "shared_noise", "budget", "method")
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        groups.setdefault(key, []).append(row["mean_accepted_length"])
    return [
        dict(zip(names, key, strict=True))
        | {"mean_accepted_length": round(float(np.mean(values)), 4)}
        for key, values in groups.items()
    ]


def common_setting(model: Model, name: str = POCKET) -> dict[str, str]:
    """What every figure depends on, the model by its name; taken before a run, not after it."""
    return {
        "model": name,
        "dtype": str(np.dtype(model.trio.verifier.dtype)),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit_id(),
    }


def _settings(budgets: Iterable[int]) -> list[tuple[str, TreeConfig]]:
    """Methods and shapes; raises ValueError for a budget that no tree has."""
    shapes = [tree_of(budget) for budget in budgets]
    trees = [(method, shape) for shape in shapes for method in ("ddtree", "tfm")]
    return [("ar", TreeConfig(budget=1)), ("dflash", TreeConfig(budget=15)), *trees]


def show(result: dict[str, Any]) -> None:
    """Prints the macro averages."""
    table = Table("T", "method", "B", "accepted", title="Mean accepted length, all domains")
    for row in result["macro"]:
        noise = ", shared noise" if row["shared_noise"] else ""
        length = f"{row['mean_accepted_length']:.3f}"
        table.add_row(f"{row['temperature']:g}{noise}", row["method"], str(row["budget"]), length)
    Console(width=None if sys.stdout.isatty() else 100, highlight=False).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = prompt_parser("Accepted length on the evaluation prompts.", count=80, out=RESULT)
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--new-tokens", type=int, default=128)
    options = read_prompt_options(
        parser, arguments, "new_tokens", check=lambda options: _settings(options.budgets)
    )
    result = measure(
        tfm_jax.load(options.model, dtype=options.dtype),
        budgets=options.budgets,
        count=options.count,
        new_tokens=options.new_tokens,
        longest_prompt=options.longest_prompt,
        domains=options.domains,
        name=options.model,
        keep=lambda found: store(options.out, found),
    )
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
