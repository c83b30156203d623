"""Attention over a cache cut into splits, as Pallas kernels on the Triton backend.

The rows of a key head are flattened: N tree rows times the query heads that share it. A program
takes a block of them and one split of the keys through an online softmax and leaves its mix, its
maximum and its sum; a second launch joins the splits. The own keys are the first blocks of the
first splits. Splits are cut from the true length, so all programs have work until it is too
short for that, and those beyond it leave at once.
"""

import dataclasses
import functools
import math
import struct

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import MIN_BLOCK, padded, span
from pallas_kernels.checks import check_power
from pallas_kernels.splitting import dot, split
from pallas_kernels.tree_attention.gate import Gate
from pallas_kernels.tree_attention.join import NOTHING, Parts, inside_columns, join, share_out

MAX_SIZE = 256
_PROCESSORS = 132
_WORD = 32  # bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the first launch is cut.

    Attributes:
      block_q: flattened query rows of a program.
      block_k: keys taken at a time.
      block_d: columns of keys and values taken at a time.
      programs: programs that run side by side; the number of splits follows.
      num_warps, num_stages: of a program; stages of loads under way.
      ahead: multiply the next block's scores before this block's values, so that the tensor
        cores work through the softmax.
    """

    block_q: int
    block_k: int
    block_d: int
    programs: int = _PROCESSORS
    num_warps: int = 4
    num_stages: int = 2
    ahead: bool = False

    def __post_init__(self):
        for name in ("block_q", "block_k", "block_d"):
            check_power(name, getattr(self, name), MIN_BLOCK)
        check_power("num_warps", self.num_warps)
        if self.programs < 1 or self.num_stages < 1:
            raise ValueError(f"programs and num_stages must be at least 1, got {self}")


def default_config(rows: int, size: int, dtype: jnp.dtype) -> Config:
    """Returns the cut that is fastest on Hopper for `rows` flattened rows of `size` columns."""
    columns = padded(size)
    if dtype == jnp.float32:  # three terms a value: small blocks keep them in registers
        block_q = min(padded(rows), 32)
        return Config(
            block_q=block_q,
            block_k=32,
            block_d=min(columns, 64),
            programs=2 * _PROCESSORS,
            num_warps=block_q // 4,
            num_stages=1,
        )
    if rows <= 32:  # bound by memory: many loads under way, two programs a processor
        return Config(
            block_q=padded(rows),
            block_k=32,
            block_d=columns,
            programs=2 * _PROCESSORS,
            num_stages=4,
        )
    # A warp group takes 64 rows; two of them read every key once from the cache.
    block_q = min(padded(rows), 128)
    return Config(
        block_q=block_q,
        block_k=64,
        block_d=columns,
        num_warps=8 if block_q == 128 else 4,
        num_stages=2,
        ahead=True,
    )


def refusal(size: int) -> str | None:
    """Returns why the kernel does not take heads of this size, None if it does."""
    if size > MAX_SIZE:
        return f"heads of at most {MAX_SIZE} columns are supported, got {size}"
    return None


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
    window: int | None = None,
    gate: Gate | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns [N, H, D] in the type of `q`. Shapes as in `tree_attention`."""
    nodes, heads, size = q.shape
    groups, capacity = keys.shape[:2]
    rows = nodes * (heads // groups)
    if config is None:
        config = default_config(rows, size, q.dtype)
    key_blocks = pl.cdiv(capacity, config.block_k)
    if window is not None:
        key_blocks = min(key_blocks, pl.cdiv(window - 1, config.block_k) + 1)
    key_blocks += pl.cdiv(nodes, config.block_k)
    row_blocks = pl.cdiv(rows, config.block_q)
    splits = max(1, min(config.programs // (groups * row_blocks), key_blocks))
    height = row_blocks * config.block_q
    length = jnp.clip(length, 0, capacity)

    part = jax.ShapeDtypeStruct((splits, groups, height), jnp.float32)
    mix = jax.ShapeDtypeStruct((splits, groups, height, size), jnp.float32)
    parts = pl.pallas_call(
        functools.partial(
            _split_kernel,
            heads=heads,
            # Scores to the base of two, whose exponential is one instruction.
            factor=scale * math.log2(math.e),
            window=window,
            config=config,
            packed=config.ahead and q.dtype == jnp.bfloat16 and not interpret,
        ),
        grid=(row_blocks, groups, splits),  # those that share keys run next to each other
        out_shape=(mix, part, part),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="tree_attention_splits",
    )(
        length.reshape(1),
        q.reshape(nodes * heads, size),
        own_keys,
        own_values,
        *_pack(visible),
        keys,
        values,
    )
    blocks = functools.partial(_blocks, nodes=nodes, window=window, block_k=config.block_k)
    return join(Parts(*parts), length, blocks, q, gate, interpret)


def _split_kernel(
    length_ref,
    q_ref,
    own_keys_ref,
    own_values_ref,
    visible_ref,
    used_ref,
    keys_ref,
    values_ref,
    mix_ref,
    top_ref,
    sum_ref,
    *,
    heads: int,
    factor: float,
    window: int | None,
    config: Config,
    packed: bool,
):
    inputs = (q_ref, own_keys_ref, own_values_ref, visible_ref, used_ref, keys_ref, values_ref)
    groups = keys_ref.shape[0]
    nodes, splits = own_keys_ref.shape[1], mix_ref.shape[0]
    row_block, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length = length_ref[0]
    blocks = _blocks(length, nodes, window, config.block_k)
    share = share_out(blocks, splits)[0]
    first = part * share
    last = jnp.minimum(first + share, blocks)
    start = row_block * config.block_q

    @pl.when(first < last)
    def _():
        top, total, mixed = _attend_block(
            inputs, length, head, start, first, last, heads, factor, window, config, packed
        )
        rows = pl.Slice(start, config.block_q)
        pltriton.store(top_ref.at[part, head, rows], top)
        pltriton.store(sum_ref.at[part, head, rows], total)
        row = start + lax.broadcasted_iota(jnp.int32, mixed[0].shape, 0)
        real = row < nodes * (heads // groups)
        for chunk, x in enumerate(mixed):
            columns = span(chunk, config.block_d)
            inside = inside_columns(mix_ref.shape[3], chunk, x.shape)
            mask = real if inside is None else real & inside
            pltriton.store(mix_ref.at[part, head, rows, columns], x, mask=mask)


def _first_seen(length: jax.Array, window: int | None) -> jax.Array | int:
    """The first cache row that any row sees: later rows' windows begin later."""
    return 0 if window is None else jnp.maximum(length - (window - 1), 0)


def _blocks(length: jax.Array, nodes: int, window: int | None, block_k: int) -> jax.Array:
    """Key blocks in all, own ones first."""
    blocks = pl.cdiv(nodes, block_k) + pl.cdiv(length, block_k)
    if window is not None:
        blocks -= lax.div(_first_seen(length, window), block_k)
    return blocks


def _attend_block(
    inputs,
    length,
    head,
    start,
    first,
    last,
    heads: int,
    factor: float,
    window: int | None,
    config: Config,
    packed: bool,
):
    """Maximum, sum and mix of a block of rows over the key blocks `first` to `last`."""
    q_ref, own_keys_ref, own_values_ref, visible_ref, used_ref, keys_ref, values_ref = inputs
    groups, _, size = keys_ref.shape
    nodes, block_q, block_k = own_keys_ref.shape[1], config.block_q, config.block_k
    own = pl.cdiv(nodes, block_k)
    ratio = heads // groups
    chunks = range(pl.cdiv(size, config.block_d))

    rows = start + lax.broadcasted_iota(jnp.int32, (block_q,), 0)
    node, member = lax.div(rows, ratio), lax.rem(rows, ratio)
    q = tuple(
        _rows(q_ref, node * heads + head * ratio + member, node < nodes, chunk, config)
        for chunk in chunks
    )

    def score(source, block, present):
        """Scores of a block of keys. `present` marks keys to load."""
        scores = jnp.zeros((block_q, block_k), jnp.float32)
        for chunk in chunks:
            k = _tile(source, head, block * block_k, present, chunk, config)
            scores += dot(split(q[chunk], "bf16x6"), split(k, "bf16x6"), transpose_y=True)
        return scores

    def weigh(scores, top):
        """Weights of the scores and the new maximum."""
        new = jnp.maximum(top, jnp.max(scores, axis=1) * factor)
        if packed:  # else the softmax takes longer than the products that hide it
            weights = _packed_weights(scores, new, factor)
        else:
            weights = jnp.exp2(scores * factor - new[:, None]).astype(values_ref.dtype)
        return weights, new

    def add(weights, top, new, total):
        """How much is kept of what came before, and the new sum."""
        kept = jnp.exp2(top - new)
        # Of the rounded weights: where few keys count, most of the rounding cancels.
        return kept, total * kept + jnp.sum(weights.astype(jnp.float32), axis=1)

    def mix(weights, kept, mixed, source, block, used):
        """The mix with the values of a block. `used` marks values with weight."""
        weights = split(weights, "bf16x6")
        added = []
        for chunk, x in zip(chunks, mixed, strict=True):
            v = _tile(source, head, block * block_k, used, chunk, config)
            added.append(x * kept[:, None] + dot(weights, split(v, "bf16x6")))
        return tuple(added)

    def advance(state, key_source, value_source, block, seen, used, present):
        """Takes a block of keys in."""
        top, total, mixed = state
        scores = score(key_source, block, present)
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)
        weights, new = weigh(scores, top)
        kept, total = add(weights, top, new, total)
        return new, total, mix(weights, kept, mixed, value_source, block, used)

    def over_own(block, state):
        place = lax.broadcasted_iota(jnp.int32, (block_k,), 0)
        column = block * block_k + place
        present = column < nodes
        used = pltriton.load(used_ref.at[column], mask=present, other=jnp.int8(0)) != 0
        seen = _seen(visible_ref, node, block * block_k, place)
        return advance(state, own_keys_ref, own_values_ref, block, seen, used, present)

    def over_full(block, state):
        return advance(state, keys_ref, values_ref, block, None, None, None)

    def over_full_ahead(state, first, last):
        """As `over_full` for all blocks, the scores of the next always one block ahead."""

        def body(block, carry):
            scores, (top, total, mixed) = carry
            weights, new = weigh(scores, top)
            # Always taken, which ptxas cannot know: else it waits for loads before the weights.
            kept, total = lax.cond(block + length != 0, add, skip, weights, top, new, total)
            scores = score(keys_ref, jnp.minimum(block + 1, last - 1), None)
            return scores, (new, total, mix(weights, kept, mixed, values_ref, block, None))

        skip = lambda weights, top, new, total: (top, total)
        there = jnp.broadcast_to(first < last, (block_k,))
        return lax.fori_loop(first, last, body, (score(keys_ref, first, there), state))[1]

    def over_edge(block, state):
        place = block * block_k + lax.broadcasted_iota(jnp.int32, (block_k,), 0)
        past = place < length
        seen = past[None, :]
        if window is not None:
            past &= place >= _first_seen(length, window)
            seen &= (length + node)[:, None] - place[None, :] < window
        return advance(state, keys_ref, values_ref, block, seen, past, past)

    state = (
        jnp.full((block_q,), NOTHING, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
        tuple(jnp.zeros((block_q, config.block_d), jnp.float32) for _ in chunks),
    )
    full = lax.div(length, block_k)
    own_first, own_last = jnp.minimum(first, own), jnp.minimum(last, own)
    first, last = jnp.maximum(first - own, 0), last - own
    # Masks cost time: only blocks that hold an end of what is seen have them.
    begun = None
    if window is not None:
        skipped = lax.div(_first_seen(length, window), block_k)
        first, last = first + skipped, last + skipped
        # From here on the last row, whose window begins latest, sees every key.
        whole = jnp.maximum(length + nodes - window, 0)
        edge = jnp.minimum(lax.div(whole + (block_k - 1), block_k), last)
        begun, first = first, jnp.maximum(first, edge)
    # Before the others: where a mix is carried in, ptxas serializes the products ahead.
    if config.ahead:
        state = over_full_ahead(state, first, jnp.minimum(last, full))
    else:
        state = lax.fori_loop(first, jnp.minimum(last, full), over_full, state)
    if begun is not None:
        state = lax.fori_loop(begun, first, over_edge, state)
    state = lax.fori_loop(jnp.maximum(first, full), last, over_edge, state)
    return lax.fori_loop(own_first, own_last, over_own, state)


def _packed_weights(scores: jax.Array, top: jax.Array, factor: float) -> jax.Array:
    """The weights `exp2(scores * factor - top)`, bfloat16: a third of the instructions."""
    (factor_bits,) = struct.unpack("<I", struct.pack("<f", factor))
    weigh = "".join(
        f"fma.rn.ftz.f32 {x}, ${i}, 0f{factor_bits:08X}, ${i + 2}; ex2.approx.ftz.f32 {x}, {x}; "
        for i, x in ((1, "a"), (2, "b"))
    )
    (weights,) = pltriton.elementwise_inline_asm(
        f"{{ .reg .f32 a, b; {weigh}cvt.rn.bf16x2.f32 $0, b, a; }}",
        args=[scores, jnp.broadcast_to(-top[:, None], scores.shape)],
        constraints="=r,f,f,f,f",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, jnp.bfloat16)],
    )
    return weights


def _pack(visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Who is seen as bits, int32 [words, N], and who is seen by anyone, int8 [N].

    A mask as wide as the scores would be loaded in another layout than theirs.
    """
    nodes = visible.shape[0]
    words = pl.cdiv(nodes, _WORD)
    bits = jnp.pad(visible, ((0, 0), (0, words * _WORD - nodes))).reshape(nodes, words, _WORD)
    place = jnp.arange(_WORD, dtype=jnp.int32)
    packed = jnp.sum(bits.astype(jnp.int32) << place, axis=-1, dtype=jnp.int32)
    return packed.T, jnp.any(visible, axis=0).astype(jnp.int8)


def _seen(words_ref, node: jax.Array, start: jax.Array, place: jax.Array) -> jax.Array:
    """The bits of a block of own columns for the given nodes, bool [rows, columns]."""
    words, nodes = words_ref.shape
    first = lax.div(start, _WORD)
    bits = jnp.zeros((), jnp.int32)
    for i in range(pl.cdiv(place.shape[0], _WORD)):
        there = (node < nodes) & (first + i < words)
        word = pltriton.load(words_ref.at[first + i, node], mask=there, other=jnp.int32(0))
        bits = jnp.where(place[None, :] < i * _WORD, bits, word[:, None])
    return ((bits >> ((start + place) & (_WORD - 1))[None, :]) & 1) != 0


def _rows(ref, index: jax.Array, there: jax.Array, chunk: int, config: Config) -> jax.Array:
    """The given rows and a chunk of the columns, zeros where `there` is false."""
    column = chunk * config.block_d + lax.broadcasted_iota(jnp.int32, (config.block_d,), 0)
    mask = there[:, None] & (column < ref.shape[1])[None, :]
    return pltriton.load(
        ref.at[index[:, None], column[None, :]], mask=mask, other=jnp.zeros((), ref.dtype)
    )


def _tile(ref, head, start, there: jax.Array | None, chunk: int, config: Config) -> jax.Array:
    """A block of rows of one head and a chunk of the columns, zeros where `there` is false."""
    shape = (config.block_k, config.block_d)
    mask = None if there is None else jnp.broadcast_to(there[:, None], shape)
    inside = inside_columns(ref.shape[2], chunk, shape)
    if inside is not None:
        mask = inside if mask is None else mask & inside
    tile = ref.at[head, pl.Slice(start, config.block_k), span(chunk, config.block_d)]
    if mask is None:
        return pltriton.load(tile)
    return pltriton.load(tile, mask=mask, other=jnp.zeros((), ref.dtype))
