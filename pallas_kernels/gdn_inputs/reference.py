"""The layer's inputs one row and one tap at a time, all in float32."""

import jax
import jax.numpy as jnp


def prepare(x, history, taps, weight, a, b, a_log, dt_bias, key_heads: int, key_dim: int):
    """Returns `(q, k, v, g, beta)`. Arguments as in `gdn_inputs`."""
    line = jnp.concatenate([history.astype(x.dtype), x]).astype(jnp.float32)
    weight = weight.astype(x.dtype).astype(jnp.float32)
    a, b, a_log, dt_bias = (y.astype(jnp.float32) for y in (a, b, a_log, dt_bias))

    def one_row(taps, a, b):
        y = sum(line[taps[i]] * weight[:, i] for i in range(taps.size))
        y = y / (1 + jnp.exp(-y))
        keys = key_heads * key_dim
        q, k, v = y[:keys], y[keys : 2 * keys], y[2 * keys :]
        q, k = (_unit(u.reshape(key_heads, key_dim)) for u in (q, k))
        v = v.reshape(a.size, -1).astype(x.dtype)
        g = -jnp.exp(a_log) * jnp.logaddexp(a + dt_bias, 0)
        return q / key_dim**0.5, k, v, g, 1 / (1 + jnp.exp(-b))

    return jax.lax.map(lambda row: one_row(*row), (taps, a, b))


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
