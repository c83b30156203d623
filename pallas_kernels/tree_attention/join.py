"""What splits of the keys left, joined into the result: a Pallas kernel on the Triton backend."""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import MIN_BLOCK, padded, span
from pallas_kernels.tree_attention.gate import Gate

NOTHING = -1e30  # below every score, and finite: its difference to itself is zero
_JOINED = 4096  # elements that a program holds


class Parts(typing.NamedTuple):
    """Softmax over one split of the keys each, for the rows of every key head, flattened.

    Row r of a key head is its query head `r % ratio` of tree row `r // ratio`. What lies in parts
    and rows that are not in use is never read.

    Attributes:
      mix: float32 [splits, G, rows, D], values summed by weights that are not normalised.
      top: float32 [splits, G, rows], the largest score, to the base of two.
      total: float32 [splits, G, rows], the sum of the weights.
    """

    mix: jax.Array
    top: jax.Array
    total: jax.Array


def share_out(blocks: jax.Array, splits: int) -> tuple[jax.Array, jax.Array]:
    """Blocks of keys that each split takes, in order, and how many splits have any."""
    share = pl.cdiv(blocks, splits)
    return share, pl.cdiv(blocks, share)


def join(
    parts: Parts,
    length: jax.Array,
    blocks: Callable[[jax.Array], jax.Array],
    q: jax.Array,
    gate: Gate | None,
    interpret: bool,
) -> jax.Array:
    """Returns the result of `tree_attention`, of the shape and type of `q`.

    Args:
      parts: of the splits.
      length: int32 scalar, for `blocks`.
      blocks: blocks of keys in all, by the length; the splits have them as `share_out` says.
      q: [N, H, D].
      gate: as in `tree_attention`.
      interpret: whether the kernel runs interpreted.
    """
    nodes, heads, size = q.shape
    joined = pl.next_power_of_2(parts.mix.shape[0])
    block_d = min(padded(size), max(_JOINED // joined, MIN_BLOCK))
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            heads=heads,
            blocks=blocks,
            gate_columns=None if gate is None else (gate.first, gate.step),
            joined=joined,
            block_d=block_d,
        ),
        grid=(pl.cdiv(size, block_d), nodes * heads),
        out_shape=jax.ShapeDtypeStruct((nodes * heads, size), q.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tree_attention_join",
    )(length.reshape(1), *parts, *(() if gate is None else (gate.logits,)))
    return out.reshape(q.shape)


def _kernel(
    length_ref,
    mix_ref,
    top_ref,
    sum_ref,
    *gate_and_out_refs,
    heads: int,
    blocks: Callable[[jax.Array], jax.Array],
    gate_columns: tuple[int, int] | None,
    joined: int,
    block_d: int,
):
    *gate_refs, out_ref = gate_and_out_refs
    chunk, row = pl.program_id(0), pl.program_id(1)
    groups, size = mix_ref.shape[1], mix_ref.shape[3]
    ratio = heads // groups
    node, member = lax.div(row, heads), lax.rem(row, heads)
    head, flat = lax.div(member, ratio), node * ratio + lax.rem(member, ratio)
    logits = None
    if gate_columns is not None:  # asked for before anything is waited for
        first, step = gate_columns
        logits = _columns(gate_refs[0], node, first + member * step, chunk, block_d, size)

    part = lax.broadcasted_iota(jnp.int32, (joined,), 0)
    _, in_use = share_out(blocks(length_ref[0]), mix_ref.shape[0])
    there, parts = part < in_use, span(0, joined)
    top = pltriton.load(top_ref.at[parts, head, flat], mask=there, other=jnp.float32(NOTHING))
    total = pltriton.load(sum_ref.at[parts, head, flat], mask=there, other=jnp.float32(0))
    columns = span(chunk, block_d)
    mask = jnp.broadcast_to(there[:, None], (joined, block_d))
    inside = inside_columns(size, chunk, (joined, block_d))
    mixed = pltriton.load(
        mix_ref.at[parts, head, flat, columns],
        mask=mask if inside is None else mask & inside,
        other=jnp.float32(0),
    )
    weight = jnp.exp2(top - jnp.max(top))
    total = jnp.sum(weight * total)
    out = jnp.sum(weight[:, None] * mixed, axis=0) / jnp.where(total > 0, total, 1.0)
    if logits is not None:
        out = out * jax.nn.sigmoid(logits.astype(jnp.float32))
    mask = inside_columns(size, chunk, (block_d,))
    pltriton.store(out_ref.at[row, columns], out.astype(out_ref.dtype), mask=mask)


def _columns(ref, row, first, chunk, block_d: int, size: int) -> jax.Array:
    """A chunk of the `size` columns of a row from `first` on, zeros beyond them."""
    column = chunk * block_d + lax.broadcasted_iota(jnp.int32, (block_d,), 0)
    index = (jnp.full(column.shape, row, jnp.int32), first + column)
    return pltriton.load(ref.at[index], mask=column < size, other=jnp.zeros((), ref.dtype))


def inside_columns(size: int, chunk: jax.Array | int, shape: tuple[int, ...]) -> jax.Array | None:
    """Mask of the last axis where a chunk hangs over the columns; None if none does."""
    if size % shape[-1] == 0:
        return None
    return chunk * shape[-1] + lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) < size
