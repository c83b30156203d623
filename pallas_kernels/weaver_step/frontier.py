"""The two steps of best-first growth: put children on offer, and take the best offers as nodes.

Children of one parent are offered best first and always taken from the front, so only the next few
offers of each parent compete.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.blocks import load, span
from pallas_kernels.weaver_step.launch import Config, gather, launch, scatter
from pallas_kernels.weaver_step.state import NO_PARENT, Growth, Nodes, Pools

_COLDEST = 1e-30  # divides any float32 logit without touching the denormals
_COLUMNS = 2048  # of a table row that are held at a time
_OFFERS = ("offered_score", "offered_logprob", "offered_token", "offered_rank")
_ROWS = ("token", "parent", "depth", "rank", "score", "logprob")
_UPDATED = (*_ROWS, "ancestors", "taken")


def offer(
    growth: Growth,
    nodes: Nodes,
    logits: jax.Array,
    pools: Pools,
    start: jax.Array,
    *,
    config: Config,
    interpret: bool,
) -> Growth:
    """Puts the best children of the nodes in rows `start`... on offer, given logits [w, P]."""
    width, pool = logits.shape
    inputs = {
        "logits": logits,
        "ids": pools.ids,
        "noise": pools.noise,
        "temperature": pools.temperature.reshape(1),
        "depth": nodes.depth,
        "score": nodes.score,
        "start": start.reshape(1),
        **{name: getattr(growth, name) for name in _OFFERS},
    }
    block = min(config.offer_block, pl.next_power_of_2(pool))
    result = launch(
        functools.partial(_offer, block=block),
        inputs,
        updated=_OFFERS,
        grid=(width, pl.cdiv(pool, block)),
        warps=config.offer_warps,
        interpret=interpret,
        name="weaver_offer",
    )
    return growth._replace(**result)


def _offer(inputs, outputs, *, block: int):
    node = pl.program_id(0)
    depths, pool = inputs["ids"].shape
    row = inputs["start"][0] + node
    depth, score = inputs["depth"][node], inputs["score"][node]
    level = jnp.minimum(depth, depths - 1)
    temperature = jnp.maximum(inputs["temperature"][0], _COLDEST)

    def read(block_index, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Index, raw logit and noise of candidates; there is none at -inf."""
        candidates = span(block_index, size)
        index = candidates.start + jnp.arange(size)
        raw = gather(inputs["logits"], node, index, mask=index < pool, other=-jnp.inf)
        return index, raw, load(inputs["noise"], level, candidates)

    index, raw, noise = read(0, pl.next_power_of_2(pool))
    own_index, own_raw, own_noise = read(pl.program_id(1), block)
    token = gather(inputs["ids"], level, own_index, mask=own_index < pool)
    best = jnp.max(raw)
    cooled = (raw - best) / temperature + noise
    top = jnp.max(cooled)
    log_total = jnp.log(jnp.sum(jnp.exp(cooled - top)))
    logprob = cooled - top - log_total
    own = (own_raw - best) / temperature + own_noise - top - log_total

    ahead = logprob[None, :] > own[:, None]
    ahead |= (logprob[None, :] == own[:, None]) & (index[None, :] < own_index[:, None])
    rank = jnp.sum(ahead.astype(jnp.int32), axis=1)
    # Numbers that are none compare with nothing: without this they would share a place.
    kept = (rank < outputs["offered_score"].shape[1]) & (own_index < pool) & (own == own)
    is_open = (score > -jnp.inf) & (depth < depths)
    total = jnp.where(is_open & (own > -jnp.inf), score + own, -jnp.inf)
    for name, value in zip(_OFFERS, (total, own, token, own_index), strict=True):
        scatter(outputs[name], value, row, rank, mask=kept)


def take(
    growth: Growth,
    table: jax.Array,
    position: jax.Array | None,
    start: jax.Array,
    *,
    width: int,
    depths: int,
    config: Config,
    interpret: bool,
) -> tuple[Growth, Nodes]:
    """Turns the best `width` offers into rows `start`... and returns them.

    Their `x` is `table[token]`, plus `position[depth]` if given.
    """
    inputs = {
        **{name: getattr(growth, name) for name in (*_UPDATED, *_OFFERS)},
        "table": table,
        "position": position,
        "start": start.reshape(1),
    }
    result = launch(
        functools.partial(_take, depths=depths),
        inputs,
        outputs={
            "x": jax.ShapeDtypeStruct((width, table.shape[1]), table.dtype),
            "new_depth": jax.ShapeDtypeStruct((width,), jnp.int32),
            "new_score": jax.ShapeDtypeStruct((width,), jnp.float32),
        },
        updated=_UPDATED,
        grid=(1,),
        warps=config.take_warps,
        interpret=interpret,
        name="weaver_take",
    )
    nodes = Nodes(*(result.pop(name) for name in ("x", "new_depth", "new_score")))
    return growth._replace(**result), nodes


