"""Product of a few rows with a large weight, as a Pallas kernel on the Triton backend.

A program owns a block of the weight's rows and walks along a stretch of its columns. The weight
is the left operand of the tensor cores, whose tiles are tall there, and the rows of `x` are the
right one, cut into tiles of 64 and one smaller: 65 rows cost 80, where a single tile would have to
be of 128. Several programs may share a block's columns; what each of them sums is then left for
the next launch to add, which reads its input anyway.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import MIN_BLOCK, load, padded, span, store
from pallas_kernels.checks import check_power

MOST_ROWS = 144  # more would spill their sums from the registers
FASTEST_ROWS = 80  # with a third tile XLA's products are faster
_TILE = 64
_PROGRAMS = 264  # two a multiprocessor of a Hopper GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the product is cut.

    Attributes:
      block_n: rows of the weight that a program owns.
      block_k: columns that it reads at a time.
      splits: programs that share a block's columns.
      num_warps: warps of a program.
      num_stages: reads under way at a time, of `block_k` columns each.
    """

    block_n: int = 64
    block_k: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 5

    def __post_init__(self):
        for name, least in (("block_n", MIN_BLOCK), ("block_k", MIN_BLOCK), ("num_warps", 1)):
            check_power(name, getattr(self, name), least)
        if self.splits < 1 or self.num_stages < 1:
            raise ValueError(f"splits and num_stages must be at least 1, got {self}")


def default_config(rows: int, outputs: int, inputs: int, parts: bool) -> Config:
    """Returns the cut that is fastest for a weight [outputs, inputs] on Hopper."""
    if not parts:
        wide = 128 if inputs % 128 == 0 else 64
        stages = 4 if rows <= FASTEST_ROWS else 3  # what fits into shared memory
        return Config(block_n=128, block_k=wide, num_warps=8, num_stages=stages)
    blocks = pl.cdiv(outputs, 64)
    splits = max(1, min(_PROGRAMS // blocks, inputs // 512))
    return Config(splits=splits)


def refusal(rows: int, inputs: int, dtype) -> str | None:
    """Why the kernel does not take these arguments; None if it does."""
    if dtype != jnp.bfloat16:
        return f"it takes bfloat16, got {jnp.dtype(dtype).name}"
    if rows > MOST_ROWS:
        return f"it takes up to {MOST_ROWS} rows, got {rows}"
    if inputs % 64:
        return f"K must be a multiple of 64, got {inputs}"
    return None


def multiply(
    x: jax.Array,
    weight: jax.Array,
    parts: bool = False,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns the product, or its parts. Arguments as in `skinny_matmul`."""
    config = config or default_config(x.shape[0], weight.shape[0], weight.shape[1], parts)
    if config.splits > 1 and not parts:
        raise ValueError(f"a product in {config.splits} splits comes in parts")
    return _launch(x, weight, parts, config, interpret)


# A function of its own to the tracer: a kernel is traced and lowered once for all layers.
@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _launch(x, weight, parts: bool, config: Config, interpret: bool):
    rows, outputs = x.shape[0], weight.shape[0]
    shape = (config.splits, rows, outputs) if parts else (rows, outputs)
    return pl.pallas_call(
        functools.partial(_kernel, parts=parts, config=config),
        grid=(pl.cdiv(outputs, config.block_n), config.splits),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32 if parts else x.dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="skinny_matmul",
    )(x, weight)


def _kernel(x_ref, weight_ref, out_ref, *, parts: bool, config: Config):
    block, split = pl.program_id(0), pl.program_id(1)
    outputs = span(block, config.block_n)
    tiles = _tiles(x_ref.shape[0])
    steps = pl.cdiv(x_ref.shape[1], config.block_k)
    stretch = pl.cdiv(steps, config.splits)

    def step(i, sums):
        columns = span(i, config.block_k)
        weight = load(weight_ref, outputs, columns)
        return tuple(
            total + _dot(weight, load(x_ref, tile, columns))
            for total, tile in zip(sums, tiles, strict=True)
        )

    zeros = tuple(jnp.zeros((config.block_n, tile.size), jnp.float32) for tile in tiles)
    begin = split * stretch
    sums = lax.fori_loop(begin, jnp.minimum(begin + stretch, steps), step, zeros)
    part = (split,) if parts else ()
    for total, tile in zip(sums, tiles, strict=True):
        store(out_ref, total.T.astype(out_ref.dtype), *part, tile, outputs)


def _tiles(rows: int) -> list[pl.Slice]:
    """The rows in tiles of 64 and, for the rest, the smallest tile that holds it."""
    whole, rest = divmod(rows, _TILE)
    tiles = [span(i, _TILE) for i in range(whole)]
    return [*tiles, span(0, padded(rest), whole * _TILE)] if rest else tiles


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
