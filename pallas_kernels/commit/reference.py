"""Commit row by row: what the other implementations must equal. Arguments as in `linear`, `kv`."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gdn_tree.scales import scaled


def advance(states, histories, keys, us, log_decays, inputs, path, count, key_scales=None):
    """Returns `(states, histories)` by the recurrence, one accepted row after the other."""
    if key_scales is not None:
        keys = [scaled(k, scale) for k, scale in zip(keys, key_scales, strict=True)]
    advanced = []
    for state, history, k, u, log_decay, x in zip(
        states, histories, keys, us, log_decays, inputs, strict=True
    ):
        group = state.shape[0] // k.shape[1]

        def step(j, carry, k=k, u=u, log_decay=log_decay, x=x, group=group):
            state, history, before = carry
            row = path[j]
            decay = jnp.exp(log_decay[row] - before)[:, None, None]
            key = jnp.repeat(k[row].astype(jnp.float32), group, axis=0)
            state = decay * state + key[:, :, None] * u[row][:, None, :]
            newest = x[row, : history.shape[1]].astype(history.dtype)
            history = jnp.concatenate([history[1:], newest[None]])
            return state, history, log_decay[row]

        start = (state, history, jnp.zeros_like(log_decay[0]))
        advanced.append(lax.fori_loop(0, count, step, start)[:2])
    return tuple(state for state, _ in advanced), tuple(history for _, history in advanced)


def compact(caches, rows, path, count, length) -> tuple[jax.Array, ...]:
    """Returns the caches, one accepted row copied after the other."""

    def move(cache, own):
        def step(j, cache):
            return cache.at[:, length + j].set(own[:, path[j]].astype(cache.dtype), mode="drop")

        return lax.fori_loop(0, count, step, cache)

    return tuple(move(cache, own) for cache, own in zip(caches, rows, strict=True))
