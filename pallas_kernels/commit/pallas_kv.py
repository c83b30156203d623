"""Compaction of all key and value caches in one launch, as a Pallas kernel on Triton.

A program owns a head of one cache and copies the accepted rows to their places, nothing else.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

_CACHES = 32  # of one launch; each adds three arguments and a branch


def compact(
    caches: tuple[jax.Array, ...],
    rows: tuple[jax.Array, ...],
    path: jax.Array,
    count: jax.Array,
    length: jax.Array,
    *,
    group: int = _CACHES,
    num_warps: int = 4,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns the caches. Arguments as in `commit_kv`, the scalars int32."""
    written = []
    for start in range(0, len(caches), group):
        mine, own = caches[start : start + group], rows[start : start + group]
        written += pl.pallas_call(
            functools.partial(_kernel, caches=len(mine)),
            grid=(mine[0].shape[0], len(mine)),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in mine],
            input_output_aliases={2 + len(mine) + i: i for i in range(len(mine))},
            compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
            interpret=interpret,
            name="commit_kv",
        )(path, jnp.stack([count, length]), *own, *mine)
    return tuple(written)


def _kernel(path_ref, scalars_ref, *refs, caches: int):
    head, mine = pl.program_id(0), pl.program_id(1)
    for i in range(caches):
        pl.when(mine == i)(
            functools.partial(_move, path_ref, scalars_ref, head, refs[i], refs[2 * caches + i])
        )


def _move(path_ref, scalars_ref, head, rows_ref, out_ref):
    steps, size = pl.next_power_of_2(path_ref.shape[0]), pl.next_power_of_2(out_ref.shape[2])
    count, length = scalars_ref[0], scalars_ref[1]
    step = lax.broadcasted_iota(jnp.int32, (steps, size), 0)
    column = lax.broadcasted_iota(jnp.int32, (steps, size), 1)
    live = step < count
    row = pltriton.load(path_ref.at[(step,)], mask=live, other=0)
    heads = jnp.full((steps, size), head, jnp.int32)
    inside = live & (column < out_ref.shape[2])
    value = pltriton.load(
        rows_ref.at[heads, row, column], mask=inside, other=jnp.zeros((), rows_ref.dtype)
    )
    keep = inside & (length + step < out_ref.shape[1])
    target = out_ref.at[heads, length + step, column]
    pltriton.store(target, value.astype(out_ref.dtype), mask=keep)
