"""Queries, keys and values as plain array operations, for any backend."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_inputs.columns import HeadColumns
from pallas_kernels.attention_inputs.rotary import rotate
from pallas_kernels.heads import cut_heads


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
    size = q_weight.size
    q = cut_heads(q, columns.q, heads, columns.step, size)
    k = cut_heads(k, columns.k, key_heads, size, size)
    v = cut_heads(v, columns.v, key_heads, size, size)
    q = rotate(_norm(q, q_weight, eps, zero_centred), cos, sin)
    k = rotate(_norm(k, k_weight, eps, zero_centred), cos, sin)
    return q, k.swapaxes(0, 1), v.swapaxes(0, 1)


def _norm(x: jax.Array, weight: jax.Array, eps: float, zero_centred: bool) -> jax.Array:
    factor = weight.astype(jnp.float32) + (1.0 if zero_centred else 0.0)
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * factor).astype(x.dtype)
