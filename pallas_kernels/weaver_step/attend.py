"""Attention of a few nodes over prefix and tree, one program a head and node.

A program also writes its node's key and value to memory. Nodes taken together never descend from
each other, so what a program reads of the others' new rows, in whatever state, it does not use.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.weaver_step.launch import Config, gather, launch, scatter
from pallas_kernels.weaver_step.state import Growth, Rotation

_MASKED = -1e30  # finite, so that nothing is subtracted from itself as infinity


def attend(
    qkv: jax.Array,
    depth: jax.Array,
    key: jax.Array,
    value: jax.Array,
    growth: Growth,
    start: jax.Array,
    rotation: Rotation | None,
    *,
    config: Config,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the mixed values [w, R] and the updated memory, as `xla.attend` does."""
    nodes = qkv.shape[0]
    heads, memory_rows, size = key.shape
    inputs = {
        "qkv": qkv,
        "key": key,
        "value": value,
        "ancestors": growth.ancestors,
        "start": start.reshape(1),
        "depth": None if rotation is None else depth,
        "cos": None if rotation is None else rotation.cos,
        "sin": None if rotation is None else rotation.sin,
    }
    result = launch(
        functools.partial(_kernel, block=min(config.attend_block, pl.next_power_of_2(memory_rows))),
        inputs,
        outputs={"mixed": jax.ShapeDtypeStruct((nodes, heads * size), qkv.dtype)},
        updated=("key", "value"),
        grid=(heads, nodes),
        warps=config.attend_warps,
        interpret=interpret,
        name="weaver_attend",
    )
    return result["mixed"], result["key"], result["value"]


def _kernel(inputs, outputs, *, block: int):
    key_ref, value_ref = inputs["key"], inputs["value"]
    head, node = pl.program_id(0), pl.program_id(1)
    heads, memory_rows, size = key_ref.shape
    prefix = memory_rows - inputs["ancestors"].shape[0]
    # Channels in two halves: the pairs of the rotary embedding.
    middle = pl.cdiv(size, 2)
    lane = jnp.arange(pl.next_power_of_2(middle))
    halves = ((lane, lane < middle), (middle + lane, lane < size - middle))

    def read_new(part: int) -> list[jax.Array]:
        """The node's own q, k or v."""
        first = (part * heads + head) * size
        return [gather(inputs["qkv"], node, first + c, mask=mask) for c, mask in halves]

    def read(ref, row: jax.Array) -> list[jax.Array]:
        inside = (row < memory_rows)[:, None]
        return [gather(ref, head, row[:, None], c[None, :], mask=inside & m) for c, m in halves]

    # Everything is asked for at once, without waiting to know what will be used.
    blocks = [first + jnp.arange(block) for first in range(0, memory_rows, block)]
    query, new_key, new_value = (read_new(part) for part in range(3))
    keys = [read(key_ref, row) for row in blocks]
    values = [read(value_ref, row) for row in blocks]
    own = inputs["start"][0] + node
    is_node = inputs["ancestors"][own, own] > 0  # padding does not even see itself
    seen = [_see(inputs["ancestors"], own, row, prefix) for row in blocks]
    if "cos" in inputs:
        position = inputs["depth"][node] + 1
        cos, sin = (
            gather(inputs[name], position, lane, mask=lane < middle).astype(jnp.float32)
            for name in ("cos", "sin")
        )
        query, new_key = (_rotate(x, cos, sin) for x in (query, new_key))

    scale = size**-0.5
    query = [q.astype(jnp.float32) * scale for q in query]
    own_score = sum(jnp.sum(q * k.astype(jnp.float32)) for q, k in zip(query, new_key, strict=True))
    own_score = jnp.where(is_node, own_score, _MASKED)
    scores = [
        jnp.where(s, jnp.sum(_weigh(query, key), axis=1), _MASKED)
        for s, key in zip(seen, keys, strict=True)
    ]
    top = functools.reduce(jnp.maximum, (jnp.max(s) for s in scores), own_score)
    own_weight = jnp.exp(own_score - top)
    weights = [jnp.exp(s - top) for s in scores]
    total = own_weight + sum(jnp.sum(w) for w in weights)
    for h, (c, mask) in enumerate(halves):
        mixed = own_weight * new_value[h].astype(jnp.float32)
        for s, w, value in zip(seen, weights, values, strict=True):
            # Rows that nobody wrote may hold anything.
            used = jnp.where(s[:, None], value[h].astype(jnp.float32), 0.0)
            mixed += jnp.sum(w[:, None] * used, axis=0)
        scatter(outputs["mixed"], mixed / total, node, head * size + c, mask=mask)
        scatter(outputs["key"], new_key[h], head, prefix + own, c, mask=mask)
        scatter(outputs["value"], new_value[h], head, prefix + own, c, mask=mask)


def _rotate(x: list[jax.Array], cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
    a, b = (y.astype(jnp.float32) for y in x)
    return [y.astype(x[0].dtype) for y in (a * cos - b * sin, b * cos + a * sin)]


def _see(ancestors_ref, own: jax.Array, row: jax.Array, prefix: int) -> jax.Array:
    """Which memory rows the node in slot `own` sees, itself left out."""
    slot = row - prefix
    inside = (slot >= 0) & (slot < ancestors_ref.shape[0])
    above = gather(ancestors_ref, own, slot, mask=inside) > 0
    return (row < prefix) | (above & (slot != own))


def _weigh(query: list[jax.Array], key: list[jax.Array]) -> jax.Array:
    """Products of query and key channels, both halves added, [block, channels / 2]."""
    low, high = (q[None, :] * k.astype(jnp.float32) for q, k in zip(query, key, strict=True))
    return low + high
