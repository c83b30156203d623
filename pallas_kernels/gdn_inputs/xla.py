"""What surrounds the delta rule as plain array operations, for any backend."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gdn_inputs.columns import Columns, take
from pallas_kernels.gdn_inputs.scales import unit_scale


def prepare(
    x,
    history,
    taps,
    weight,
    a,
    b,
    a_log,
    dt_bias,
    key_heads: int,
    key_dim: int,
    columns: Columns,
):
    """Returns the fields of `GDNInputs`. Arguments as in `gdn_inputs`."""
    rows, value_heads = taps.shape[0], a_log.shape[0]
    x = take(x, columns.x, weight.shape[0])
    a, b = take(a, columns.a, value_heads), take(b, columns.b, value_heads)
    line = jnp.concatenate([history.astype(x.dtype), x])
    weight = weight.astype(x.dtype)
    y = line[taps[:, 0]] * weight[:, 0]
    for i in range(1, taps.shape[1]):
        y = y + line[taps[:, i]] * weight[:, i]
    keys = key_heads * key_dim
    q, k, v = jnp.split(jax.nn.silu(y), [keys, 2 * keys], axis=-1)
    q, k = (u.reshape(rows, key_heads, key_dim) for u in (q, k))
    g, beta = gates(a, b, a_log, dt_bias)
    v = v.reshape(rows, value_heads, -1)
    return q, k, v, g, beta, unit_scale(q, key_dim**-0.5), unit_scale(k, 1.0)


def gates(
    a: jax.Array, b: jax.Array, a_log: jax.Array, dt_bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-decay g <= 0 and write strength beta in (0, 1), both float32 [T, HV], of projections."""
    steps = jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    g = -jnp.exp(a_log.astype(jnp.float32)) * steps
    return g, jax.nn.sigmoid(b.astype(jnp.float32))


def finish(out: jax.Array, z: jax.Array, weight: jax.Array, eps: float, column: int) -> jax.Array:
    """Returns the gated norm. Arguments as in `gdn_output`."""
    z = take(z, column, out[0].size)
    y = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
    y = y * weight.astype(jnp.float32)
    return (y.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)
