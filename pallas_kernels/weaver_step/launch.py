"""One way to launch the kernels of this operation, and the few index forms they share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import MIN_BLOCK
from pallas_kernels.splitting import dot, split

TILE = MIN_BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernels are cut.

    Attributes:
      project_bytes: of the weights that one program of a projection reads.
      project_columns: of a weight's row that one dot takes at a time.
      project_stages: such pieces in flight at once, less one.
      project_warps: warps of that program.
      attend_block: memory rows taken at a time.
      attend_warps: warps of the program of one head and node.
      score_bytes: of the table rows that one program scores.
      score_warps: warps of that program.
      offer_block: candidates ranked by one program.
      offer_warps: warps of that program.
      take_warps: warps of the one program that takes offers.
    """

    project_bytes: int = 65536
    project_columns: int = 128
    project_stages: int = 5
    project_warps: int = 8
    attend_block: int = 128
    attend_warps: int = 8
    score_bytes: int = 65536
    score_warps: int = 8
    offer_block: int = 32
    offer_warps: int = 8
    take_warps: int = 4


def launch(
    kernel: Callable,
    inputs: Mapping[str, jax.Array | None],
    *,
    grid: tuple[int, ...],
    outputs: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    updated: tuple[str, ...] = (),
    warps: int,
    stages: int = 1,
    interpret: bool,
    name: str,
) -> dict[str, jax.Array]:
    """Runs `kernel(inputs, outputs)`, both mappings from names to refs, and returns its outputs.

    Args:
      inputs: those that are None are left out.
      outputs: new arrays.
      updated: inputs that are outputs too, changed in place.
    """
    given = {key: x for key, x in inputs.items() if x is not None}
    shapes = {key: jax.ShapeDtypeStruct(given[key].shape, given[key].dtype) for key in updated}
    shapes |= outputs or {}

    def body(*refs):
        kernel(
            dict(zip(given, refs[: len(given)], strict=True)),
            dict(zip(shapes, refs[len(given) :], strict=True)),
        )

    order = list(given)
    results = pl.pallas_call(
        body,
        grid=grid,
        out_shape=tuple(shapes.values()),
        input_output_aliases={order.index(key): i for i, key in enumerate(updated)},
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*given.values())
    return dict(zip(shapes, results, strict=True))


def gather(ref, *index: Any, mask: jax.Array, other: Any = 0) -> jax.Array:
    """`ref[index]` for integer arrays that broadcast together, `other` where `mask` is false."""
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    other = jnp.asarray(other, ref.dtype)
    return pltriton.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=other)


def scatter(ref, value: jax.Array, *index: Any, mask: jax.Array) -> None:
    """Writes `value` to `ref[index]` where `mask` is true."""
    pltriton.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def product(x: jax.Array, y: jax.Array, *, transpose_y: bool = False) -> jax.Array:
    """Float32 `x @ y` or `x @ y.T`: bfloat16 as it is, float32 to its full accuracy."""
    return dot(split(x, "bf16x6"), split(y, "bf16x6"), transpose_y=transpose_y)


def floor_power_of_2(size: int) -> int:
    """The largest power of two that is at most `size`, at least one."""
    return 1 << max(size, 1).bit_length() - 1
