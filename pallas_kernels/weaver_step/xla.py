"""The pieces of a growth as ordinary array code, for any backend."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.weaver_step.state import (
    EPS,
    NO_PARENT,
    Activation,
    Growth,
    Nodes,
    Norm,
    Pools,
    Projection,
    Rotation,
    Weights,
)

_COLDEST = 1e-30  # divides any float32 logit without touching the denormals


def take(
    growth: Growth, weights: Weights, start: jax.Array, *, width: int, depths: int
) -> tuple[Growth, Nodes]:
    """Turns the best `width` offers into rows `start`... and returns them, ready to be expanded."""
    rows, children = growth.offered_score.shape
    # Offers are taken from the front, so only the next few of each parent compete.
    order = growth.taken[:, None] + jnp.arange(min(width, children))
    best = jnp.take_along_axis(
        growth.offered_score, order, axis=1, mode="fill", fill_value=-jnp.inf
    )
    few = min(width, best.size)
    score, place = lax.top_k(best.reshape(-1), few)
    score = jnp.pad(score, (0, width - few), constant_values=-jnp.inf)
    place = jnp.pad(place, (0, width - few))
    real = score > -jnp.inf
    parent = place // best.shape[1]
    order = jnp.where(real, order.reshape(-1)[place], 0)

    def put(x: jax.Array, new: jax.Array, padding) -> jax.Array:
        return _put(x, jnp.where(real, new, padding).astype(x.dtype), start)

    own = jnp.arange(rows) == (start + jnp.arange(width))[:, None]
    path = ((growth.ancestors[parent] > 0) | own) & real[:, None]
    token = jnp.where(real, growth.offered_token[parent, order], 0)
    depth = jnp.where(real, growth.depth[parent] + 1, 0)
    growth = growth._replace(
        token=put(growth.token, token, 0),
        parent=put(growth.parent, parent, NO_PARENT),
        depth=put(growth.depth, depth, 0),
        rank=put(growth.rank, growth.offered_rank[parent, order], -1),
        score=put(growth.score, score, -jnp.inf),
        logprob=put(growth.logprob, growth.offered_logprob[parent, order], -jnp.inf),
        ancestors=_put(growth.ancestors, path.astype(jnp.int8), start),
        taken=growth.taken.at[parent].add(real.astype(jnp.int32)),
    )
    x = embed(weights, token, jnp.minimum(depth, depths - 1))
    return growth, Nodes(x, depth, score)


def expand(
    growth: Growth,
    nodes: Nodes,
    weights: Weights,
    pools: Pools,
    start: jax.Array,
    *,
    activation: Activation,
) -> Growth:
    """Runs the nodes in rows `start`... through the network and puts their children on offer."""
    x = nodes.x
    depth = jnp.minimum(nodes.depth, pools.ids.shape[0] - 1)
    keys, values = [], []
    for index, block in enumerate(weights.blocks):
        qkv = project(x, block.qkv)
        mixed, key, value = attend(
            qkv, depth, growth.key[index], growth.value[index], growth, start, weights.rotation
        )
        x = project(mixed, block.out, residual=x)
        inner = project(x, block.up, activation=activation)
        x = project(inner, block.down, residual=x)
        keys.append(key)
        values.append(value)
    growth = growth._replace(key=tuple(keys), value=tuple(values))
    return offer(growth, nodes, score(x, depth, weights, pools), pools, start)


def embed(weights: Weights, token: jax.Array, level: jax.Array) -> jax.Array:
    """What nodes feed the first block, [w, R], for their tokens and depths [w]."""
    x = weights.table[token]
    return x if weights.position is None else x + weights.position[level]


def normalise(x: jax.Array, norm: Norm) -> jax.Array:
    """The norm of rows [w, K] in float32, returned in the dtype of `x`."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPS)
    return (y * norm.weight.astype(jnp.float32) + norm.bias.astype(jnp.float32)).astype(x.dtype)


