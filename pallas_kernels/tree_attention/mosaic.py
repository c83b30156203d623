"""Splits of the keys on Hopper's own instructions, as a Pallas kernel on the Mosaic GPU backend.

Three warp groups make a program. One asks for blocks of 64 keys and values, which the card's
copying unit brings into shared memory; the other two take 64 query rows each through an online
softmax, in turns: while one multiplies, the other weighs (FlashAttention-3, arXiv 2407.08608).

What needs a mask is put before the cache as a few blocks: the rows of the cache beyond whole
blocks, and the tree's own. So no whole block of the cache is masked.
"""

import dataclasses
import functools
import inspect
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention.gate import Gate
from pallas_kernels.tree_attention.hopper import TILE, refusal
from pallas_kernels.tree_attention.join import NOTHING, Parts, join, share_out

_Sums = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  # of a product, in registers
_COLUMNS = 32  # of a mix that are written at a time
_SHARED = 207 * 1024  # bytes of shared memory for queries, keys and values
_REGISTERS = {"copying": 40, "multiplying": 232}  # of a thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the launch is cut.

    Attributes:
      programs: programs that run side by side, one on a multiprocessor.
      stages: blocks of keys, and of values, that have a place in shared memory.
    """

    programs: int = 132
    stages: int = 2

    def __post_init__(self):
        if min(self.programs, self.stages) < 1:
            raise ValueError(f"programs and stages must be at least 1, got {self}")


def default_config(size: int) -> Config:
    """Returns the cut that is fastest for heads of this size."""
    return Config(stages=2 if size > 128 else 4)


def attend(
    q: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    visible: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    gate: Gate | None = None,
    config: Config | None = None,
    interpreter: typing.Any = None,
) -> jax.Array:
    """Returns [N, H, D] in the type of `q`. Shapes as in `tree_attention`.

    With an `interpreter`, Pallas' parameters of its own for Mosaic GPU, it runs on a CPU.

    Raises:
      NotImplementedError: a type, size of heads or capacity that it does not take.
      ValueError: more stages than shared memory has room for.
    """
    nodes, heads, size = q.shape
    groups, capacity = keys.shape[:2]
    if reason := refusal(size, capacity, q.dtype, None):
        raise NotImplementedError(f"tree_attention on Mosaic GPU: {reason}")
    config = config or default_config(size)
    room = _SHARED // (4 * TILE * size) - 1  # queries take as much as a stage
    if config.stages > room:
        raise ValueError(f"heads of {size} columns have room for {room} stages, got {config}")
    length = jnp.clip(length, 0, capacity)
    ratio = heads // groups
    row_blocks = pl.cdiv(nodes * ratio, 2 * TILE)
    height = row_blocks * 2 * TILE
    rows = q.reshape(nodes, groups, ratio, size).swapaxes(0, 1).reshape(groups, -1, size)
    rows = jnp.pad(rows, ((0, 0), (0, height - nodes * ratio), (0, 0)))
    edges, seen = _edges(own_keys, own_values, visible, keys, values, length, ratio, height)
    edge_blocks = edges.shape[2] // TILE
    most = edge_blocks + capacity // TILE
    splits = max(1, min(config.programs // (groups * row_blocks), most))

    flat = jax.ShapeDtypeStruct((splits, groups, height), jnp.float32)
    mix = jax.ShapeDtypeStruct((*flat.shape, size), jnp.float32)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tile = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=swizzled)
    parts = plgpu.kernel(
        functools.partial(
            _kernel,
            # Scores to the base of two, whose exponential is one instruction.
            factor=scale * math.log2(math.e),
            stages=config.stages,
            interpret=interpreter is not None,
        ),
        out_type=(mix, flat, flat),
        grid=(splits, groups, row_blocks),  # those that share keys run next to each other
        grid_names=("split", "head", "row_block"),
        num_threads=3,
        kernel_name="tree_attention_mosaic",
        thread_name="warp_group",
        scratch_types=[
            tile((2, TILE, size)),
            tile((config.stages, TILE, size)),
            tile((config.stages, TILE, size)),
            plgpu.SMEM((2, TILE, _COLUMNS), jnp.float32),
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.Barrier(num_barriers=2),
            *(plgpu.Barrier(num_barriers=config.stages) for _ in range(2)),
            *(plgpu.Barrier(num_arrivals=2, num_barriers=config.stages) for _ in range(2)),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter,
    )(length.reshape(1), rows, edges, seen, keys, values)
    blocks = functools.partial(_blocks, edges=edge_blocks)
    return join(Parts(*parts), length, blocks, q, gate, interpreter is not None)


def _edges(own_keys, own_values, visible, keys, values, length, ratio: int, height: int):
    """Keys and values that need a mask, [2, G, E, D], and who sees them, 1 or 0, [height, E].

    The cache's rows beyond whole blocks come first, then the tree's own, each filled up with zeros
    to whole blocks. What nobody sees is zero, too: it may be no number.
    """
    nodes = visible.shape[0]
    start = length // TILE * TILE
    inside = jnp.minimum(start, keys.shape[1] - TILE)
    tail = lambda x: lax.dynamic_slice_in_dim(x, inside, TILE, axis=1)
    space = -nodes % TILE
    past = inside + jnp.arange(TILE, dtype=jnp.int32)
    past = (past >= start) & (past < length)
    own = jnp.pad(visible, ((0, 0), (0, space)))
    seen = jnp.concatenate([jnp.broadcast_to(past, (nodes, TILE)), own], axis=1)
    used = jnp.concatenate([past, jnp.any(own, axis=0)])[None, :, None]

    def line(cache, own):
        both = jnp.concatenate([tail(cache), jnp.pad(own, ((0, 0), (0, space), (0, 0)))], axis=1)
        return jnp.where(used, both, jnp.zeros((), both.dtype))

    seen = jnp.repeat(seen.astype(jnp.float32), ratio, axis=0)
    seen = jnp.pad(seen, ((0, height - nodes * ratio), (0, 0)))
    return jnp.stack([line(keys, own_keys), line(values, own_values)]), seen


def _blocks(length: jax.Array, edges: int) -> jax.Array:
    """Blocks of keys in all: those with a mask, then whole ones of the cache."""
    return edges + lax.div(length, jnp.int32(TILE))


def _kernel(
    length_ref,
    q_ref,
    edges_ref,
    seen_ref,
    keys_ref,
    values_ref,
    mix_ref,
    top_ref,
    total_ref,
    q_smem,
    k_smem,
    v_smem,
    mix_smem,
    row_smem,
    q_read,
    k_read,
    v_read,
    k_free,
    v_free,
    turn,
    *,
    factor: float,
    stages: int,
    interpret: bool,
):
    row_block, head = lax.axis_index("row_block"), lax.axis_index("head")
    split, group = lax.axis_index("split"), lax.axis_index("warp_group")
    edges, size = seen_ref.shape[1] // TILE, q_ref.shape[2]
    blocks = _blocks(length_ref[0], edges)
    share = share_out(blocks, mix_ref.shape[0])[0]
    first = jnp.minimum(split * share, blocks)
    count = jnp.minimum(share, blocks - first)

    def slot(i):
        return lax.rem(i, jnp.int32(stages))

    def copy():
        plgpu.set_max_registers(_REGISTERS["copying"], action="decrease")

        def bring(i, edge_ref, cache_ref, smem, read, free):
            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(free.at[slot(i)])

            block = first + i
            for ref, there, start in (
                (edge_ref, block < edges, block),
                (cache_ref, block >= edges, block - edges),
            ):

                @pl.when(there)
                def _(ref=ref, start=start):
                    rows = pl.ds(start * TILE, TILE)
                    plgpu.copy_gmem_to_smem(ref.at[head, rows], smem.at[slot(i)], read.at[slot(i)])

        @pl.loop(0, count)
        def _(i):
            bring(i, edges_ref.at[0], keys_ref, k_smem, k_read, k_free)
            bring(i, edges_ref.at[1], values_ref, v_smem, v_read, v_free)

        # Before shared memory is given up, nobody reads there any more.
        @pl.loop(jnp.maximum(count - stages, 0), count)
        def _(i):
            for free in (k_free, v_free):
                plgpu.barrier_wait(free.at[slot(i)])

    def attend():
        plgpu.set_max_registers(_REGISTERS["multiplying"], action="increase")
        q, rows = q_smem.at[group], pl.ds((2 * row_block + group) * TILE, TILE)
        plgpu.copy_gmem_to_smem(q_ref.at[head, rows], q, q_read.at[group])
        plgpu.barrier_wait(q_read.at[group])

        # Two meetings a block. The second group begins one later than the first, so that the
        # products of one fall between the meetings where the other weighs.
        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def step(i, state, masked: bool):
            mix, top, total = state
            scores = _scores(q, k_smem.at[slot(i)], take_turns, interpret)
            plgpu.barrier_arrive(k_free.at[slot(i)])
            if masked:
                columns = pl.ds((first + i) * TILE, TILE)
                seen = _read(seen_ref.at[rows, columns], interpret) > 0.0
                scores = jnp.where(seen, scores, -jnp.inf)
            new = jnp.maximum(top, scores.max(axis=1) * factor)
            kept = jnp.exp2(top - new)
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new, scores.shape, [0]))
            weights = weights.astype(q.dtype)
            mix *= lax.broadcast_in_dim(kept, mix.shape, [0])
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_read.at[slot(i)])
            plgpu.barrier_wait(turn)
            # Of the rounded weights: where few keys count, most of the rounding cancels.
            total = total * kept + weights.astype(jnp.float32).sum(axis=1)

            def wait_for_next():
                @pl.when(i + 1 < count)
                def _():
                    plgpu.barrier_wait(k_read.at[slot(i + 1)])

            mix = _add(mix, weights, v_smem.at[slot(i)], wait_for_next, interpret)
            plgpu.barrier_arrive(v_free.at[slot(i)])
            return mix, new, total

        full = functools.partial(_full, interpret=interpret)
        state = full((TILE, size), 0.0), full((TILE,), NOTHING), full((TILE,), 0.0)

        @pl.when(count > 0)
        def _():
            plgpu.barrier_wait(k_read.at[0])

        pl.when(group == 1)(take_turns)
        masked = jnp.clip(edges - first, 0, count)
        state = lax.fori_loop(0, masked, functools.partial(step, masked=True), state)
        state = lax.fori_loop(masked, count, functools.partial(step, masked=False), state)
        pl.when(group == 0)(take_turns)

        @pl.when(count > 0)
        def _():
            mix, top, total = state
            for value, ref in ((top, top_ref), (total, total_ref)):
                _write(value, row_smem.at[group], ref.at[split, head, rows])
            for column in range(0, size, _COLUMNS):
                columns = pl.ds(column, _COLUMNS)
                piece = mix[:, column : column + _COLUMNS]
                _write(piece, mix_smem.at[group], mix_ref.at[split, head, rows, columns])
            plgpu.wait_smem_to_gmem(0)

    pl.when(group == 2)(copy)
    pl.when(group < 2)(attend)


def _write(value: jax.Array, smem, ref) -> None:
    """Puts a value into device memory by way of shared memory, once that has been read out."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, ref)


