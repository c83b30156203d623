"""What surrounds the delta rule as plain array operations, for any backend."""

import jax
import jax.numpy as jnp
from jax import lax


def prepare(x, history, taps, weight, a, b, a_log, dt_bias, key_heads: int, key_dim: int):
    """Returns `(q, k, v, g, beta)`. Arguments as in `gdn_inputs`."""
    rows, value_heads = a.shape
    line = jnp.concatenate([history.astype(x.dtype), x])
    weight = weight.astype(x.dtype)
    y = line[taps[:, 0]] * weight[:, 0]
    for i in range(1, taps.shape[1]):
        y = y + line[taps[:, i]] * weight[:, i]
    keys = key_heads * key_dim
    q, k, v = jnp.split(jax.nn.silu(y), [keys, 2 * keys], axis=-1)
    q, k = (_unit(u.reshape(rows, key_heads, key_dim)) for u in (q, k))
    a, b, a_log, dt_bias = (u.astype(jnp.float32) for u in (a, b, a_log, dt_bias))
    g = -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias)
    return q * key_dim**-0.5, k, v.reshape(rows, value_heads, -1), g, jax.nn.sigmoid(b)


def finish(out: jax.Array, z: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns the gated norm. Arguments as in `gdn_output`."""
    y = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
    y = y * weight.astype(jnp.float32)
    return (y.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
