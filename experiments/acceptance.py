"""Accepted length of every method on the evaluation prompts, and whether their texts agree.

    python -m experiments.acceptance --out experiments/results/acceptance.json

All prompts of a setting are decoded side by side in one vmapped loop: rounds and accepted
lengths are those of single streams, only the time is shared.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import time
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tfm_jax
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.generate import bucket, rounds_limit, run_rounds
from tfm_jax.decoding.prefill import prefill
from tfm_jax.decoding.state import DecodeState, make_request, networks_for
from tfm_jax.model import Model

DOMAINS = ("prose", "code", "math", "chat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one setting gave: texts and per-round accepted lengths of all prompts."""

    texts: list[list[int]]
    accepted: list[list[int]]
    seconds: float

    @property
    def mean(self) -> float:
        """Emitted tokens over rounds, all prompts together."""
        return sum(map(sum, self.accepted)) / sum(map(len, self.accepted))


def load_prompts(model: Model, domain: str, count: int, longest: int) -> list[np.ndarray]:
    """The first `count` prompts of a domain as ids, each cut to its first `longest` tokens."""
    text = (resources.files("tfm_jax") / "assets" / "prompts" / f"{domain}.jsonl").read_text()
    rows = [json.loads(line)["prompt"] for line in text.splitlines()[:count]]
    return [model.encode(row)[:longest] for row in rows]


def decode_all(
    model: Model,
    prompts: list[np.ndarray],
    *,
    method: str,
    shape: TreeConfig,
    sampling: Sampling,
    new_tokens: int,
    longest: int,
) -> Outcome:
    """Decodes every prompt for exactly `new_tokens` tokens (end tokens do not stop).

    `longest` bounds the prompts; one capacity for all of them means one program a method.
    """
    trio = networks_for(model.trio, method)
    capacity = bucket(longest, longest + new_tokens, 15)
    states = [prefill(trio, prompt, capacity) for prompt in prompts]
    state = jax.tree.map(lambda *rows: jnp.stack(rows), *states)
    requests = [
        make_request(
            dataclasses.replace(sampling, seed=sampling.seed + i),
            end_tokens=(),
            vocab_limit=model.vocab_limit,
            total=len(prompt) + new_tokens,
        )
        for i, prompt in enumerate(prompts)
    ]
    request = jax.tree.map(lambda *rows: jnp.stack(rows), *requests)
    begin = time.perf_counter()
    state = _side_by_side(method, shape)(trio, state, request, rounds_limit())
    jax.block_until_ready(state)
    seconds = time.perf_counter() - begin
    tokens, rounds = np.asarray(state.tokens), np.asarray(state.rounds)
    accepted = np.asarray(state.accepted)
    return Outcome(
        texts=[tokens[i, len(p) : len(p) + new_tokens].tolist() for i, p in enumerate(prompts)],
        accepted=[accepted[i, : rounds[i]].tolist() for i in range(len(prompts))],
        seconds=seconds,
    )


@functools.cache
def _side_by_side(method: str, shape: TreeConfig) -> Callable[..., DecodeState]:
    loop = functools.partial(run_rounds, method=method, shape=shape)
    return jax.jit(jax.vmap(loop, in_axes=(None, 0, 0, None)), donate_argnums=1)


def interval(accepted: list[list[int]], resamples: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean accepted length, resampling prompts."""
    emitted = np.array([sum(row) for row in accepted])
    rounds = np.array([len(row) for row in accepted])
    chosen = np.random.default_rng(0).integers(len(emitted), size=(resamples, len(emitted)))
    means = emitted[chosen].sum(1) / rounds[chosen].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def measure(
    model: Model,
    *,
    budgets: Iterable[int] = (16, 32, 64, 128),
    temperatures: Iterable[float] = (0.0, 1.0),
    shared_noise: Iterable[bool] = (False, True),
    count: int = 80,
    new_tokens: int = 128,
    longest_prompt: int = 256,
    domains: Iterable[str] = DOMAINS,
) -> dict[str, Any]:
    """Runs every setting; returns `{"setting", "rows"}`, one row per domain and setting.

    A row's `identical` says whether its texts equal those of plain decoding.
    """
    rows = []
    for domain in domains:
        prompts = load_prompts(model, domain, count, longest_prompt)
        for temperature in temperatures:
            for shared in shared_noise if temperature > 0 else (False,):
                sampling = Sampling(temperature=temperature, shared_noise=shared)
                plain = None
                for method, budget in _settings(budgets):
                    shape = TreeConfig(budget=budget, expand=max(1, -(-budget // 16)))
                    got = decode_all(
                        model,
                        prompts,
                        method=method,
                        shape=shape,
                        sampling=sampling,
                        new_tokens=new_tokens,
                        longest=longest_prompt,
                    )
                    plain = got.texts if method == "ar" else plain
                    rows.append(
                        {
                            "domain": domain,
                            "temperature": temperature,
                            "shared_noise": shared,
                            "budget": budget if method in ("ddtree", "tfm") else None,
                            "method": method,
                            "mean_accepted_length": round(got.mean, 4),
                            "ci95": [round(x, 4) for x in interval(got.accepted)],
                            "rounds": sum(map(len, got.accepted)),
                            "identical": got.texts == plain,
                            "differing_prompts": sum(
                                a != b for a, b in zip(got.texts, plain or [], strict=True)
                            ),
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
    return {
        "setting": {
            "model": "pocket",
            "dtype": str(model.trio.verifier.dtype),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "commit": commit_id(),
            "prompts": {d: len(load_prompts(model, d, count, longest_prompt)) for d in domains},
            "new_tokens": new_tokens,
            "longest_prompt": longest_prompt,
            "prompt_form": "plain continuation, no chat template; end tokens do not stop",
            "expand": "ceil(budget / 16)",
            "children": TreeConfig().children,
            "pool": TreeConfig().pool,
            "acceptance": "target-only; shared_noise rows grow the tree under the target's noise",
        },
        "rows": rows,
    }


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Macro average over domains for each method and setting."""
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        key = (row["temperature"], row["shared_noise"], row["budget"], row["method"])
        groups.setdefault(key, []).append(row["mean_accepted_length"])
    names = ("temperature", "shared_noise", "budget", "method")
    return [
        dict(zip(names, key, strict=True))
        | {"mean_accepted_length": round(float(np.mean(values)), 4)}
        for key, values in groups.items()
    ]


def _settings(budgets: Iterable[int]) -> list[tuple[str, int]]:
    trees = [(method, budget) for budget in budgets for method in ("ddtree", "tfm")]
    return [("ar", 1), ("dflash", 15), *trees]


def commit_id() -> str:
    """Short hash of the checked-out commit."""
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"


def main(
    model: str = "pocket",
    out: Path = Path("experiments/results/acceptance.json"),
    count: int = 80,
    new_tokens: int = 128,
    budgets: tuple[int, ...] = (16, 32, 64, 128),
    temperatures: tuple[float, ...] = (0.0, 1.0),
    shared_noise: tuple[bool, ...] = (False, True),
    dtype: str | None = "float32",
) -> None:
    """Measures acceptance and writes it to `out`."""
    result = measure(
        tfm_jax.load(model, dtype=dtype),
        budgets=budgets,
        temperatures=temperatures,
        shared_noise=shared_noise,
        count=count,
        new_tokens=new_tokens,
    )
    result["macro"] = summarise(result["rows"])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["macro"]:
        print(row)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
