"""Pending updates and the accepted path -> the next state. Nothing is ever rolled back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.commit import commit_kv, commit_linear
from tfm_jax.decoding.accept import Acceptance
from tfm_jax.decoding.state import DecodeState, Request, Trio
from tfm_jax.decoding.verify import Verification
from tfm_jax.models.qwen36 import (
    Cache,
    KVCache,
    KVPending,
    LinearCache,
    LinearPending,
    Pending,
)
from tfm_jax.tree import Tree


def commit(
    trio: Trio,
    state: DecodeState,
    tree: Tree,
    verification: Verification,
    acceptance: Acceptance,
    request: Request,
) -> DecodeState:
    """Advances the text and every cache along the accepted path; the bonus is the new anchor."""
    path, count, length = acceptance.path, acceptance.count, state.length
    context = state.context
    if trio.drafter is not None and context is not None:
        context = trio.drafter.extend(context, verification.hidden.features[path], length)
    ended = (acceptance.bonus == request.end_tokens).any()
    nodes = tree.valid.sum(dtype=jnp.int32) - 1
    deepest = jnp.where(tree.valid, tree.depth, 0).max()
    return DecodeState(
        tokens=jax.lax.dynamic_update_slice_in_dim(
            state.tokens, acceptance.emitted, length + 1, axis=0
        ),
        length=length + count,
        caches=advance(state.caches, verification.pending, path, count, length),
        context=context,
        hidden=verification.hidden.final[path[count - 1]],
        rounds=state.rounds + 1,
        accepted=state.accepted.at[state.rounds].set(count),
        drafted=state.drafted.at[state.rounds].set(nodes),
        deepest=state.deepest.at[state.rounds].set(deepest),
        finished=ended | (length + count + 1 >= request.total),
    )


def advance(
    caches: tuple[Cache, ...],
    pending: tuple[Pending, ...],
    path: jax.Array,
    count: jax.Array,
    length: jax.Array,
) -> tuple[Cache, ...]:
    """The caches of all layers after the first `count` rows of `path` [P]."""
    advanced: list[Cache] = list(caches)
    linear, full = _by_kind(caches, pending)
    if linear:
        places, old, new = zip(*linear, strict=True)
        states, histories = commit_linear(
            [cache.state for cache in old],
            [cache.history for cache in old],
            [rows.k for rows in new],
            [rows.u for rows in new],
            [rows.log_decay for rows in new],
            [rows.inputs for rows in new],
            path,
            count,
            key_scales=[rows.k_scale for rows in new],
        )
        for i, state, history in zip(places, states, histories, strict=True):
            advanced[i] = LinearCache(state=state, history=history)
    if full:
        places, old, new = zip(*full, strict=True)
        written = commit_kv(
            [x for cache in old for x in (cache.key, cache.value)],
            [x for rows in new for x in (rows.key, rows.value)],
            path,
            count,
            length,
        )
        for i, key, value in zip(places, written[0::2], written[1::2], strict=True):
            advanced[i] = KVCache(key=key, value=value)
    return tuple(advanced)


def _by_kind(
    caches: tuple[Cache, ...], pending: tuple[Pending, ...]
) -> tuple[list[tuple[int, LinearCache, LinearPending]], list[tuple[int, KVCache, KVPending]]]:
    """(layer, cache, pending update) of the DeltaNet layers, and of the attention layers."""
    linear, full = [], []
    for i, (cache, update) in enumerate(zip(caches, pending, strict=True)):
        if isinstance(cache, LinearCache):
            assert isinstance(update, LinearPending)
            linear.append((i, cache, update))
        else:
            assert isinstance(update, KVPending)
            full.append((i, cache, update))
    return linear, full
