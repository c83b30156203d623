"""Scales of vectors that are kept as they were rounded."""

import jax
import jax.numpy as jnp
from jax import lax


def unit_scale(x: jax.Array, length: float) -> jax.Array:
    """Returns what brings each vector of `x` [..., D] to `length`, float32 [...].

    `length / sqrt(|x|^2 + 1e-6)` of the values that `x` holds: a vector and its scale make up a
    unit vector to float32's precision however coarsely the vector was rounded.
    """
    if x.dtype == jnp.bfloat16:  # on the bits: XLA may drop a pair of conversions
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        x = lax.bitcast_convert_type(bits, jnp.float32)
    return length * lax.rsqrt(jnp.sum(x * x, axis=-1) + 1e-6)
