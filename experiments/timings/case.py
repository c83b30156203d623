"""The shape of a timed case: inputs, candidates that compute the same thing, and a gate."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute a case.

    Attributes:
      kind: column of the report: "pallas", "xla", "per_branch", ...
      call: `call(token, *inputs)` -> tuple of arrays; depends on `token`, a float32 zero.
      note: what sets it apart from others of its kind, such as a kernel's configuration.
    """

    kind: str
    call: Callable[..., tuple[jax.Array, ...]]
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One problem size of an operation.

    Attributes:
      label: what names the case in the report, e.g. {"nodes": 64}.
      sets: input sets in rotation; together beyond the last-level cache.
      candidates: what is timed. The best of each kind is reported.
      error: how far a candidate's results for the first set are from exact ones.
      tolerance: results further off are no results.
      bytes: least traffic with device memory of one call.
      flops: least arithmetic of one call, two for each multiply-add.
      carried: leading inputs that a call returns updated, as its first results.
      calls: calls of a timed program, at least; fewer for slow ones.
    """

    label: dict[str, Any]
    sets: list[tuple]
    candidates: list[Candidate]
    error: Callable[[tuple[jax.Array, ...]], float]
    tolerance: float
    bytes: int
    flops: int = 0
    carried: int = 0
    calls: int = 160


def relative_error(actual: Any, exact: np.ndarray) -> float:
    """Norm of the difference over the norm of the exact values."""
    difference = np.asarray(actual, np.float64) - exact
    return float(np.linalg.norm(difference) / max(np.linalg.norm(exact), 1e-30))


def rotations(arrays: tuple, count: int) -> list[tuple]:
    """`count` input sets: the arrays, then the same rolled along their last axis."""
    return [tuple(jnp.roll(x, i, axis=-1) for x in arrays) for i in range(count)]
