"""Commit of several gated delta-rule layers in one launch, as a Pallas kernel on Triton.

A program owns a block of one layer's state, or a piece of its history. It reads it once, adds the
accepted rows and writes it back in place. Every layer's arrays are arguments of their own, so a
program branches to those of its layer, but only to read and to write: branches that are alike
become a choice of addresses, and the code is one for all layers. Code of each layer's own would
be run once or twice by each multiprocessor, and fetching it would take as long as the data does.

The rows are added by one product of bfloat16 terms. One row after the other, each thread would
fetch a key for every row of its part of the state, which took longer than the state's traffic.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import load, padded, span, store
from pallas_kernels.checks import check_power
from pallas_kernels.splitting import dot, split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut.

    Attributes:
      layers: layers of one launch; each adds eight or nine arguments and three branches.
      block_k: key rows of one program's block of a state.
      block_v: value columns of it.
      num_warps: warps of a program.
    """

    layers: int = 16
    block_k: int = 64
    block_v: int = 64
    num_warps: int = 4

    @property
    def block_c(self) -> int:
        """Channels of a program that owns history."""
        return 256 * self.num_warps

    def __post_init__(self):
        # Fewer elements than threads would be read and written by several threads, which race.
        for name, least in (("block_k", 16), ("block_v", 16), ("num_warps", 1)):
            check_power(name, getattr(self, name), least)
        if self.layers < 1 or self.num_warps > 8:
            raise ValueError(f"layers must be at least 1 and num_warps at most 8, got {self}")


def default_config(key_dim: int, value_dim: int) -> Config:
    """Returns the cut that is fastest for these head sizes on Hopper."""
    return Config(block_k=min(padded(key_dim), 64), block_v=min(padded(value_dim), 64))


