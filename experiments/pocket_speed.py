"""Time of a round, single stream, for every method on the pocket trio.

    python -m experiments.pocket_speed

Each method runs once to compile, then on every prompt; the loop stays on the device throughout.
Rounds of the pocket trio say little about a large model: its weights fit into any cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tfm_jax
from experiments.acceptance import DOMAINS, common_setting, load_prompts
from experiments.store import device_file, store
from tfm_jax.config import TreeConfig


def measure(dtype: str | None = None, new_tokens: int = 128, count: int = 2) -> dict[str, Any]:
    """Returns `{"setting", "methods"}`: milliseconds a round, tokens/s, compile seconds."""
    model = tfm_jax.load(dtype=dtype)
    common = common_setting(model)
    shape = TreeConfig(budget=64, expand=4)
    prompts = [p for domain in DOMAINS for p in load_prompts(model, domain, count, 64)]
    methods = {}
    for method in model.methods:
        runs = [
            model.generate(
                prompt,
                max_new_tokens=new_tokens,
                method=method,
                tree=shape,
                end_tokens=[],
            ).stats
            for prompt in [prompts[0], *prompts]
        ]
        first, rest = runs[0], runs[1:]
        round_ms = [1e3 * run.decode_seconds / run.rounds for run in rest]
        methods[method] = {
            "round_ms": round(float(np.median(round_ms)), 3),
            "round_ms_spread": [round(min(round_ms), 3), round(max(round_ms), 3)],
            "tokens_per_second": round(
                sum(r.emitted_tokens for r in rest) / sum(r.decode_seconds for r in rest), 1
            ),
            "compile_seconds": round(first.compile_seconds, 1),
        }
        print(method, methods[method], flush=True)
    return {
        "setting": {
            **common,
            "budget": 64,
            "expand": 4,
            "temperature": 0,
            "new_tokens": new_tokens,
            "prompts": len(prompts),
        },
        "methods": methods,
    }


def main(out: Path = Path("experiments/results"), dtype: str | None = None) -> None:
    """Measures and writes `pocket_speed_<device>.json` into `out`."""
    store(device_file(out, "pocket_speed"), measure(dtype))


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
