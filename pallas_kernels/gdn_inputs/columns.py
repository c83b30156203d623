"""Where the parts of a layer lie in one stacked projection."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """First column of each part in an array [N, ...] that holds them side by side.

    Multiples of 8 keep the kernels' reads wide.

    Attributes:
      x: convolution inputs, HK * DK of queries, as many of keys, HV * DV of values.
      z: the output gate, HV * DV.
      b: write gates, HV.
      a: decay gates, HV.
    """

    x: int = 0
    z: int = 0
    b: int = 0
    a: int = 0


def take(array: jax.Array, start: int, size: int) -> jax.Array:
    """Returns `size` columns from `start` on."""
    return jax.lax.slice_in_dim(array, start, start + size, axis=1)
