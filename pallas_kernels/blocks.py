"""Reads and writes of blocks that may hang over the edge of their array, for Triton kernels."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


def span(block: jax.Array | int, size: int) -> pl.Slice:
    """Returns the index of the given block of `size` elements along an axis."""
    # Traced even if known: Pallas refuses a constant slice that hangs over the edge.
    return pl.Slice(jnp.full((), block, jnp.int32) * size, size)


def load(ref, *index) -> jax.Array:
    """Returns `ref[index]`, zeros outside the array. Each index is a scalar or a `span`."""
    mask = _inside(ref.shape, index)
    if mask is None:
        return pltriton.load(ref.at[index])
    return pltriton.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def store(ref, value: jax.Array, *index) -> None:
    """Writes `value` to `ref[index]`, leaving out what lies outside the array."""
    pltriton.store(ref.at[index], value, mask=_inside(ref.shape, index))


def _inside(shape: tuple[int, ...], index) -> jax.Array | None:
    """Mask of a block's elements that lie inside the array; None if all do."""
    sliced = [(size, i) for size, i in zip(shape, index, strict=True) if isinstance(i, pl.Slice)]
    block = tuple(i.size for _, i in sliced)
    mask = None
    for axis, (size, i) in enumerate(sliced):
        if size % i.size == 0:
            continue  # blocks start at multiples of their size
        position = i.start + jax.lax.broadcasted_iota(jnp.int32, block, axis)
        mask = position < size if mask is None else mask & (position < size)
    return mask
