"""Logits of the candidates of a few nodes: table rows are gathered and multiplied on the way."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.blocks import load, span, store
from pallas_kernels.weaver_step.launch import Config, floor_power_of_2, gather, launch
from pallas_kernels.weaver_step.state import EPS, Norm, Pools

_COLUMNS = 2048  # of a table row that are held at a time


def score(
    query: jax.Array,
    depth: jax.Array,
    head: jax.Array,
    norm: Norm,
    pools: Pools,
    *,
    config: Config,
    interpret: bool,
) -> jax.Array:
    """Returns raw logits [w, P] of the candidates below nodes, -inf where there is none.

    Args:
      query: [w, K], normalised here.
      depth: int32 [w].
      head: [V, K], rows are gathered by the pools' ids.
    """
    nodes, inner = query.shape
    pool = pools.ids.shape[1]
    block = floor_power_of_2(config.score_bytes // (inner * head.dtype.itemsize))
    block = min(block, pl.next_power_of_2(pool))
    inputs = {
        "head": head,
        "query": query,
        "norm_weight": norm.weight,
        "norm_bias": norm.bias,
        "ids": pools.ids,
        "prior": pools.prior,
        "depth": depth,
    }
    return launch(
        functools.partial(_kernel, block=block),
        inputs,
        outputs={"logits": jax.ShapeDtypeStruct((nodes, pool), jnp.float32)},
        # Nodes side by side: those of one depth share their table rows in the cache.
        grid=(nodes, pl.cdiv(pool, block)),
        warps=config.score_warps,
        interpret=interpret,
        name="weaver_score",
    )["logits"]


def _kernel(inputs, outputs, *, block: int):
    node = pl.program_id(0)
    candidates = span(pl.program_id(1), block)
    query_ref, head_ref, ids_ref = inputs["query"], inputs["head"], inputs["ids"]
    inner = query_ref.shape[1]
    level = jnp.minimum(inputs["depth"][node], ids_ref.shape[0] - 1)
    ids = load(ids_ref, level, candidates)
    size = min(pl.next_power_of_2(inner), _COLUMNS)
    chunks = [span(i, size) for i in range(pl.cdiv(inner, size))]

    def read_rows(chunk) -> jax.Array:
        column = (chunk.start + jnp.arange(size))[None, :]
        mask = (ids >= 0)[:, None] & (column < inner)
        return gather(head_ref, jnp.maximum(ids, 0)[:, None], column, mask=mask)

    query = [load(query_ref, node, chunk).astype(jnp.float32) for chunk in chunks]
    prior = load(inputs["prior"], level, candidates)
    norm = [[load(inputs[name], chunk).astype(jnp.float32) for chunk in chunks]
            for name in ("norm_weight", "norm_bias")]  # fmt: skip
    # The gathered rows come from far away: they are asked for before anything is computed.
    rows = [read_rows(chunk) for chunk in chunks]
    scale = lax.rsqrt(sum(jnp.sum(q * q) for q in query) / inner + EPS)
    query = [q * scale * w + b for q, w, b in zip(query, *norm, strict=True)]
    total = jnp.zeros((block,), jnp.float32)
    for q, r in zip(query, rows, strict=True):
        q = q.astype(query_ref.dtype).astype(jnp.float32)
        total += jnp.sum(q[None, :] * r.astype(jnp.float32), axis=1)
    usable = (ids >= 0) & (jnp.abs(prior) < jnp.inf)
    logits = jnp.where(usable, prior + total, -jnp.inf)
    store(outputs["logits"], logits, node, candidates)
