"""Addition and norm, one row after the other."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.add_norm.parts import joined


def add(x: jax.Array, delta: jax.Array, weight: jax.Array, eps: float, zero_centred: bool):
    """Returns `(x + delta, norm)`. Arguments as in `add_norm`."""
    factor = weight.astype(jnp.float32) + (1.0 if zero_centred else 0.0)

    def one_row(rows):
        total = rows[0] + rows[1]
        y = total.astype(jnp.float32)
        y = y / jnp.sqrt(jnp.sum(y * y) / y.size + eps) * factor
        return total, y.astype(x.dtype)

    return lax.map(one_row, (x, joined(delta, x.dtype)))
