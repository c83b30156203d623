"""Where the heads of a layer lie in its projections."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadColumns:
    """First column of each part in an array [N, ...] that may hold them side by side.

    Multiples of 8 keep the kernel's reads wide.

    Attributes:
      q: the first query head; head h begins at `q + h * step`.
      k: keys, G * D.
      v: values, G * D.
      step: columns from one query head to the next, 2 * D where an output gate's lie between.
    """

    q: int = 0
    k: int = 0
    v: int = 0
    step: int


def take(array: jax.Array, start: int, count: int, step: int, size: int) -> jax.Array:
    """Returns `count` heads of `size` columns, `step` apart, [N, count, size]."""
    end = start + count * step
    array = jnp.pad(array, ((0, 0), (0, max(0, end - array.shape[1]))))
    return array[:, start:end].reshape(-1, count, step)[:, :, :size]