def advance(
    states: tuple[jax.Array, ...],
    histories: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    us: tuple[jax.Array, ...],
    log_decays: tuple[jax.Array, ...],
    inputs: tuple[jax.Array, ...],
    path: jax.Array,
    count: jax.Array,
    key_scales: tuple[jax.Array, ...] | None = None,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns `(states, histories)`. Arguments as in `commit_linear`, `count` int32."""
    if config is None:
        config = default_config(*states[0].shape[1:])
    scales = () if key_scales is None else (key_scales,)
    columns = (keys, us, log_decays, *scales, inputs, states, histories)
    advanced = []
    for start in range(0, len(states), config.layers):
        group = [column[start : start + config.layers] for column in columns]
        advanced += _launch(group, path, count, config, interpret)
    return tuple(state for state, _ in advanced), tuple(history for _, history in advanced)


# A function of its own to the tracer: groups of one size are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _launch(group, path, count, config: Config, interpret: bool):
    """Advances a group of layers; returns `(state, history)` of each."""
    states, histories = group[-2:]
    arguments = (path, count[None], *(x for column in group for x in column))
    updated = (*states, *histories)
    pieces = pl.cdiv(histories[0].shape[1], config.block_c)
    out = pl.pallas_call(
        functools.partial(_kernel, layers=len(states), config=config),
        # Programs that run together belong to one layer: they share its keys and its branch.
        grid=(_state_blocks(states[0], config) + pieces, len(states)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        input_output_aliases={len(arguments) - len(updated) + i: i for i in range(len(updated))},
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="commit_linear",
    )(*arguments)
    return list(zip(out[: len(states)], out[len(states) :], strict=True))


def _state_blocks(state, config: Config) -> int:
    heads, key_dim, value_dim = state.shape
    return heads * pl.cdiv(key_dim, config.block_k) * pl.cdiv(value_dim, config.block_v)


def _kernel(path_ref, count_ref, *refs, layers: int, config: Config):
    unit, layer = pl.program_id(0), pl.program_id(1)
    columns = [refs[i : i + layers] for i in range(0, len(refs), layers)]
    *pending, inputs, states, histories, states_out, histories_out = columns
    pending = list(zip(*pending, strict=True))
    blocks = _state_blocks(states[0], config)

    @pl.when(unit < blocks)
    def _():
        _advance_state(path_ref, count_ref, pending, states, states_out, unit, layer, config)

    @pl.when(unit >= blocks)
    def _():
        channels = span(unit - blocks, config.block_c)
        shift = [
            functools.partial(_advance_history, path_ref, count_ref, *refs, channels)
            for refs in zip(inputs, histories, histories_out, strict=True)
        ]
        _branch(layer, shift)


def _branch(layer: jax.Array, choices: Sequence[Callable]):
    """The result of `choices[layer]`, found by halving."""
    if len(choices) == 1:
        return choices[0]()
    half = len(choices) // 2
    return lax.cond(
        layer < half,
        lambda: _branch(layer, choices[:half]),
        lambda: _branch(layer - half, choices[half:]),
    )


def _advance_state(path_ref, count_ref, pending, states, states_out, unit, layer, config: Config):
    heads, key_dim, value_dim = states[0].shape
    across = pl.cdiv(value_dim, config.block_v)
    down = pl.cdiv(key_dim, config.block_k)
    head = lax.div(unit, across * down)
    key_head = lax.div(head, heads // pending[0][0].shape[1])
    keys = span(lax.rem(lax.div(unit, across), down), config.block_k)
    columns = span(lax.rem(unit, across), config.block_v)
    count = count_ref[0]
    step = lax.broadcasted_iota(jnp.int32, (padded(path_ref.shape[0]),), 0)
    live = step < count
    row = jnp.where(live, load(path_ref, span(0, step.size)), 0)

    def fetch(i):
        k_ref, u_ref, log_decay_ref, *scale_ref = pending[i]
        log_decay = _pick(log_decay_ref, row, live, head)
        last = jnp.sum(jnp.where(step == count - 1, log_decay, 0.0))
        weight = jnp.exp(last - log_decay)
        for ref in scale_ref:
            weight = weight * _pick(ref, row, live, key_head)
        u = _gather(u_ref, row, live, head, columns)
        k = _gather(k_ref, row, live, key_head, keys)
        return k, weight[:, None] * u, jnp.exp(last)

    k, u, decay = _branch(layer, [functools.partial(fetch, i) for i in range(len(states))])
    added = dot(split(k.T, "bf16x6"), split(u, "bf16x6"))

    # Read only now: Triton cannot place a branch's result in the layout of a product's sum.
    def update(i):
        state = decay * load(states[i], head, keys, columns) + added
        store(states_out[i], state, head, keys, columns)

    _branch(layer, [functools.partial(update, i) for i in range(len(states))])


def _gather(ref, rows: jax.Array, live: jax.Array, head: jax.Array, columns: pl.Slice):
    """`ref[rows, head, columns]`, zeros in rows that are not live and beyond the last axis."""
    shape = (rows.size, columns.size)
    column = columns.start + lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(live[:, None], shape) & (column < ref.shape[2])
    index = (jnp.broadcast_to(rows[:, None], shape), jnp.full(shape, head, jnp.int32), column)
    return pltriton.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def _pick(ref, rows: jax.Array, live: jax.Array, head: jax.Array) -> jax.Array:
    """`ref[rows, head]`, zeros in rows that are not live."""
    return pltriton.load(ref.at[rows, jnp.full(rows.shape, head, jnp.int32)], mask=live, other=0.0)


def _advance_history(path_ref, count_ref, inputs_ref, history_ref, history_out, channels):
    count, width = count_ref[0], history_ref.shape[0]
    line = [jnp.full((), i, jnp.int32) for i in range(width)]
    old = [load(history_ref, i, channels) for i in line]  # all before the first write
    for i in range(width):
        # Row `count + i` of (history, path).
        row = path_ref[jnp.maximum(count + i - width, 0)]
        value = load(inputs_ref, row, channels).astype(history_out.dtype)
        for source in range(i + 1, width):
            value = jnp.where(count + i == source, old[source], value)
        store(history_out, value, line[i], channels)
