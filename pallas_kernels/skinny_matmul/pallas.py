"""Product of a few rows with a large weight, as a Pallas kernel on the Triton backend.

A program owns a block of the weight's rows and walks along a stretch of its columns. The weight
is the left operand of the tensor cores, whose tiles are tall there, and the rows of `x` are the
right one, cut into tiles of 64 and one smaller: 65 rows cost 80, where a single tile would have to
be of 128. Several programs may share a block's columns; what each of them sums is then left for
the next launch to add, which reads its input anyway. A tall weight has more blocks than run at a
time: only those left over after whole waves are shared, so that no multiprocessor idles meanwhile.
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
_MULTIPROCESSORS = 132  # of a Hopper GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the product is cut.

    Attributes:
      block_n: rows of the weight that a program owns.
      block_k: columns that it reads at a time.
      splits: programs that share a block's columns.
      num_warps: warps of a program.
      num_stages: reads under way at a time, of `block_k` columns each.
      wave: programs that run at a time. Where it is given, blocks in whole waves are not shared,
        only those that are left over.
    """

    block_n: int = 64
    block_k: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 5
    wave: int | None = None

    def __post_init__(self):
        for name, least in (("block_n", MIN_BLOCK), ("block_k", MIN_BLOCK), ("num_warps", 1)):
            check_power(name, getattr(self, name), least)
        least = min(self.splits, self.num_stages, 1 if self.wave is None else self.wave)
        if least < 1:
            raise ValueError(f"splits, num_stages and wave must be at least 1, got {self}")


def default_config(rows: int, outputs: int, inputs: int, parts: bool) -> Config:
    """Returns the cut that is fastest for a weight [outputs, inputs] on Hopper."""
    if not parts:
        wide = 128 if inputs % 128 == 0 else 64
        stages = 4 if rows <= FASTEST_ROWS else 3  # what fits into shared memory
        config = Config(block_n=128, block_k=wide, num_warps=8, num_stages=stages)
        waves, left = divmod(pl.cdiv(outputs, config.block_n), _MULTIPROCESSORS)
        splits = min(_MULTIPROCESSORS // left, inputs // 256) if waves and left else 1
        if splits < 2:
            return config
        return dataclasses.replace(config, splits=splits, wave=_MULTIPROCESSORS)
    blocks = pl.cdiv(outputs, 64)
    splits = max(1, min(2 * _MULTIPROCESSORS // blocks, inputs // 512))
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
    if parts and config.wave:
        raise ValueError(f"a product in parts has all its blocks shared, got {config}")
    if config.splits > 1 and not (parts or config.wave):
        raise ValueError(f"a product in {config.splits} splits comes in parts")
    if parts:
        return _launch(x, weight, 0, config, interpret)[1]
    blocks = pl.cdiv(weight.shape[0], config.block_n)
    alone = blocks // config.wave * config.wave if config.wave else blocks
    product, shares = _launch(x, weight, alone, config, interpret)
    if shares is None:
        return product
    rest = shares.sum(0).astype(x.dtype)
    return rest if product is None else jnp.concatenate([product, rest], axis=1)


# A function of its own to the tracer: a kernel is traced and lowered once for all layers.
@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _launch(x, weight, alone: int, config: Config, interpret: bool):
    """The outputs of the first `alone` blocks [M, N0], and parts [S, M, N - N0] of the others'.

    Either is None where it has no columns.
    """
    rows, outputs = x.shape[0], weight.shape[0]
    first = min(alone * config.block_n, outputs)
    shared = pl.cdiv(outputs - first, config.block_n)
    product = jax.ShapeDtypeStruct((rows, first), x.dtype)
    shares = jax.ShapeDtypeStruct((config.splits, rows, outputs - first), jnp.float32)
    # An output without columns is left out: here and in the kernel None stands for it.
    return pl.pallas_call(
        functools.partial(_kernel, alone=alone, config=config),
        grid=(alone + shared * config.splits,),
        out_shape=(product if alone else None, shares if shared else None),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="skinny_matmul",
    )(x, weight)


def _kernel(x_ref, weight_ref, product_ref, shares_ref, *, alone: int, config: Config):
    program = pl.program_id(0)
    steps = pl.cdiv(x_ref.shape[1], config.block_k)
    stretch = pl.cdiv(steps, config.splits)
    owner = program < alone  # of a whole block; the others have a share of one
    shared, share = (program - alone) // config.splits, (program - alone) % config.splits
    block = jnp.where(owner, program, alone + shared)
    begin = jnp.where(owner, 0, share * stretch)
    end = jnp.where(owner, steps, jnp.minimum(begin + stretch, steps))
    outputs = span(block, config.block_n)
    tiles = _tiles(x_ref.shape[0])

    def step(i, sums):
        columns = span(i, config.block_k)
        weight = load(weight_ref, outputs, columns)
        return tuple(
            total + _dot(weight, load(x_ref, tile, columns))
            for total, tile in zip(sums, tiles, strict=True)
        )

    zeros = tuple(jnp.zeros((config.block_n, tile.size), jnp.float32) for tile in tiles)
    sums = lax.fori_loop(begin, end, step, zeros)
    for total, tile in zip(sums, tiles, strict=True):
        if product_ref is not None:
            store(product_ref, total.T.astype(product_ref.dtype), tile, outputs, when=owner)
        if shares_ref is not None:
            columns = span(shared, config.block_n)
            store(shares_ref, total.T, share, tile, columns, when=~owner)


def _tiles(rows: int) -> list[pl.Slice]:
    """The rows in tiles of 64 and, for the rest, the smallest tile that holds it."""
    whole, rest = divmod(rows, _TILE)
    tiles = [span(i, _TILE) for i in range(whole)]
    return [*tiles, span(0, padded(rest), whole * _TILE)] if rest else tiles


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
