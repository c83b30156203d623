"""The largest entries of every row: checks and choice of implementation."""

import operator

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_array
from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.concrete import concrete
from pallas_kernels.top_k import pallas, reference, xla


def top_k(
    x: jax.Array,
    k: int,
    *,
    limit: jax.Array | int | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Returns the `k` largest values of every row and their columns, largest first.

    Equal to `lax.top_k` on a CPU: of equal values the lowest column comes first, 0.0 is above
    -0.0, NaN is above infinity, and NaN with its sign bit set is below minus infinity. ("xla" on
    another device orders zeros and NaN as that device's `lax.top_k` does.) The kernel reads `x`
    once, then only what may hold a winner; the longest array it makes holds the largest key of
    every 16 columns.

    Args:
      x: [R, V] float32 or bfloat16.
      k: how many, 1..V.
      limit: int32 scalar; columns from `limit` on are padding, which may hold anything and
        counts as minus infinity. All columns are real if None.
      implementation: "auto" takes "pallas" on a GPU that supports the shape, else "xla".
        "pallas" runs interpreted on a CPU. "reference" sorts whole rows.

    Returns:
      values: [R, k] of `x`'s type.
      ids: int32 [R, k].

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes, `k` or a known `limit` out of range, or an unknown implementation.
      NotImplementedError: "pallas" on a device or shape it does not support.
    """
    k = _check(x, k)
    rows, columns = x.shape
    limit = _check_limit(limit, columns)
    chosen = choose("top_k", implementation, pallas.unsupported(rows, columns, k))
    if chosen == "reference":
        return reference.top_k(x, k, limit)
    if chosen == "xla":
        return xla.top_k(x, k, limit)
    return pallas.top_k(x, k, limit, interpret=interpreted())


def _check(x: jax.Array, k: int) -> int:
    check_array("x", x)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have two axes, [rows, columns], none empty, got {x.shape}")
    try:
        k = operator.index(k)
    except TypeError:
        raise TypeError(f"k must be an integer, got {type(k).__name__}") from None
    if not 1 <= k <= x.shape[1]:
        raise ValueError(f"k must lie in 1..{x.shape[1]}, the number of columns, got {k}")
    return k


def _check_limit(limit: jax.Array | int | None, columns: int) -> jax.Array:
    if limit is None:
        return jnp.int32(columns)
    if not isinstance(limit, int) and not hasattr(limit, "dtype"):
        raise TypeError(f"limit must be an int32 scalar, got {type(limit).__name__}")
    if not jnp.issubdtype(jnp.result_type(limit), jnp.integer):
        raise TypeError(f"limit must be an int32 scalar, got {jnp.result_type(limit)}")
    if jnp.shape(limit) != ():
        raise ValueError(f"limit must be an int32 scalar, got shape {jnp.shape(limit)}")
    known = concrete(limit)
    if known is not None and not 0 <= known <= columns:
        raise ValueError(f"limit must lie in 0..{columns}, the number of columns, got {known}")
    return jnp.asarray(limit, jnp.int32)
