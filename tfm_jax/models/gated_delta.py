"""The gated delta rule over a sequence, in chunks, for prefill and training.

Per value head with state S [DK, DV], all float32 (gated delta networks, arXiv 2412.06464):

    S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   out = q^T S

Inside a chunk the u of all rows come from one unit lower triangular system, the chain form of
the tree system in `pallas_kernels.gdn_tree`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gdn_tree.scales import FORGET
from pallas_kernels.triangular import unit_lower_inverse
from tfm_jax.models.layers import EXACT

CHUNK = 64


def unit_length(x: jax.Array) -> jax.Array:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=EXACT)


def chunked_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs the delta rule over T rows from a given state.

    A row with g = beta = 0 and k = v = 0 leaves the state as it is: that is how padding is
    written.

    Args:
      q, k: [T, HK, DK] float32, unit length, q scaled by DK ** -0.5.
      v: [T, HV, DV] float32; value head h reads key head h // (HV // HK).
      g, beta: [T, HV] float32.
      state: [HV, DK, DV] float32.

    Returns:
      out [T, HV, DV] and the state after the last row.
    """
    g = jnp.maximum(g, FORGET)  # minus infinity times the zeros of the masks would be no number
    rows, key_heads, key_size = k.shape
    value_heads, value_size = v.shape[1:]
    ratio = value_heads // key_heads
    chunks = -(-rows // CHUNK)
    padding = chunks * CHUNK - rows

    def split(x: jax.Array, *heads: int) -> jax.Array:
        x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        x = x.reshape(chunks, CHUNK, *heads, *x.shape[2:])
        return jnp.moveaxis(x, 1, 1 + len(heads))  # [chunks, heads..., C, ...]

    q, k = split(q, key_heads, 1), split(k, key_heads, 1)  # [n, HK, 1, C, DK]
    v = split(v, key_heads, ratio)  # [n, HK, R, C, DV]
    g, beta = split(g, key_heads, ratio), split(beta, key_heads, ratio)  # [n, HK, R, C]

    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), jnp.float32))
    strict = jnp.tril(lower, -1)
    # Direct sums over j < m <= i: a difference of two long running sums would lose digits.
    segments = _product(lower, g[..., :, None] * strict)  # [n, HK, R, C, C]
    decay = lower * jnp.exp(segments)
    since = jnp.exp(jnp.cumsum(g, axis=-1))[..., None]  # [n, HK, R, C, 1]
    until = decay[..., -1, :, None]

    transposed = jnp.swapaxes(k, -1, -2)
    mixing = strict * decay * beta[..., None] * _product(k, transposed)
    inverse = unit_lower_inverse(mixing)
    fresh = _product(inverse, beta[..., None] * v)
    stale = _product(inverse, beta[..., None] * since * k)
    reads = decay * _product(q, transposed)

    def advance(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, fresh, stale, reads, since, until = chunk
        u = fresh - _product(stale, state)
        out = since * _product(q, state) + _product(reads, u)
        written = jnp.einsum("hrcd,hrce->hrde", k * until, u, precision=EXACT)
        return since[..., -1:, :] * state + written, out

    state = state.reshape(key_heads, ratio, key_size, value_size)
    state, out = jax.lax.scan(advance, state, (q, k, fresh, stale, reads, since, until))
    out = jnp.moveaxis(out, 3, 1).reshape(chunks * CHUNK, value_heads, value_size)
    return out[:rows], state.reshape(value_heads, key_size, value_size)
