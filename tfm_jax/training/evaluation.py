"""Metrics on texts that training does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.training.continuations import Continuations
from tfm_jax.training.trainer import Loss, Params, compute_copy

_FEWEST, _MOST = 16, 64


def hold_back(
    texts: Continuations, depth: int, share: float = 0.125
) -> tuple[Continuations, Continuations | None]:
    """Texts to train on, and a share of the usable ones for evaluation, 64 at most.

    Nothing is held back of fewer than 16. Continuations come sorted by temperature within a
    batch, so both temperatures are among those held back.

    Raises:
      ValueError: no text has room for a path of `depth` tokens.
    """
    usable = np.flatnonzero(texts.room(depth))
    if usable.size < _FEWEST:
        return texts, None
    count = min(int(usable.size * share), _MOST)
    chosen = usable[np.linspace(0, usable.size - 1, count).round().astype(int)]
    rest = np.ones(len(texts.tokens), bool)
    rest[chosen] = False
    return texts.rows(rest), texts.rows(chosen)


def make_evaluation(
    loss: Loss, frozen: Any, texts: Continuations, size: int, dtype: jnp.dtype
) -> Callable[[Params], dict[str, Any]]:
    """A function of float32 parameters: metrics of `loss` over all texts, as numbers and lists.

    `length_greedy*` counts texts of temperature 0 alone and `length_sampled*` the others; one
    without any is left out.

    Args:
      loss: takes the batch (frozen, texts).
      frozen: networks that the loss needs.
      texts: with room after their prompts.
      size: most texts at a time.
      dtype: to compute in.
    """
    key = jax.random.key(0)
    run = jax.jit(lambda params, *batch: loss(compute_copy(params, dtype), batch, key))
    rows = len(texts.tokens)

    def evaluation(params: Params) -> dict[str, Any]:
        sums: dict[str, Any] = {}
        weights: dict[str, float] = {}
        for begin in range(0, rows, size):
            part = texts.rows(np.arange(begin, min(begin + size, rows)))
            value, metrics = run(params, frozen, part.batches(len(part.tokens), 0)(0))
            greedy = int((part.temperature == 0).sum())
            for name, metric in {"loss": value, **metrics}.items():
                weight = len(part.tokens)
                if name.startswith("length_"):
                    weight = greedy if "greedy" in name else weight - greedy
                sums[name] = sums.get(name, 0) + weight * np.asarray(metric, np.float64)
                weights[name] = weights.get(name, 0) + weight
        means = {name: sums[name] / weights[name] for name in sums if weights[name]}
        return {name: np.round(mean, 5).tolist() for name, mean in means.items()}

    return evaluation
