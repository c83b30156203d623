"""Reads and writes of blocks that may hang over the edge of their array, for Triton kernels."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

MIN_BLOCK = 16  # a shorter contraction on tensor cores is silently wrong


def padded(size: int) -> int:
    """Returns the shortest block that holds `size` elements and may enter a product."""
    return max(MIN_BLOCK, pl.next_power_of_2(size))


def span(block: jax.Array | int, size: int, offset: int = 0) -> pl.Slice:
    """Returns the index of a block of `size` elements along an axis; block 0 starts at `offset`.

    If `size` divides the axis, `offset` must be 0.
    """
    return pl.Slice(block * size + offset, size)


def load(ref, *index, when: jax.Array | None = None) -> jax.Array:
    """Returns `ref[index]`, zeros outside the array. Each index is a scalar or a `span`.

    With a false `when`, a scalar, nothing is read and all is zero.
    """
    index, mask = _masked(ref.shape, index, when)
    if mask is None:
        return pltriton.load(ref.at[index])
    return pltriton.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def store(ref, value: jax.Array, *index, when: jax.Array | None = None) -> None:
    """Writes `value` to `ref[index]`, leaving out what lies outside the array.

    With a false `when`, a scalar, nothing is written.
    """
    index, mask = _masked(ref.shape, index, when)
    pltriton.store(ref.at[index], value, mask=mask)


def _masked(shape, index, when: jax.Array | None) -> tuple[tuple, jax.Array | None]:
    """`_inside`, with nothing inside for a false `when`."""
    index, mask = _inside(shape, index)
    if when is not None:
        block = tuple(i.size for i in index if isinstance(i, pl.Slice))
        when = jnp.broadcast_to(when, block)
        mask = when if mask is None else mask & when
    return index, mask


def _inside(shape: tuple[int, ...], index) -> tuple[tuple, jax.Array | None]:
    """The index, and the mask of a block's elements that lie inside; no mask if all do."""
    sliced = [i for i in index if isinstance(i, pl.Slice)]
    block = tuple(i.size for i in sliced)
    traced, mask = [], None
    for size, i in zip(shape, index, strict=True):
        if isinstance(i, int):
            i = jnp.int32(i)  # interpreted, Pallas takes no constant
        elif isinstance(i, pl.Slice) and not _fits(size, i):
            # Traced even if known: Pallas refuses a constant slice that hangs over the edge.
            i = pl.Slice(jnp.full((), i.start, jnp.int32), i.size)
            axis = sum(isinstance(before, pl.Slice) for before in traced)
            position = i.start + jax.lax.broadcasted_iota(jnp.int32, block, axis)
            mask = position < size if mask is None else mask & (position < size)
        traced.append(i)
    return tuple(traced), mask


def _fits(size: int, i: pl.Slice) -> bool:
    """Whether a block is known to lie inside an axis."""
    if isinstance(i.start, int):
        return bool(i.start + i.size <= size)
    return bool(size % i.size == 0)  # blocks start at multiples of their size
