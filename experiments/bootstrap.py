"""95 % intervals of means over prompts, by drawing prompts again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def draws(groups: Sequence[int]) -> list[np.ndarray]:
    """Indices [RESAMPLES, n] into each group of n prompts, drawn with replacement; always the same.

    Statistics that use the same draws are paired: their differences have intervals of their own.
    """
    random = np.random.default_rng(0)
    return [random.integers(n, size=(RESAMPLES, n)) for n in groups]


def interval(values: np.ndarray) -> np.ndarray:
    """The middle 95 % of resampled statistics [RESAMPLES, ...]: [2, ...], low and high."""
    return np.quantile(values, [0.025, 0.975], axis=0)
