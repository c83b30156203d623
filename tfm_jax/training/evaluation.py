"""Metrics on texts that training does not see."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.training.continuations import Continuations
from tfm_jax.training.trainer import Loss, Params, compute_copy

_EVERY, _MOST = 8, 64


def hold_back(texts: Continuations) -> tuple[Continuations, Continuations | None]:
    """Texts to train on, and every eighth for evaluation, 64 at most; None if there are under 16.

    Continuations come sorted by temperature within a batch, so both kinds are among them.
    """
    rows = len(texts.tokens)
    if rows < 2 * _EVERY:
        return texts, None
    chosen = np.linspace(0, rows - 1, min(rows // _EVERY, _MOST)).round().astype(int)
    rest = np.ones(rows, bool)
    rest[chosen] = False
    return texts.rows(rest), texts.rows(chosen)


def evaluate(
    loss: Loss, frozen: Any, params: Params, texts: Continuations, size: int, dtype: jnp.dtype
) -> dict[str, Any]:
    """Metrics of `loss` over all texts, as plain numbers and lists.

    `length_greedy*` counts texts of temperature 0 alone and `length_sampled*` the others; one
    without any is left out.

    Args:
      loss: takes the batch (frozen, texts).
      frozen: networks that the loss needs.
      params: of the network to evaluate, float32.
      texts: with room after their prompts.
      size: most texts at a time.
      dtype: to compute in.
    """
    run = jax.jit(lambda params, *batch: loss(compute_copy(params, dtype), batch, jax.random.key(0)))
    rows = len(texts.tokens)
    sums: dict[str, Any] = {}
    weights: dict[str, float] = {}
    for begin in range(0, rows, size):
        part = texts.rows(np.arange(begin, min(begin + size, rows)))
        value, metrics = run(params, frozen, part.batches(len(part.tokens), 0)(0))
        greedy = int((part.temperature == 0).sum())
        for name, metric in {"loss": value, **metrics}.items():
            weight = len(part.tokens)
            if name.startswith("length_"):
                weight = greedy if "greedy" in name else len(part.tokens) - greedy
            sums[name] = sums.get(name, 0) + weight * np.asarray(metric, np.float64)
            weights[name] = weights.get(name, 0) + weight
    means = {name: sums[name] / weights[name] for name in sums if weights[name]}
    return {name: np.round(mean, 5).tolist() for name, mean in means.items()}
