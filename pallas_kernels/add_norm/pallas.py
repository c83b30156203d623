"""Addition and norm in one launch, as a Pallas kernel on the Triton backend.

A program owns a row. It asks for all of it at once, in pieces of 16 bytes a thread, and keeps the
sum in registers until the norm is known: at a few rows nothing but this one wait counts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import span, store
from pallas_kernels.checks import check_power

_LONGEST = 16384  # longer rows would spill from the registers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a program reads its row.

    Attributes:
      block: elements that are read with one instruction.
      num_warps: warps of a program.
    """

    block: int = 2048
    num_warps: int = 8

    def __post_init__(self):
        for name in ("block", "num_warps"):
            check_power(name, getattr(self, name))


def default_config(size: int) -> Config:
    """Returns the cut that is fastest for rows of this size on Hopper."""
    block = min(pl.next_power_of_2(size), 2048)
    return Config(block=block, num_warps=max(1, block // 256))


def refusal(size: int) -> str | None:
    """Why the kernel does not take rows of this size; None if it does."""
    return None if size <= _LONGEST else f"H must be at most {_LONGEST}, got {size}"


def add(
    x: jax.Array,
    delta: jax.Array,
    weight: jax.Array,
    eps: float,
    zero_centred: bool,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns `(x + delta, norm)`. Arguments as in `add_norm`."""
    config = config or default_config(x.shape[1])
    return _launch(x, delta, weight, float(eps), bool(zero_centred), config, interpret)


# A function of its own to the tracer: a kernel is traced and lowered once for all layers.
@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _launch(x, delta, weight, eps: float, zero_centred: bool, config: Config, interpret: bool):
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, zero_centred=zero_centred, config=config),
        grid=(x.shape[0],),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2,
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(x, delta, weight)


def _kernel(
    x_ref,
    delta_ref,
    weight_ref,
    total_ref,
    norm_ref,
    *,
    eps: float,
    zero_centred: bool,
    config: Config,
):
    row, size = pl.program_id(0), x_ref.shape[1]
    pieces = range(pl.cdiv(size, config.block))
    weights = [_load(weight_ref, (), i, config).astype(jnp.float32) for i in pieces]
    split = delta_ref.ndim == 3
    parts = [(i, row) for i in range(delta_ref.shape[0])] if split else [(row,)]
    terms = [
        (_load(x_ref, (row,), i, config), [_load(delta_ref, at, i, config) for at in parts])
        for i in pieces
    ]
    weighed, squares = [], jnp.zeros((config.block,), jnp.float32)
    for i, (x, deltas), weight in zip(pieces, terms, weights, strict=True):
        delta = sum(deltas[1:], start=deltas[0]).astype(x.dtype).astype(jnp.float32)
        total = (x.astype(jnp.float32) + delta).astype(x.dtype)
        store(total_ref, total, row, span(i, config.block))
        y = total.astype(jnp.float32)
        squares += y * y
        # Weighed before the sum is known: it is the weights that would be waited for after it.
        weighed.append(y * (1.0 + weight if zero_centred else weight))
    scale = lax.rsqrt(jnp.sum(squares) / size + eps)
    for i, y in zip(pieces, weighed, strict=True):
        store(norm_ref, (y * scale).astype(norm_ref.dtype), row, span(i, config.block))


def _load(ref, row: tuple, piece: int, config: Config) -> jax.Array:
    """A piece of a row, zeros beyond its end."""
    column = piece * config.block + lax.broadcasted_iota(jnp.int32, (config.block,), 0)
    index = (*(jnp.full(column.shape, i, jnp.int32) for i in row), column)
    if (piece + 1) * config.block <= ref.shape[-1]:
        return pltriton.load(ref.at[index])
    zero = jnp.zeros((), ref.dtype)
    mask = column < ref.shape[-1]
    return pltriton.load(ref.at[index], mask=mask, other=zero)
