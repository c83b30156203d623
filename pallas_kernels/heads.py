"""Heads that lie in a projection."""

import jax
import jax.numpy as jnp


def cut_heads(array: jax.Array, start: int, count: int, step: int, size: int) -> jax.Array:
    """Returns `count` heads of `size` columns, `step` apart from `start` on, [N, count, size]."""
    end = start + count * step
    array = jnp.pad(array, ((0, 0), (0, max(0, end - array.shape[1]))))
    return array[:, start:end].reshape(-1, count, step)[:, :, :size]
