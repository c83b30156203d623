"""Queries, keys and values in one launch, as a Pallas kernel on the Triton backend.

A program owns a head of queries, keys or values and a block of rows. It reads the head in three
parts, the two halves that are turned into each other and the rest, so that no channel has to move
between threads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention_inputs.columns import HeadColumns
from pallas_kernels.checks import check_power


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Rows and warps of one program."""

    block_n: int = 8
    num_warps: int = 4

    def __post_init__(self):
        for name in ("block_n", "num_warps"):
            check_power(name, getattr(self, name))


def default_config(rows: int) -> Config:
    """Returns the cut for this many rows: a warp has a row or two, and latency counts."""
    block_n = min(pl.next_power_of_2(rows), 4)
    return Config(block_n=block_n, num_warps=block_n)


def prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    eps: float,
    heads: int,
    key_heads: int,
    zero_centred: bool,
    columns: HeadColumns,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns the fields of `AttentionInputs`. Arguments as in `attention_inputs`."""
    arrays = (q, k, v, cos, sin, q_weight[None], k_weight[None])
    config = config or default_config(q.shape[0])
    return _launch(*arrays, eps, heads, key_heads, zero_centred, columns, config, interpret)


# A function of its own to the tracer: a kernel is traced and lowered once for all layers.
@functools.partial(jax.jit, static_argnums=(7, 8, 9, 10, 11, 12, 13))
def _launch(
    q,
    k,
    v,
    cos,
    sin,
    q_weight,
    k_weight,
    eps: float,
    heads: int,
    key_heads: int,
    zero_centred: bool,
    columns: HeadColumns,
    config: Config,
    interpret: bool,
):
    rows, size = q.shape[0], q_weight.shape[1]
    keys = jax.ShapeDtypeStruct((key_heads * rows, size), q.dtype)
    kernel = functools.partial(
        _kernel, eps=eps, zero_centred=zero_centred, columns=columns, config=config
    )
    q, k, v = pl.pallas_call(
        kernel,
        grid=(heads + 2 * key_heads, pl.cdiv(rows, config.block_n)),
        out_shape=(jax.ShapeDtypeStruct((rows, heads * size), q.dtype), keys, keys),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="attention_inputs",
    )(q, k, v, cos, sin, q_weight, k_weight)
    shape = (key_heads, rows, size)
    return q.reshape(rows, heads, size), k.reshape(shape), v.reshape(shape)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a matrix from a column on: what a program reads or writes of an array."""

    ref: Any
    row: jax.Array
    there: jax.Array
    first: jax.Array | int

    def load(self, start: int, size: int) -> jax.Array:
        """Columns from `start` on in float32, zeros beyond `size` and in rows not there."""
        index, mask = self._at(start, size)
        zero = jnp.zeros((), self.ref.dtype)
        return pltriton.load(self.ref.at[index], mask=mask, other=zero).astype(jnp.float32)

    def store(self, start: int, size: int, value: jax.Array) -> None:
        index, mask = self._at(start, size)
        pltriton.store(self.ref.at[index], value.astype(self.ref.dtype), mask=mask)

    def _at(self, start: int, size: int):
        block = (self.row.shape[0], pl.next_power_of_2(size))
        column = lax.broadcasted_iota(jnp.int32, block, 1)
        row = jnp.broadcast_to(self.row[:, None], block)
        return (row, self.first + start + column), self.there[:, None] & (column < size)


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    cos_ref,
    sin_ref,
    q_weight_ref,
    k_weight_ref,
    q_out_ref,
    k_out_ref,
    v_out_ref,
    *,
    eps: float,
    zero_centred: bool,
    columns: HeadColumns,
    config: Config,
):
    rows, size = q_ref.shape[0], q_weight_ref.shape[1]
    heads, key_heads = q_out_ref.shape[1] // size, k_out_ref.shape[0] // rows
    unit = pl.program_id(0)
    row = pl.program_id(1) * config.block_n + lax.broadcasted_iota(jnp.int32, (config.block_n,), 0)
    there = row < rows
    table = [_Rows(ref, row, there, 0) for ref in (cos_ref, sin_ref)]
    once = lax.broadcasted_iota(jnp.int32, (1,), 0)
    weigh = lambda ref: _Rows(ref, once, once == 0, 0)
    turn = functools.partial(_norm_and_turn, table=table, eps=eps, zero_centred=zero_centred)

    @pl.when(unit < heads)
    def _():
        source = _Rows(q_ref, row, there, columns.q + unit * columns.step)
        turn(source, _Rows(q_out_ref, row, there, unit * size), weigh(q_weight_ref))

    @pl.when((unit >= heads) & (unit < heads + key_heads))
    def _():
        head = unit - heads
        source = _Rows(k_ref, row, there, columns.k + head * size)
        turn(source, _Rows(k_out_ref, head * rows + row, there, 0), weigh(k_weight_ref))

    @pl.when(unit >= heads + key_heads)
    def _():
        head = unit - heads - key_heads
        source = _Rows(v_ref, row, there, columns.v + head * size)
        _Rows(v_out_ref, head * rows + row, there, 0).store(0, size, source.load(0, size))


def _norm_and_turn(
    source: _Rows, target: _Rows, weight: _Rows, *, table, eps: float, zero_centred: bool
) -> None:
    """Writes one head's rows, normed and turned."""
    size, half = weight.ref.shape[1], table[0].ref.shape[1]
    parts = [(0, half), (half, half), (2 * half, size - 2 * half)]
    parts = [(start, length) for start, length in parts if length]
    x = [source.load(*part) for part in parts]
    weights = [weight.load(*part) for part in parts]
    cos, sin = (y.load(0, half) for y in table)
    squares = sum(jnp.sum(y * y, axis=1) for y in x)
    scale = lax.rsqrt(squares / size + eps)[:, None]
    if zero_centred:
        weights = [1.0 + w for w in weights]
    a, b, *rest = (y * w for y, w in zip(x, weights, strict=True))
    turned = (a * cos - b * sin, b * cos + a * sin, *rest)
    for part, y in zip(parts, turned, strict=True):
        target.store(*part, y * scale)
