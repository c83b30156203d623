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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import MIN_BLOCK, padded, span
from pallas_kernels.checks import check_power
from pallas_kernels.splitting import dot, split
from pallas_kernels.tree_attention.gate import Gate

MAX_SIZE = 256
_PROCESSORS = 132
_WORD = 32  # bits
_NOTHING = -1e30  # below every score, and finite: its difference to itself is zero
_JOINED = 4096  # elements that a program of the second launch holds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the first launch is cut.

    Attributes:
      block_q: flattened query rows of a program.
      block_k: keys taken at a time.
      block_d: columns of keys and values taken at a time.
      tail_q: rows of a program for what is left after full blocks of `block_q`; 0 fills up a
        last block of `block_q` instead.
      tail_cost: time of a tail's program for the same keys, as a share of a full one's.
      programs: programs that run side by side; the number of splits follows.
      num_warps, num_stages: of a program; stages of loads under way.
    """

    block_q: int
    block_k: int
    block_d: int
    tail_q: int = 0
    tail_cost: float = 0.5
    programs: int = _PROCESSORS
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self):
        for name in ("block_q", "block_k", "block_d", "tail_q"):
            if (name, getattr(self, name)) != ("tail_q", 0):
                check_power(name, getattr(self, name), MIN_BLOCK)


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
    blocks = pl.cdiv(capacity, config.block_k)
    if window is not None:
        blocks = min(blocks, pl.cdiv(window - 1, config.block_k) + 1)
    blocks += pl.cdiv(nodes, config.block_k)
    bands = _bands(rows, groups, blocks, config)
    splits = max(band.splits for band in bands)
    height = sum(band.blocks * band.block_q for band in bands)
    length = length.reshape(1)
    flat = q.reshape(nodes * heads, size)

    part = jax.ShapeDtypeStruct((splits, groups, height), jnp.float32)
    mix = jax.ShapeDtypeStruct((splits, groups, height, size), jnp.float32)
    parts = pl.pallas_call(
        functools.partial(
            _split_kernel,
            bands=bands,
            heads=heads,
            # Scores to the base of two, whose exponential is one instruction.
            factor=scale * math.log2(math.e),
            window=window,
            config=config,
        ),
        grid=(sum(band.blocks * groups * band.splits for band in bands),),
        out_shape=(mix, part, part),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="tree_attention_splits",
    )(length, flat, own_keys, own_values, *_pack(visible), keys, values)

    joined = pl.next_power_of_2(splits)
    block_d = min(padded(size), max(_JOINED // joined, MIN_BLOCK))
    out = pl.pallas_call(
        functools.partial(
            _join_kernel,
            bands=bands,
            heads=heads,
            nodes=nodes,
            capacity=capacity,
            window=window,
            gate_columns=None if gate is None else (gate.first, gate.step),
            joined=joined,
            block_d=block_d,
            block_k=config.block_k,
        ),
        grid=(pl.cdiv(size, block_d), nodes * heads),
        out_shape=jax.ShapeDtypeStruct(flat.shape, q.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tree_attention_join",
    )(length, *parts, *(() if gate is None else (gate.logits,)))
    return out.reshape(q.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Band:
    """Consecutive rows of every key head that are cut alike: `blocks` blocks from `first` on."""

    first: int
    blocks: int
    block_q: int
    splits: int


def _bands(rows: int, groups: int, key_blocks: int, config: Config) -> tuple[_Band, ...]:
    """Cuts the rows of a key head into bands and spreads the programs over them."""
    share = config.programs // groups
    full, left = divmod(rows, config.block_q)

    def splits(wanted: int) -> int:
        return max(1, min(wanted, key_blocks))

    if not (config.tail_q and full and 0 < left <= config.tail_q):
        blocks = pl.cdiv(rows, config.block_q)
        wanted = splits(share // blocks)
        return (_Band(first=0, blocks=blocks, block_q=config.block_q, splits=wanted),)
    wanted = max(1, int(share / (full + config.tail_cost)))
    return (
        _Band(first=0, blocks=full, block_q=config.block_q, splits=splits(wanted)),
        _Band(
            first=full * config.block_q,
            blocks=1,
            block_q=config.tail_q,
            splits=splits(share - full * wanted),
        ),
    )


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
    bands: tuple[_Band, ...],
    heads: int,
    factor: float,
    window: int | None,
    config: Config,
):
    inputs = (q_ref, own_keys_ref, own_values_ref, visible_ref, used_ref, keys_ref, values_ref)
    groups, capacity, _ = keys_ref.shape
    nodes = own_keys_ref.shape[1]
    length = jnp.clip(length_ref[0], 0, capacity)
    program = pl.program_id(0)
    for band in bands:
        row_block = lax.rem(program, band.blocks)  # those that share keys run next to each other
        rest = lax.div(program, band.blocks)
        head, part = lax.rem(rest, groups), lax.div(rest, groups)
        blocks, share, _ = _cut(nodes, length, window, band.splits, config.block_k)
        first = part * share
        last = jnp.minimum(first + share, blocks)
        start = band.first + row_block * band.block_q

        @pl.when((program >= 0) & (part < band.splits) & (first < last))
        def _(band=band, head=head, part=part, first=first, last=last, start=start):
            top, total, mixed = _attend_block(
                inputs,
                length,
                head,
                start,
                band.block_q,
                first,
                last,
                heads,
                factor,
                window,
                config,
            )
            rows = pl.Slice(start, band.block_q)
            pltriton.store(top_ref.at[part, head, rows], top)
            pltriton.store(sum_ref.at[part, head, rows], total)
            row = start + lax.broadcasted_iota(jnp.int32, mixed[0].shape, 0)
            real = row < nodes * (heads // groups)
            for chunk, x in enumerate(mixed):
                columns = span(chunk, config.block_d)
                inside = _inside(mix_ref.shape[3], chunk, x.shape)
                mask = real if inside is None else real & inside
                pltriton.store(mix_ref.at[part, head, rows, columns], x, mask=mask)

        program = program - band.blocks * groups * band.splits


def _first_seen(length: jax.Array, window: int | None) -> jax.Array | int:
    """The first cache row that any row sees: later rows' windows begin later."""
    return 0 if window is None else jnp.maximum(length - (window - 1), 0)


