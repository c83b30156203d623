"""A product that came in parts."""

import jax
import jax.numpy as jnp
from jax import lax


def joined(delta: jax.Array, dtype) -> jax.Array:
    """Returns `delta`, its parts [S, N, H] summed in order and rounded if it comes in parts."""
    if delta.ndim == 2:
        return delta
    total = sum(delta[1:], start=delta[0])
    precision = jnp.finfo(dtype)
    # Said explicitly: XLA may leave out a conversion to a shorter type and back.
    return lax.reduce_precision(total, precision.nexp, precision.nmant).astype(dtype)
