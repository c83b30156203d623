"""Commit layer by layer as gathers and one product, for any backend."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gdn_tree import gdn_tree_commit_path


def advance(states, histories, keys, us, log_decays, inputs, path, count, key_scales=None):
    """Returns `(states, histories)`. Arguments as in `commit_linear`."""
    live = jnp.arange(path.size, dtype=jnp.int32) < count
    path = jnp.where(live, path, path[0])
    scales = [None] * len(keys) if key_scales is None else key_scales
    states = tuple(
        gdn_tree_commit_path(*layer, path, count, k_scale=scale)
        for *layer, scale in zip(states, keys, us, log_decays, scales, strict=True)
    )
    histories = tuple(
        lax.dynamic_slice_in_dim(
            jnp.concatenate([history, x[path, : history.shape[1]].astype(history.dtype)]),
            count,
            history.shape[0],
        )
        for history, x in zip(histories, inputs, strict=True)
    )
    return states, histories


def compact(caches, rows, path, count, length) -> tuple[jax.Array, ...]:
    """Returns the caches. Arguments as in `commit_kv`."""
    capacity = caches[0].shape[1]
    step = jnp.arange(path.size, dtype=jnp.int32)
    live = step < count
    path = jnp.where(live, path, path[0])
    # What is beyond the path goes beyond the capacity, each to a place of its own, and is dropped.
    target = jnp.where(live & (length + step < capacity), length + step, capacity + step)
    return tuple(
        cache.at[:, target].set(own[:, path].astype(cache.dtype), mode="drop", unique_indices=True)
        for cache, own in zip(caches, rows, strict=True)
    )