def _cut(nodes: int, length: jax.Array, window: int | None, splits: int, block_k: int):
    """Key blocks in all, own ones first; blocks of a split; splits that have any."""
    blocks = pl.cdiv(nodes, block_k) + lax.div(length + (block_k - 1), block_k)
    if window is not None:
        blocks -= lax.div(_first_seen(length, window), block_k)
    share = lax.div(blocks + (splits - 1), splits)
    return blocks, share, lax.div(blocks + (share - 1), share)


def _attend_block(
    inputs,
    length,
    head,
    start,
    block_q,
    first,
    last,
    heads,
    factor,
    window: int | None,
    config: Config,
):
    """Maximum, sum and mix of a block of rows over the key blocks `first` to `last`."""
    q_ref, own_keys_ref, own_values_ref, visible_ref, used_ref, keys_ref, values_ref = inputs
    groups, _, size = keys_ref.shape
    nodes, block_k = own_keys_ref.shape[1], config.block_k
    own = pl.cdiv(nodes, block_k)
    ratio = heads // groups
    chunks = range(pl.cdiv(size, config.block_d))

    rows = start + lax.broadcasted_iota(jnp.int32, (block_q,), 0)
    node, member = lax.div(rows, ratio), lax.rem(rows, ratio)
    q = tuple(
        _rows(q_ref, node * heads + head * ratio + member, node < nodes, chunk, config)
        for chunk in chunks
    )

    def advance(state, key_source, value_source, block, seen, used, present):
        """Takes a block of keys in. `used` marks values with weight, `present` keys to load."""
        top, total, mixed = state
        scores = jnp.zeros((block_q, block_k), jnp.float32)
        for chunk in chunks:
            k = _tile(key_source, head, block * block_k, present, chunk, config)
            scores += dot(split(q[chunk], "bf16x6"), split(k, "bf16x6"), transpose_y=True)
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(top, jnp.max(scores, axis=1) * factor)
        weights = jnp.exp2(scores * factor - new[:, None]).astype(value_source.dtype)
        kept = jnp.exp2(top - new)
        # Of the rounded weights: where few keys count, most of the rounding cancels.
        total = total * kept + jnp.sum(weights.astype(jnp.float32), axis=1)
        weights = split(weights, "bf16x6")
        added = []
        for chunk, x in zip(chunks, mixed, strict=True):
            v = _tile(value_source, head, block * block_k, used, chunk, config)
            added.append(x * kept[:, None] + dot(weights, split(v, "bf16x6")))
        return new, total, tuple(added)

    def over_own(block, state):
        place = lax.broadcasted_iota(jnp.int32, (block_k,), 0)
        column = block * block_k + place
        present = column < nodes
        used = pltriton.load(used_ref.at[column], mask=present, other=jnp.int8(0)) != 0
        seen = _seen(visible_ref, node, block * block_k, place)
        return advance(state, own_keys_ref, own_values_ref, block, seen, used, present)

    def over_full(block, state):
        return advance(state, keys_ref, values_ref, block, None, None, None)

    def over_edge(block, state):
        place = block * block_k + lax.broadcasted_iota(jnp.int32, (block_k,), 0)
        past = place < length
        seen = past[None, :]
        if window is not None:
            past &= place >= _first_seen(length, window)
            seen &= (length + node)[:, None] - place[None, :] < window
        return advance(state, keys_ref, values_ref, block, seen, past, past)

    state = (
        jnp.full((block_q,), _NOTHING, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
        tuple(jnp.zeros((block_q, config.block_d), jnp.float32) for _ in chunks),
    )
    full = lax.div(length, block_k)
    state = lax.fori_loop(jnp.minimum(first, own), jnp.minimum(last, own), over_own, state)
    first, last = jnp.maximum(first - own, 0), last - own
    # Masks cost time: only blocks that hold an end of what is seen have them.
    if window is not None:
        skipped = lax.div(_first_seen(length, window), block_k)
        first, last = first + skipped, last + skipped
        # From here on the last row, whose window begins latest, sees every key.
        whole = jnp.maximum(length + nodes - window, 0)
        edge = jnp.minimum(lax.div(whole + (block_k - 1), block_k), last)
        state = lax.fori_loop(first, edge, over_edge, state)
        first = jnp.maximum(first, edge)
    state = lax.fori_loop(first, jnp.minimum(last, full), over_full, state)
    return lax.fori_loop(jnp.maximum(first, full), last, over_edge, state)


def _join_kernel(
    length_ref,
    mix_ref,
    top_ref,
    sum_ref,
    *gate_and_out_refs,
    bands: tuple[_Band, ...],
    heads: int,
    nodes: int,
    capacity: int,
    window: int | None,
    gate_columns: tuple[int, int] | None,
    joined: int,
    block_d: int,
    block_k: int,
):
    *gate_refs, out_ref = gate_and_out_refs
    chunk, row = pl.program_id(0), pl.program_id(1)
    groups, size = mix_ref.shape[1], mix_ref.shape[3]
    ratio = heads // groups
    node, member = lax.div(row, heads), lax.rem(row, heads)
    head, flat = lax.div(member, ratio), node * ratio + lax.rem(member, ratio)
    logits = None
    if gate_columns is not None:  # asked for before anything is waited for
        first, step = gate_columns
        logits = _columns(gate_refs[0], node, first + member * step, chunk, block_d, size)
    length = jnp.clip(length_ref[0], 0, capacity)
    *_, active = _cut(nodes, length, window, bands[0].splits, block_k)
    for band in bands[1:]:
        *_, own = _cut(nodes, length, window, band.splits, block_k)
        active = jnp.where(flat < band.first, active, own)

    part = lax.broadcasted_iota(jnp.int32, (joined,), 0)
    there, parts = part < active, span(0, joined)
    top = pltriton.load(top_ref.at[parts, head, flat], mask=there, other=jnp.float32(_NOTHING))
    total = pltriton.load(sum_ref.at[parts, head, flat], mask=there, other=jnp.float32(0))
    columns = span(chunk, block_d)
    mask = jnp.broadcast_to(there[:, None], (joined, block_d))
    inside = _inside(size, chunk, (joined, block_d))
    mixed = pltriton.load(
        mix_ref.at[parts, head, flat, columns],
        mask=mask if inside is None else mask & inside,
        other=jnp.float32(0),
    )
    weight = jnp.exp2(top - jnp.max(top))
    total = jnp.sum(weight * total)
    out = jnp.sum(weight[:, None] * mixed, axis=0) / jnp.where(total > 0, total, 1.0)
    mask = _inside(size, chunk, (block_d,))
    if logits is not None:
        out = out * jax.nn.sigmoid(logits.astype(jnp.float32))
    pltriton.store(out_ref.at[row, columns], out.astype(out_ref.dtype), mask=mask)


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


def _columns(ref, row, first, chunk, block_d: int, size: int) -> jax.Array:
    """A chunk of the `size` columns of a row from `first` on, zeros beyond them."""
    column = chunk * block_d + lax.broadcasted_iota(jnp.int32, (block_d,), 0)
    index = (jnp.full(column.shape, row, jnp.int32), first + column)
    return pltriton.load(ref.at[index], mask=column < size, other=jnp.zeros((), ref.dtype))


def _tile(ref, head, start, there: jax.Array | None, chunk: int, config: Config) -> jax.Array:
    """A block of rows of one head and a chunk of the columns, zeros where `there` is false."""
    shape = (config.block_k, config.block_d)
    mask = None if there is None else jnp.broadcast_to(there[:, None], shape)
    inside = _inside(ref.shape[2], chunk, shape)
    if inside is not None:
        mask = inside if mask is None else mask & inside
    tile = ref.at[head, pl.Slice(start, config.block_k), span(chunk, config.block_d)]
    if mask is None:
        return pltriton.load(tile)
    return pltriton.load(tile, mask=mask, other=jnp.zeros((), ref.dtype))


def _inside(size: int, chunk: jax.Array | int, shape: tuple[int, ...]) -> jax.Array | None:
    """Mask of the last axis where a chunk hangs over the columns; None if none does."""
    if size % shape[-1] == 0:
        return None
    return chunk * shape[-1] + lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) < size
