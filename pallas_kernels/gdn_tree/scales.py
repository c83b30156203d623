"""What all implementations make of scales and of a log-decay of minus infinity."""

import jax
import jax.numpy as jnp

FORGET = -1e30  # stands for minus infinity: zero times it is still zero


def given(scale: jax.Array | None, x: jax.Array) -> jax.Array:
    """The scale of the vectors of `x` [N, HK, DK], ones if there is none."""
    return jnp.ones(x.shape[:2], jnp.float32) if scale is None else scale


def scaled(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """`x` [N, HK, DK] in float32, each vector times its scale [N, HK]; None stands for 1."""
    x = x.astype(jnp.float32)
    return x if scale is None else x * scale[:, :, None]
