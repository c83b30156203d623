"""The layer's inputs one row and one tap at a time, all in float32."""

import jax
import jax.numpy as jnp

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
    x = take(x, columns.x, weight.shape[0])
    a, b = take(a, columns.a, a_log.size), take(b, columns.b, a_log.size)
    line = jnp.concatenate([history.astype(x.dtype), x]).astype(jnp.float32)
    weight = weight.astype(x.dtype).astype(jnp.float32)
    a, b, a_log, dt_bias = (y.astype(jnp.float32) for y in (a, b, a_log, dt_bias))

    def one_row(taps, a, b):
        y = sum(line[taps[i]] * weight[:, i] for i in range(taps.size))
        y = y / (1 + jnp.exp(-y))
        keys = key_heads * key_dim
        q, k, v = y[:keys], y[keys : 2 * keys], y[2 * keys :]
        q, k = (u.reshape(key_heads, key_dim).astype(x.dtype) for u in (q, k))
        scales = unit_scale(q, key_dim**-0.5), unit_scale(k, 1.0)
        v = v.reshape(a.size, -1).astype(x.dtype)
        g = -jnp.exp(a_log) * jnp.logaddexp(a + dt_bias, 0)
        return q, k, v, g, 1 / (1 + jnp.exp(-b)), *scales

    return jax.lax.map(lambda row: one_row(*row), (taps, a, b))