def _take(inputs, outputs, *, depths: int):
    width = outputs["x"].shape[0]
    rows, children = inputs["offered_score"].shape
    start = inputs["start"][0]
    lane = jnp.arange(pl.next_power_of_2(width))
    row = jnp.arange(pl.next_power_of_2(rows))
    taken = gather(inputs["taken"], row, mask=row < rows)
    entry, score = _best_offers(inputs["offered_score"], row, taken, width, lane)
    real = (score > -jnp.inf) & (lane < width)
    entry = jnp.where(real, entry, 0)
    parent = lax.div(entry, jnp.int32(children))
    order = entry - parent * children
    chosen = (parent[:, None] == row[None, :]) & real[:, None]
    taken += jnp.sum(chosen.astype(jnp.int32), axis=0)
    scatter(outputs["taken"], taken, row, mask=row < rows)

    offered = {name: gather(inputs[name], parent, order, mask=real) for name in _OFFERS[1:]}
    depth = jnp.where(real, gather(inputs["depth"], parent, mask=real) + 1, 0)
    new = {
        "token": offered["offered_token"],
        "parent": jnp.where(real, parent, NO_PARENT),
        "depth": depth,
        "rank": jnp.where(real, offered["offered_rank"], -1),
        "score": jnp.where(real, score, -jnp.inf),
        "logprob": jnp.where(real, offered["offered_logprob"], -jnp.inf),
    }
    for name, value in new.items():
        scatter(outputs[name], value, start + lane, mask=lane < width)
    for name in ("depth", "score"):
        scatter(outputs[f"new_{name}"], new[name], lane, mask=lane < width)

    slot = row[None, :]
    path = gather(inputs["ancestors"], parent[:, None], slot, mask=real[:, None] & (slot < rows))
    own = real[:, None] & (slot == (start + lane)[:, None])
    path = jnp.where(own, jnp.ones((), path.dtype), path)
    mask = (lane < width)[:, None] & (slot < rows)
    scatter(outputs["ancestors"], path, (start + lane)[:, None], slot, mask=mask)

    _write_inputs(inputs, outputs["x"], lane, new["token"], jnp.minimum(depth, depths - 1))


def _best_offers(
    score_ref, row: jax.Array, taken: jax.Array, width: int, lane: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Entries `parent * children + order` of the best offers, best first, and their scores.

    Ties go to the lower entry. Places beyond the last offer have a score of -inf.
    """
    rows, children = score_ref.shape
    order = taken[:, None] + lane[None, :]
    inside = (row < rows)[:, None] & (lane < width)[None, :] & (order < children)
    score = gather(score_ref, row[:, None], order, mask=inside, other=-jnp.inf)
    key = row[:, None] * children + order
    last = jnp.iinfo(jnp.int32).max
    entries = jnp.zeros(lane.shape, jnp.int32)
    scores = jnp.full(lane.shape, -jnp.inf, jnp.float32)
    for i in range(width):
        best = jnp.max(score)
        entry = jnp.min(jnp.where(inside & (score == best), key, last))
        entries = jnp.where(lane == i, entry, entries)
        scores = jnp.where(lane == i, best, scores)
        score = jnp.where(inside & (key == entry), -jnp.inf, score)
    return entries, scores


def _write_inputs(inputs, x_ref, lane: jax.Array, token: jax.Array, level: jax.Array) -> None:
    width, inner = x_ref.shape
    size = min(pl.next_power_of_2(inner), _COLUMNS)
    for chunk in range(pl.cdiv(inner, size)):
        column = (chunk * size + jnp.arange(size))[None, :]
        mask = (lane < width)[:, None] & (column < inner)
        x = gather(inputs["table"], token[:, None], column, mask=mask)
        if "position" in inputs:
            added = gather(inputs["position"], level[:, None], column, mask=mask)
            x = x.astype(jnp.float32) + added.astype(jnp.float32)
        scatter(x_ref, x, lane[:, None], column, mask=mask)
