"""The definition: all scores of all rows, masked, in one softmax."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tree_attention.gate import Gate


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
) -> jax.Array:
    """Returns [N, H, D] in the type of `q`, computed in float32. Shapes as in `tree_attention`."""
    nodes, heads, size = q.shape
    groups, capacity = keys.shape[:2]
    place = jnp.arange(capacity)
    past = jnp.broadcast_to(place < length, (nodes, capacity))
    if window is not None:
        past &= length + jnp.arange(nodes)[:, None] - place < window
    seen = jnp.concatenate([past, visible], axis=1)  # [N, capacity + N]
    used = jnp.any(seen, axis=0)[:, None]
    k = jnp.concatenate([keys, own_keys], axis=1).astype(jnp.float32)
    v = jnp.concatenate([values, own_values], axis=1).astype(jnp.float32)
    v = jnp.where(used, v, 0.0)  # zero weights alone do not silence NaN
    grouped = q.reshape(nodes, groups, heads // groups, size).astype(jnp.float32)
    scores = scale * jnp.einsum("ngrd,gsd->ngrs", grouped, k, precision=lax.Precision.HIGHEST)
    seen = seen[:, None, None, :]
    top = jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-1e30)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum("ngrs,gsd->ngrd", weights, v, precision=lax.Precision.HIGHEST)
    out = mixed / jnp.where(total > 0, total, 1.0)
    out = out.reshape(q.shape)
    if gate is not None:
        out = out * gate.factors(heads, size)
    return out.astype(q.dtype)
