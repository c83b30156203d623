"""Rotary position embedding (arXiv 2104.09864), halves paired."""

import jax
import jax.numpy as jnp


def turns(
    positions: jax.Array, theta: float, width: int, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of all angles, [N, width / 2] each in `dtype`.

    Frequency j is `theta ** (-2 j / width)`; angles are float32, as in the published models.
    """
    frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `x` [N, heads, D] with channels j and j + W / 2 turned, those from W on unchanged.

    Args:
      x: float32 or bfloat16.
      cos, sin: [N, W / 2] in the type of `x`, from `turns`.
    """
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
