"""One row and one pair of channels after the other, in float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention_inputs.columns import HeadColumns


def prepare(
    q,
    k,
    v,
    cos,
    sin,
    q_weight,
    k_weight,
    eps: float,
    heads: int,
    key_heads: int,
    zero_centred: bool,
    columns: HeadColumns,
):
    """Returns the fields of `AttentionInputs`. Arguments as in `attention_inputs`."""
    size, half = q_weight.size, cos.shape[1]
    turn = jax.lax.complex(cos.astype(jnp.float32), sin.astype(jnp.float32))

    def one_head(x, weight, turn):
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32) + zero_centred
        x = x / jnp.sqrt(jnp.sum(x * x) / size + eps) * weight
        pairs = [jax.lax.complex(x[j], x[j + half]) * turn[j] for j in range(half)]
        turned = [jnp.real(z) for z in pairs] + [jnp.imag(z) for z in pairs]
        return jnp.concatenate([jnp.stack(turned), x[2 * half :]])

    def one_row(q, k, v, turn):
        cut = lambda x, start: x[start : start + size]
        queries = [cut(q, columns.q + h * columns.step) for h in range(heads)]
        keys = [cut(k, columns.k + h * size) for h in range(key_heads)]
        values = [cut(v, columns.v + h * size) for h in range(key_heads)]
        queries = jnp.stack([one_head(x, q_weight, turn) for x in queries])
        keys = jnp.stack([one_head(x, k_weight, turn) for x in keys])
        return queries.astype(q.dtype), keys.astype(k.dtype), jnp.stack(values)

    q, k, v = jax.lax.map(lambda row: one_row(*row), (q, k, v, turn))
    return q, k.swapaxes(0, 1), v.swapaxes(0, 1)