def project(
    x: jax.Array,
    projection: Projection,
    *,
    activation: Activation | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """`residual + activation(projection(x))` for rows [w, in], in the dtype of `x`."""
    if projection.norm is not None:
        x = normalise(x, projection.norm)
    y = _product("wk,nk->wn", x, projection.weight)
    if projection.bias is not None:
        y = y + projection.bias.astype(jnp.float32)
    if activation == "silu_gated":
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
    elif activation is not None:
        y = jax.nn.gelu(y, approximate=activation == "gelu_tanh")
    if residual is not None:
        y = residual.astype(jnp.float32) + y
    return y.astype(x.dtype)


def attend(
    qkv: jax.Array,
    depth: jax.Array,
    key: jax.Array,
    value: jax.Array,
    growth: Growth,
    start: jax.Array,
    rotation: Rotation | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of rows `start`... over the prefix and what they see of the tree.

    Args:
      qkv: [w, 3 R].
      depth: int32 [w].
      key, value: [heads, prefix + rows, head size]; come back with the new rows.

    Returns:
      The mixed values [w, R], and the memory.
    """
    width = qkv.shape[0]
    heads, memory_rows, size = key.shape
    rows = growth.token.shape[0]
    prefix = memory_rows - rows
    q, k, v = qkv.reshape(width, 3, heads, size).swapaxes(0, 1)
    if rotation is not None:
        q, k = (rotate(x, rotation, depth + 1) for x in (q, k))
    at = (0, prefix + start, 0)
    key = lax.dynamic_update_slice(key, k.swapaxes(0, 1).astype(key.dtype), at)
    value = lax.dynamic_update_slice(value, v.swapaxes(0, 1).astype(value.dtype), at)
    visible = lax.dynamic_slice_in_dim(growth.ancestors, start, width) > 0
    visible = jnp.pad(visible, ((0, 0), (prefix, 0)), constant_values=True)[None]
    scores = _product("whd,hsd->hws", q, key) * size**-0.5
    weight = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    mixed = _product("hws,hsd->whd", weight.astype(qkv.dtype), value)
    return mixed.astype(qkv.dtype).reshape(width, heads * size), key, value


def rotate(x: jax.Array, rotation: Rotation, position: jax.Array) -> jax.Array:
    """Rotary embedding of [w, heads, size], halves paired, at positions [w]."""
    cos = rotation.cos[position][:, None]
    sin = rotation.sin[position][:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def score(x: jax.Array, depth: jax.Array, weights: Weights, pools: Pools) -> jax.Array:
    """Raw logits [w, P] of the candidates below nodes, -inf where there is none."""
    query = normalise(x, weights.out_norm)
    ids, prior = pools.ids[depth], pools.prior[depth]
    residual = _product("wd,wpd->wp", query, weights.head[jnp.maximum(ids, 0)])
    return jnp.where(jnp.isfinite(prior) & (ids >= 0), prior + residual, -jnp.inf)


def offer(
    growth: Growth, nodes: Nodes, logits: jax.Array, pools: Pools, start: jax.Array
) -> Growth:
    """Puts the best children of the nodes in rows `start`... on offer, given logits [w, P]."""
    children = growth.offered_score.shape[1]
    level = jnp.minimum(nodes.depth, pools.ids.shape[0] - 1)
    above = logits - jnp.max(logits, axis=-1, keepdims=True)
    above = above / jnp.maximum(pools.temperature, _COLDEST) + pools.noise[level]
    logprob, rank = lax.top_k(jax.nn.log_softmax(above, axis=-1), children)
    is_open = (nodes.score > -jnp.inf) & (nodes.depth < pools.ids.shape[0])
    offered = is_open[:, None] & (logprob > -jnp.inf)
    total = jnp.where(offered, nodes.score[:, None] + logprob, -jnp.inf)
    token = jnp.take_along_axis(pools.ids[level], rank, axis=-1)
    return growth._replace(
        offered_score=_put(growth.offered_score, total, start),
        offered_logprob=_put(growth.offered_logprob, logprob, start),
        offered_token=_put(growth.offered_token, token, start),
        offered_rank=_put(growth.offered_rank, rank.astype(jnp.int32), start),
    )


def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product in the dtype of `y`, accumulated and kept in float32."""
    precision = lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return jnp.einsum(
        spec, x.astype(y.dtype), y, precision=precision, preferred_element_type=jnp.float32
    )


def _put(x: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, rows, start, 0)
