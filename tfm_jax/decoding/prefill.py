"""Prompt -> state, in pieces of a few fixed sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.decoding.state import DecodeState, Trio, empty_state

SMALL, LARGE = 64, 512  # rows of a piece
_SMALL_ONES = 3  # so many small pieces at the end take less time than a large one


def plan(length: int) -> Iterator[tuple[int, int, int]]:
    """Splits `length` rows into (start, rows, real rows): large pieces, then a few small ones."""
    start = 0
    while start < length:
        left = length - start
        rows = SMALL if left <= _SMALL_ONES * SMALL else LARGE
        yield start, rows, min(rows, left)
        start += rows


def rows_touched(length: int) -> int:
    """Cache rows written while `length` rows are prefilled, padding of the last piece included."""
    return max((start + rows for start, rows, _ in plan(length)), default=0)


def prefill(trio: Trio, tokens: np.ndarray, capacity: int) -> DecodeState:
    """The state after a text [T], T >= 1: its last token is the anchor, the others are run.

    Args:
      trio: the networks; a drafter's context is filled along.
      tokens: [T] int32.
      capacity: rows of every cache, at least `rows_touched(T - 1)` and T.
    """
    state = _empty(trio, capacity)
    for start, rows, real in plan(len(tokens) - 1):
        piece = np.zeros((rows,), np.int32)
        piece[:real] = tokens[start : start + real]
        state = _append(trio, state, piece, jnp.int32(real))
    return _set_anchor(state, jnp.int32(tokens[-1]))


def append(trio: Trio, state: DecodeState, tokens: jax.Array, count: jax.Array) -> DecodeState:
    """Runs the first `count` of `tokens` [P] and appends them to the text and all caches."""
    hidden, caches = trio.verifier.prefill(tokens, state.caches, state.length, count, trio.taps)
    context = state.context
    if trio.drafter is not None and context is not None:
        context = trio.drafter.extend(context, hidden.features, state.length)
    return dataclasses.replace(
        state,
        tokens=jax.lax.dynamic_update_slice_in_dim(state.tokens, tokens, state.length, axis=0),
        length=state.length + count,
        caches=caches,
        context=context,
        hidden=hidden.final[count - 1],
    )


def score(trio: Trio, tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Logits [T, V] float32 of a text [T] under the verifier, T >= 1."""
    state = _empty(trio, capacity)
    scored = []
    for start, rows, real in plan(len(tokens)):
        piece = np.zeros((rows,), np.int32)
        piece[:real] = tokens[start : start + real]
        state, logits = _append_scored(trio, state, piece, jnp.int32(real))
        scored.append(np.asarray(logits[:real]))
    return np.concatenate(scored)


def _append_with_logits(
    trio: Trio, state: DecodeState, tokens: jax.Array, count: jax.Array
) -> tuple[DecodeState, jax.Array]:
    hidden, caches = trio.verifier.prefill(tokens, state.caches, state.length, count)
    state = dataclasses.replace(state, caches=caches, length=state.length + count)
    return state, trio.verifier.logits(hidden.final)


def _with_anchor(state: DecodeState, token: jax.Array) -> DecodeState:
    return dataclasses.replace(state, tokens=state.tokens.at[state.length].set(token))


# Donated all along: a state that were copied would be there twice.
_set_anchor = jax.jit(_with_anchor, donate_argnums=0)
_append = jax.jit(append, donate_argnums=1)
_append_scored = jax.jit(_append_with_logits, donate_argnums=1)
_empty = jax.jit(empty_state, static_argnums=1)
