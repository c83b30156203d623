"""Commit of several gated delta-rule layers in one launch, as a Pallas kernel on Triton.

A program owns a block of one layer's state, or a piece of its history. It reads it once, adds the
accepted rows and writes it back in place. Every layer's arrays are arguments of their own, so a
program branches to those of its layer.

The rows are added by float32 multiply-adds: 16 of them cost less than the state's traffic, lose
nothing of float32, and leave the state in the layout it was loaded in.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import load, span, store
from pallas_kernels.splitting import dot, split

_MIN_BLOCK = 16  # a shorter contraction on tensor cores is silently wrong

# The notice is about the backend's future, and nothing a caller can act on.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut.

    Blocks shorter than the threads of a program are loaded where they are used; longer ones go
    through shared memory first.

    Attributes:
      layers: layers of one launch; each adds eight arguments and a branch.
      block_k: key rows of one program's block of a state.
      block_v: value columns of it.
      rows: path rows fetched at a time.
      num_warps: warps of a program.
      tensor_cores: adds all rows by one product of split bfloat16 terms instead.
    """

    layers: int = 12
    block_k: int = 64
    block_v: int = 64
    rows: int = 4
    num_warps: int = 4
    tensor_cores: bool = False

    @property
    def block_c(self) -> int:
        """Channels of a program that owns history."""
        return 256 * self.num_warps

    def __post_init__(self):
        # Fewer elements than threads would be read and written by several threads, which race.
        for name, least in (("block_k", 16), ("block_v", 16), ("rows", 1), ("num_warps", 1)):
            size = getattr(self, name)
            if size < least or size & (size - 1):
                raise ValueError(f"{name} must be a power of two >= {least}, got {size}")
        if self.layers < 1 or self.num_warps > 8:
            raise ValueError(f"layers must be at least 1 and num_warps at most 8, got {self}")


def default_config(key_dim: int, value_dim: int) -> Config:
    """Returns the cut that is fastest for these head sizes on Hopper."""
    return Config(block_k=min(_block(key_dim), 64), block_v=min(_block(value_dim), 64))


