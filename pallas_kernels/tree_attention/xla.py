"""Online softmax over blocks of the cache, for any backend: neither time nor memory follow
the capacity."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tree_attention.gate import Gate

BLOCK = 2048  # cache rows at a time: large products, scores of a few megabytes
_NOTHING = -1e30  # below every score, and finite: its difference to itself is zero

State = tuple[jax.Array, jax.Array, jax.Array]


def attend(
    q: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    visible: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    gate: Gate | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """Returns [N, H, D] in the type of `q`. Shapes as in `tree_attention`."""
    nodes, heads, size = q.shape
    groups, capacity = keys.shape[:2]
    block = min(block, capacity)
    ratio = heads // groups
    length = jnp.clip(length, 0, capacity)
    rows = q.reshape(nodes, groups, ratio, size).swapaxes(0, 1).reshape(groups, -1, size)

    state = (
        jnp.full((groups, nodes * ratio), _NOTHING, jnp.float32),
        jnp.zeros((groups, nodes * ratio), jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
    )
    seen = jnp.repeat(visible, ratio, axis=0)
    state = _advance(state, rows, own_keys, own_values, seen, scale)
    at = length + jnp.repeat(jnp.arange(nodes, dtype=jnp.int32), ratio)[:, None]

    def step(i, state):
        # The last block is moved up to end with the cache; what was seen before is left out.
        start = jnp.minimum(i * block, capacity - block)
        position = start + jnp.arange(block, dtype=jnp.int32)
        k, v = (lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (keys, values))
        seen = ((position >= i * block) & (position < length))[None, :]
        if window is not None:
            seen &= at - position < window
        return _advance(state, rows, k, v, seen, scale)

    first = 0 if window is None else jnp.maximum(length - window + 1, 0) // block
    blocks = (length + block - 1) // block
    _, total, mixed = lax.fori_loop(first, blocks, step, state)
    out = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.reshape(groups, nodes, ratio, size).swapaxes(0, 1).reshape(q.shape)
    if gate is not None:
        out = out * gate.factors(heads, size)
    return out.astype(q.dtype)


def _advance(
    state: State, rows: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scale: float
) -> State:
    """Takes more keys into the running maximum [G, R], sum [G, R] and mix [G, R, D]."""
    top, total, mixed = state
    v = jnp.where(jnp.any(seen, axis=0)[:, None], v, jnp.zeros((), v.dtype))
    scores = _product("grd,gsd->grs", rows, k) * (scale * math.log2(math.e))
    scores = jnp.where(seen, scores, -jnp.inf)
    new = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp2(scores - new[..., None])
    kept = jnp.exp2(top - new)
    total = total * kept + jnp.sum(weights, axis=-1)
    mixed = mixed * kept[..., None] + _product("grs,gsd->grd", weights.astype(v.dtype), v)
    return new, total, mixed


def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)
