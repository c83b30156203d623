"""Accepted length of every method on the evaluation prompts, and whether their texts agree.

python -m experiments.acceptance --out experiments/results/acceptance.json
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tfm_jax
from experiments import bootstrap
from experiments.checkout import commit_id
from experiments.options import check_positive
from experiments.store import store
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.files import check_new_file
from tfm_jax.model import POCKET, Generation, Model

DOMAINS = ("prose", "code", "math", "chat")


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
    budgets: Iterable[int] = (16, 32, 64, 128),
    samplings: Iterable[Sampling] = (
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, shared_noise=False),
    ),
    count: int = 80,
    new_tokens: int = 128,
    longest_prompt: int = 256,
    domains: Iterable[str] = DOMAINS,
    name: str = POCKET,
) -> dict[str, Any]:
    """Decodes every prompt in every setting; returns `{"setting", "rows"}`.

    Every run emits exactly `new_tokens` tokens (end tokens do not stop); prompt i of a domain is
    sampled with seed i. A row's `identical` says whether all its texts equal those of plain
    decoding; `tokens_per_second` is single stream.
    """
    check_positive(count=count, new_tokens=new_tokens)
    common = common_setting(model, name)
    prompts = {domain: load_prompts(model, domain, count, longest_prompt) for domain in domains}
    rows = []
    # The plain text depends on neither the method nor the shared noise.
    references: dict[tuple[float, str], list[Generation]] = {}
    for sampling in samplings:
        for domain, texts in prompts.items():
            for method, budget in _settings(budgets):
                if method == "ar" and (sampling.temperature, domain) in references:
                    continue
                runs = [
                    model.generate(
                        prompt,
                        max_new_tokens=new_tokens,
                        method=method,
                        tree=TreeConfig(budget=budget, expand=-(-budget // 16)),
                        sampling=dataclasses.replace(sampling, seed=i),
                        end_tokens=[],
                    )
                    for i, prompt in enumerate(texts)
                ]
                plain = references.setdefault((sampling.temperature, domain), runs)
                emitted = sum(run.stats.emitted_tokens for run in runs)
                rounds = sum(run.stats.rounds for run in runs)
                seconds = sum(run.stats.decode_seconds for run in runs)
                differing = sum(a.tokens != b.tokens for a, b in zip(runs, plain, strict=True))
                rows.append(
                    {
                        "domain": domain,
                        "temperature": sampling.temperature,
                        "shared_noise": sampling.shared_noise and sampling.temperature > 0,
                        "budget": budget,
                        "method": method,
                        "mean_accepted_length": round(emitted / rounds, 4),
                        "ci95": [round(x, 4) for x in interval(runs)],
                        "rounds": rounds,
                        "round_ms": round(1e3 * seconds / rounds, 4),
                        "tokens_per_second": round(emitted / seconds, 1),
                        "identical": differing == 0,
                        "differing_prompts": differing,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return {
        "setting": {
            **common,
            "prompts": {domain: len(texts) for domain, texts in prompts.items()},
            "new_tokens": new_tokens,
            "longest_prompt": longest_prompt,
            "prompt_form": "plain continuation, no chat template; end tokens do not stop",
            "expand": "ceil(B / 16)",
            "children": TreeConfig().children,
            "pool": TreeConfig().pool,
            "acceptance": "target-only; shared_noise rows grow the tree under the target's noise",
        },
        "rows": rows,
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


def _settings(budgets: Iterable[int]) -> list[tuple[str, int]]:
    trees = [(method, budget) for budget in budgets for method in ("ddtree", "tfm")]
    return [("ar", 1), ("dflash", 15), *trees]


def main(
    model: str = "pocket",
    out: Path = Path("experiments/results/acceptance.json"),
    count: int = 80,
    new_tokens: int = 128,
    budgets: tuple[int, ...] = (16, 32, 64, 128),
    dtype: str | None = "float32",
) -> None:
    """Measures acceptance and writes it to `out`."""
    check_new_file(out)
    loaded = tfm_jax.load(model, dtype=dtype)
    result = measure(loaded, budgets=budgets, count=count, new_tokens=new_tokens, name=model)
    result["macro"] = summarise(result["rows"])
    store(out, result)
    for row in result["macro"]:
        print(row)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