def advance(
    states: tuple[jax.Array, ...],
    histories: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    us: tuple[jax.Array, ...],
    log_decays: tuple[jax.Array, ...],
    inputs: tuple[jax.Array, ...],
    path: jax.Array,
    count: jax.Array,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns `(states, histories)`. Arguments as in `commit_linear`, `count` int32."""
    if config is None:
        config = default_config(*states[0].shape[1:])
    columns = (keys, us, log_decays, inputs, states, histories)
    advanced = []
    for start in range(0, len(states), config.layers):
        group = [column[start : start + config.layers] for column in columns]
        advanced += _launch(group, path, count, config, interpret)
    return tuple(state for state, _ in advanced), tuple(history for _, history in advanced)


# A function of its own to the tracer: groups of one size are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _launch(group, path, count, config: Config, interpret: bool):
    """Advances a group of layers; returns `(state, history)` of each."""
    layers = len(group[0])
    arguments = (path, count[None], *(x for column in group for x in column))
    updated = (*group[4], *group[5])
    pieces = pl.cdiv(group[5][0].shape[1], config.block_c)
    out = pl.pallas_call(
        functools.partial(_kernel, layers=layers, config=config),
        # Programs that run together belong to one layer: they share its keys and its branch.
        grid=(_state_blocks(group[4][0], config) + pieces, layers),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        input_output_aliases={len(arguments) - len(updated) + i: i for i in range(len(updated))},
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="commit_linear",
    )(*arguments)
    return list(zip(out[:layers], out[layers:], strict=True))


def _state_blocks(state, config: Config) -> int:
    heads, key_dim, value_dim = state.shape
    return heads * pl.cdiv(key_dim, config.block_k) * pl.cdiv(value_dim, config.block_v)


def _kernel(path_ref, count_ref, *refs, layers: int, config: Config):
    unit, layer = pl.program_id(0), pl.program_id(1)
    path = (path_ref, count_ref)
    columns = [refs[i * layers : (i + 1) * layers] for i in range(8)]
    for i, mine in enumerate(zip(*columns, strict=True)):
        k_ref, u_ref, log_decay_ref, inputs_ref, state_ref, history_ref, state_out, history_out = (
            mine
        )
        pending = (k_ref, u_ref, log_decay_ref)
        blocks = _state_blocks(state_ref, config)
        pl.when((layer == i) & (unit < blocks))(
            functools.partial(_advance_state, path, pending, state_ref, state_out, unit, config)
        )
        pl.when((layer == i) & (unit >= blocks))(
            functools.partial(
                _advance_history, path, inputs_ref, history_ref, history_out, unit - blocks, config
            )
        )


def _advance_state(path, pending, state_ref, state_out, unit, config: Config):
    heads, key_dim, value_dim = state_ref.shape
    across = pl.cdiv(value_dim, config.block_v)
    down = pl.cdiv(key_dim, config.block_k)
    head = lax.div(unit, across * down)
    keys = span(lax.rem(lax.div(unit, across), down), config.block_k)
    columns = span(lax.rem(unit, across), config.block_v)
    key_head = head // (heads // pending[0].shape[1])
    # Asked for before anything else, so that it is under way while the rows are fetched.
    state = load(state_ref, head, keys, columns)
    path_ref, count_ref = path
    last = pending[2][path_ref[count_ref[0] - 1], head]
    add = _by_product if config.tensor_cores else _by_rows
    added = add(path, pending, last, (head, key_head, keys, columns), config)
    store(state_out, jnp.exp(last) * state + added, head, keys, columns)


def _by_rows(path, pending, last: jax.Array, place, config: Config) -> jax.Array:
    """What the accepted rows add to the state, [block_k, block_v]."""
    path_ref, count_ref = path
    k_ref, u_ref, log_decay_ref = pending
    head, key_head, keys, columns = place
    count = count_ref[0]

    def fetch(j):
        row = path_ref[jnp.minimum(j, count - 1)]
        k = load(k_ref, row, key_head, keys).astype(jnp.float32)
        u = load(u_ref, row, head, columns)
        weight = jnp.exp(last - log_decay_ref[row, head])
        return k, jnp.where(j < count, weight, 0.0) * u

    def add(trip, total):
        fetched = [fetch(trip * config.rows + offset) for offset in range(config.rows)]
        for k, u in fetched:
            total += k[:, None] * u[None, :]
        return total

    total = jnp.zeros((config.block_k, config.block_v), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(count, config.rows), add, total)


def _by_product(path, pending, last: jax.Array, place, config: Config) -> jax.Array:
    """The same by one product over the whole path."""
    path_ref, count_ref = path
    k_ref, u_ref, log_decay_ref = pending
    head, key_head, keys, columns = place
    size = _block(path_ref.shape[0])
    live = lax.broadcasted_iota(jnp.int32, (size,), 0) < count_ref[0]
    row = jnp.where(live, load(path_ref, span(0, size)), path_ref[0])
    k = _gather(k_ref, row, key_head, keys)
    u = _gather(u_ref, row, head, columns)
    log_decay = pltriton.load(log_decay_ref.at[row, jnp.full((size,), head, jnp.int32)])
    u = jnp.where(live[:, None], jnp.exp(last - log_decay)[:, None] * u, 0.0)
    return dot(split(k.T, "bf16x6"), split(u, "bf16x6"))


def _gather(ref, rows: jax.Array, head: jax.Array, columns: pl.Slice) -> jax.Array:
    """`ref[rows, head, columns]`, zeros beyond the last axis."""
    shape = (rows.size, columns.size)
    column = columns.start + lax.broadcasted_iota(jnp.int32, shape, 1)
    index = (jnp.broadcast_to(rows[:, None], shape), jnp.full(shape, head, jnp.int32), column)
    return pltriton.load(ref.at[index], mask=column < ref.shape[2], other=jnp.zeros((), ref.dtype))


def _advance_history(path, inputs_ref, history_ref, history_out, piece, config: Config):
    path_ref, count_ref = path
    channels = span(piece, config.block_c)
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


def _block(size: int) -> int:
    return max(_MIN_BLOCK, pl.next_power_of_2(size))
