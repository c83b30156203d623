"""The layer's inputs in one launch, as a Pallas kernel on the Triton backend.

A program owns a head of queries, keys or values and a block of rows; the last ones along the
first axis make the gates. Each reads the taps of its own channels straight from the inputs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import load, span, store
from pallas_kernels.checks import check_power
from pallas_kernels.gdn_inputs.columns import Columns
from pallas_kernels.gdn_inputs.scales import unit_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Rows and warps of one program."""

    block_n: int = 8
    num_warps: int = 4

    def __post_init__(self):
        for name in ("block_n", "num_warps"):
            check_power(name, getattr(self, name))


def default_config(rows: int) -> Config:
    """Returns the cut that is fastest for this many rows on Hopper."""
    # Little work a program: there is too little of it to fill the card, and latency counts.
    return Config(block_n=min(pl.next_power_of_2(rows), 8), num_warps=1 if rows == 1 else 4)


def prepare(
    x: jax.Array,
    history: jax.Array,
    taps: jax.Array,
    weight: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    key_heads: int,
    key_dim: int,
    columns: Columns,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns the fields of `GDNInputs`. Arguments as in `gdn_inputs`."""
    arrays = (x, history, taps.astype(jnp.int32), weight, a, b, a_log, dt_bias)
    config = config or default_config(x.shape[0])
    return _launch(*arrays, key_heads, key_dim, columns, config, interpret)


# A function of its own to the tracer: a kernel is traced and lowered once for all layers.
@functools.partial(jax.jit, static_argnums=(8, 9, 10, 11, 12))
def _launch(
    x,
    history,
    taps,
    weight,
    a,
    b,
    a_log,
    dt_bias,
    key_heads: int,
    key_dim: int,
    columns: Columns,
    config: Config,
    interpret: bool,
):
    rows, value_heads = taps.shape[0], a_log.shape[0]
    value_dim = (weight.shape[0] - 2 * key_heads * key_dim) // value_heads
    keys = jax.ShapeDtypeStruct((rows, key_heads, key_dim), x.dtype)
    values = jax.ShapeDtypeStruct((rows, value_heads, value_dim), x.dtype)
    gates = jax.ShapeDtypeStruct((rows, value_heads), jnp.float32)
    scales = jax.ShapeDtypeStruct((rows, key_heads), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, columns=columns, config=config),
        grid=(2 * key_heads + value_heads + 1, pl.cdiv(rows, config.block_n)),
        out_shape=(keys, keys, values, gates, gates, scales, scales),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_inputs",
    )(x, history, taps, weight, a, b, a_log, dt_bias)


def _kernel(
    x_ref,
    history_ref,
    taps_ref,
    weight_ref,
    a_ref,
    b_ref,
    a_log_ref,
    dt_bias_ref,
    q_ref,
    k_ref,
    v_ref,
    g_ref,
    beta_ref,
    q_scale_ref,
    k_scale_ref,
    *,
    columns: Columns,
    config: Config,
):
    unit = pl.program_id(0)
    rows = span(pl.program_id(1), config.block_n)
    conv = functools.partial(_convolve, x_ref, history_ref, taps_ref, weight_ref, rows, columns.x)
    _, key_heads, key_dim = k_ref.shape
    _, value_heads, value_dim = v_ref.shape

    def write(ref, scale_ref, first, length):
        head = unit - first
        y = conv(unit * key_dim, key_dim).astype(ref.dtype)
        store(ref, y, rows, head, span(0, y.shape[1]))
        store(scale_ref, unit_scale(y, length), rows, head)

    @pl.when(unit < key_heads)
    def _():
        write(q_ref, q_scale_ref, 0, key_dim**-0.5)

    @pl.when((unit >= key_heads) & (unit < 2 * key_heads))
    def _():
        write(k_ref, k_scale_ref, key_heads, 1.0)

    @pl.when((unit >= 2 * key_heads) & (unit < 2 * key_heads + value_heads))
    def _():
        head = unit - 2 * key_heads
        v = conv(2 * key_heads * key_dim + head * value_dim, value_dim).astype(v_ref.dtype)
        store(v_ref, v, rows, head, span(0, v.shape[1]))

    @pl.when(unit == 2 * key_heads + value_heads)
    def _():
        heads = span(0, pl.next_power_of_2(value_heads))
        vector = lambda ref: load(ref, heads).astype(jnp.float32)[None, :]
        gate = lambda ref, first: load_part(ref, rows, first, value_heads).astype(jnp.float32)
        steps = gate(a_ref, columns.a) + vector(dt_bias_ref)
        steps = jnp.maximum(steps, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(steps)))  # softplus
        store(g_ref, -jnp.exp(vector(a_log_ref)) * steps, rows, heads)
        store(beta_ref, jax.nn.sigmoid(gate(b_ref, columns.b)), rows, heads)


def load_part(ref, rows: pl.Slice, first: jax.Array | int, size: int) -> jax.Array:
    """Returns `size` columns of a matrix from `first` on, zeros beyond them and the last row."""
    block = (rows.size, pl.next_power_of_2(size))
    row = rows.start + lax.broadcasted_iota(jnp.int32, block, 0)
    column = lax.broadcasted_iota(jnp.int32, block, 1)
    return _gather(ref, row, first + column, column < size)


def _convolve(
    x_ref, history_ref, taps_ref, weight_ref, rows: pl.Slice, x_column: int, first, size: int
):
    """SiLU of the convolution for a block of rows and `size` channels, zeros beyond them."""
    block = (rows.size, pl.next_power_of_2(size))
    past, width = history_ref.shape[0], weight_ref.shape[1]
    column = lax.broadcasted_iota(jnp.int32, block, 1)
    inside = column < size
    channel = first + column
    total = jnp.zeros(block, jnp.float32)
    for i in range(width):
        tap_index = jnp.full((), i, jnp.int32)
        source = jnp.broadcast_to(load(taps_ref, rows, tap_index)[:, None], block)
        old = _gather(history_ref, source, channel, inside).astype(x_ref.dtype)
        new = _gather(x_ref, source - past, x_column + channel, inside)
        tap = jnp.where(source < past, old, new).astype(jnp.float32)
        total += tap * _taps(weight_ref, i, first, size).astype(x_ref.dtype).astype(jnp.float32)
    return total * jax.nn.sigmoid(total)


def _gather(ref, row: jax.Array, column: jax.Array, inside: jax.Array) -> jax.Array:
    """`ref[row, column]` where both lie inside, zeros elsewhere."""
    mask = inside & (row >= 0) & (row < ref.shape[0])
    return pltriton.load(ref.at[row, column], mask=mask, other=jnp.zeros((), ref.dtype))


def _taps(ref, tap: int, first, size: int) -> jax.Array:
    """One tap's weights of `size` channels, [1, padded size]."""
    column = lax.broadcasted_iota(jnp.int32, (1, pl.next_power_of_2(size)), 1)
    index = (first + column, jnp.full(column.shape, tap, jnp.int32))
    return pltriton.load(ref.at[index], mask=column < size, other=jnp.zeros((), ref.dtype))
