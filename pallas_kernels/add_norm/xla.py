"""Addition and norm as plain array operations, for any backend."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.add_norm.parts import joined


def add(x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float, zero_centred: bool):
    """Returns `(x + delta, norm)`. Arguments as in `add_norm`."""
    total = x + joined(delta, x.dtype)
    y = total.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32)
    return total, (y * (1.0 + weight if zero_centred else weight)).astype(x.dtype)