# The interpreter knows neither layouts nor accumulators that outlive a product.


def _full(shape: tuple[int, ...], value: float, interpret: bool) -> jax.Array:
    """A constant in the layout of products, or in that of their rows."""
    x = jnp.full(shape, value, jnp.float32)
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return x if interpret else plgpu.layout_cast(x, layout)


def _read(ref, interpret: bool) -> jax.Array:
    """A matrix in device memory, in the layout of products."""
    if interpret:
        return ref[...]
    # Before 0.11 an index beside the reference is needed, since then it is deprecated.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    args = ((),) if index and index.default is inspect.Parameter.empty else ()
    return plgpu.load(ref, *args, layout=plgpu.Layout.WGMMA, optimized=False)


def _scores(q, keys, meanwhile, interpret: bool) -> jax.Array:
    """The product of rows with keys; `meanwhile` runs while it is under way."""
    if interpret:
        meanwhile()
        return _dot(q[...], keys[...], transpose=True)

    def multiply(total):
        plgpu.wgmma(total, q, _transposed(keys))
        meanwhile()
        return total[...]

    shape = (q.shape[0], keys.shape[0])
    return pl.run_scoped(multiply, _Sums(shape, jnp.float32))


def _add(mix: jax.Array, weights: jax.Array, values, meanwhile, interpret: bool) -> jax.Array:
    """`mix + weights @ values`; `meanwhile` runs while the product is under way."""
    if interpret:
        meanwhile()
        return mix + _dot(weights, values[...], transpose=False)

    def multiply(total):
        plgpu.wgmma(total, weights, values)
        meanwhile()

    return pl.run_state(multiply)(_Sums.init(mix))  # pyright: ignore[reportReturnType]


def _dot(x: jax.Array, y: jax.Array, transpose: bool) -> jax.Array:
    contract = (((1,), (1 if transpose else 0,)), ((), ()))
    return lax.dot_general(x, y, contract, preferred_element_type=jnp.float32)


def _transposed(ref):
    # References have had the method since 0.11.
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))
