"""Pending updates and the accepted path -> the next state. Nothing is ever rolled back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import gdn_tree
from tfm_jax.decoding.accept import Acceptance
from tfm_jax.decoding.state import DecodeState, Request, Trio
from tfm_jax.decoding.verify import Verification
from tfm_jax.models.qwen36 import Cache, KVCache, LinearCache, LinearPending, Pending
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
        caches=tuple(
            advance(cache, pending, path, count, length)
            for cache, pending in zip(state.caches, verification.pending, strict=True)
        ),
        context=context,
        hidden=verification.hidden.final[path[count - 1]],
        rounds=state.rounds + 1,
        accepted=state.accepted.at[state.rounds].set(count),
        drafted=state.drafted.at[state.rounds].set(nodes),
        deepest=state.deepest.at[state.rounds].set(deepest),
        finished=ended | (length + count + 1 >= request.total),
    )


def advance(
    cache: Cache, pending: Pending, path: jax.Array, count: jax.Array, length: jax.Array
) -> Cache:
    """One layer's cache after the first `count` rows of `path` [P]."""
    if isinstance(cache, LinearCache):
        assert isinstance(pending, LinearPending)
        state = gdn_tree.gdn_tree_commit_path(
            cache.state, pending.k, pending.u, pending.log_decay, path, count
        )
        line = jnp.concatenate([cache.history, pending.inputs[path].astype(cache.history.dtype)])
        history = jax.lax.dynamic_slice_in_dim(line, count, cache.history.shape[0])
        return LinearCache(state=state, history=history)
    assert not isinstance(pending, LinearPending)

    def compact(kept: jax.Array, rows: jax.Array) -> jax.Array:
        chosen = rows[:, path].astype(kept.dtype)
        return jax.lax.dynamic_update_slice_in_dim(kept, chosen, length, axis=1)

    return KVCache(key=compact(cache.key, pending.key), value=compact(cache.value, pending.value))
