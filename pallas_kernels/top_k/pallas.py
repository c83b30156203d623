"""The largest entries as Pallas kernels on the Triton backend.

All comparisons are between int32 keys (`keys.py`), so every result is exact. A row is cut into
groups of neighbouring columns, and the work into four stages:

1. *maxima*: reads the array once, writes the largest key of every group.
2. *groups*: finds a key that at least k groups reach, but not many more; the k largest entries
   are in those groups. Lists them.
3. *candidates*: reads the listed groups, finds a key that at least k of their entries reach, but
   not many more. Lists those entries.
4. *rank*: counts for every candidate how many come before it: its place in the output.

Lists keep the order of columns. Where too many entries share the key at the edge, the first ones
are taken until there are k, so no list ever overflows, however many ties there are.

Stages 2 and 3 search by counting. The first guess comes from the mean of many large sets' maxima:
of the maxima of N sets, some 0.6 N entries of an exponential tail exceed the mean. It usually
holds; the interval that is left otherwise is halved.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.checks import beyond, check_power
from pallas_kernels.top_k.keys import ABSENT, minus_infinity, stored_dtype, to_keys, to_values

MAX_K = 1024
MAX_COLUMNS = 2**19
MAX_ROWS = 65535  # the longest second axis of a CUDA grid

_PIECES = 16  # of a chunk, spread evenly over the row so that no region of it is special
_LANES = 16  # groups that share one word of flags
_TAIL = 0.62  # between the values of a normal and of an exponential tail
_GUESSES = 4  # before the search halves its interval
_PROCESSORS = 128  # of a Hopper GPU, as a power of two


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernels are cut.

    Attributes:
      group: columns of a group, 8, 16 or 32.
      chunk: columns of a program that makes maxima.
      read_warps: its warps.
      launches: launches after the maxima. 1: every program of a row makes the lists for itself.
        2: one makes them for all, and ranks are a launch of their own.
      shares: programs of a row that share its ranks.
      block: candidates that a program ranks at a time.
      wide: candidates that those are compared with at a time, a multiple of `block`.
      num_warps: warps of the programs after the maxima.
    """

    group: int = 16
    chunk: int = 4096
    read_warps: int = 4
    launches: int = 1
    shares: int = 8
    block: int = 64
    wide: int = 128
    num_warps: int = 16

    def __post_init__(self):
        if self.group not in (8, 16, 32):
            raise ValueError(f"group must be 8, 16 or 32, got {self.group}")
        check_power("chunk", self.chunk, _PIECES * self.group)
        if self.wide % self.block:
            raise ValueError(f"wide must be a multiple of block, got {self.wide} and {self.block}")
        if self.launches not in (1, 2):
            raise ValueError(f"launches must be 1 or 2, got {self.launches}")


def default_config(rows: int, columns: int) -> Config:
    """Returns the cut that is fastest for this size on Hopper."""
    shares = max(1, min(_PROCESSORS // pl.next_power_of_2(rows), 8))
    return Config(group=16 if columns <= 2**18 else 32, shares=shares)


def unsupported(rows: int, columns: int, k: int) -> str | None:
    """Returns why the kernels cannot take this size, None if they can."""
    return beyond(
        {
            "entries": (k, MAX_K),
            "columns": (columns, MAX_COLUMNS),
            "rows": (rows, MAX_ROWS),
        }
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes that follow from the arguments' shapes and the configuration."""

    rows: int
    columns: int
    k: int
    config: Config
    interpret: bool

    def wait(self) -> None:
        """Lets all warps of a program catch up, and see what the others wrote."""
        if not self.interpret:  # where there are no warps, and no rule for this
            pltriton.debug_barrier()

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.columns, self.config.chunk)

    @property
    def piece(self) -> int:
        """Neighbouring columns that one program reads; it reads `_PIECES` such."""
        return self.config.chunk // _PIECES

    @property
    def sets(self) -> int:
        """Sets of groups, one group of every stripe: a stripe is the row's `_PIECES`-th part."""
        return self.chunks * self.piece // self.config.group

    @property
    def groups(self) -> int:
        return pl.cdiv(self.columns, self.config.group)

    @property
    def words(self) -> int:
        """Words of flags for all groups of a row."""
        return max(16, pl.next_power_of_2(pl.cdiv(self.groups, _LANES)))

    @property
    def enough(self) -> int:
        """What a search is content with."""
        return self.k + self.k * 5 // 8

    @property
    def slots(self) -> int:
        """Length of a list of groups or candidates."""
        return max(16, pl.next_power_of_2(self.enough))

    @property
    def selectors(self) -> int:
        """Programs of a row that each make the lists for themselves."""
        return self.config.shares if self.config.launches == 1 else 1

    @property
    def block(self) -> int:
        return min(self.config.block, self.slots)

    @property
    def wide(self) -> int:
        """Candidates that a block is compared with at a time."""
        return min(self.config.wide, self.slots)


def top_k(
    x: jax.Array,
    k: int,
    limit: jax.Array,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns `(values, ids)`. Arguments as in `select.top_k`."""
    rows, columns = x.shape
    config = config or default_config(rows, columns)
    plan = _Plan(rows, columns, k, config, interpret)
    arrays = {"x": x, "limit": limit}
    launch = functools.partial(_launch, arrays, plan)
    launch((_MAXIMA,), plan.chunks, config.read_warps)
    launches = {1: [(*_SELECT, _RANK)], 2: [_SELECT, (_RANK,)]}
    for stages in launches[config.launches]:
        launch(stages, config.shares if _RANK in stages else 1, config.num_warps)
    return arrays["values"], arrays["ids"]


class _Stage(typing.NamedTuple):
    """One step of the work on a row: `run(refs, row, share, plan)` and the arrays it uses."""

    run: Callable[[dict[str, typing.Any], jax.Array, jax.Array, _Plan], None]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def _shapes(plan: _Plan, dtype) -> dict[str, tuple[tuple[int, ...], typing.Any]]:
    """Shape and type of every array that a stage writes."""
    selected = (plan.rows, plan.selectors)
    result = (plan.rows, plan.k)
    return {
        "maxima": ((plan.rows, _PIECES * plan.sets), stored_dtype(dtype)),
        "set_maxima": ((plan.rows, plan.sets), stored_dtype(dtype)),
        "group_flags": ((*selected, plan.words), jnp.int32),
        "listed": ((*selected, plan.slots), jnp.int32),
        "search": ((*selected, 4), jnp.int32),  # groups listed, edge, largest key, slope
        "flags": ((*selected, plan.slots), jnp.int32),
        "candidate_keys": ((*selected, plan.slots), jnp.int32),
        "candidate_ids": ((*selected, plan.slots), jnp.int32),
        "count": (selected, jnp.int32),
        "values": (result, dtype),
        "ids": (result, jnp.int32),
    }


def _launch(
    arrays: dict[str, jax.Array],
    plan: _Plan,
    stages: tuple[_Stage, ...],
    programs: int,
    num_warps: int,
) -> None:
    """Runs stages in one launch of `programs` per row, and adds what they write to `arrays`."""
    writes = [name for stage in stages for name in stage.writes]
    reads = [name for stage in stages for name in stage.reads if name not in writes]
    reads = list(dict.fromkeys(reads))

    def kernel(*refs):
        named = dict(zip((*reads, *writes), refs, strict=True))
        share, row = pl.program_id(0), pl.program_id(1)
        for i, stage in enumerate(stages):
            if i:
                plan.wait()  # a stage reads what other warps wrote in the one before
            stage.run(named, row, share, plan)

    shapes = _shapes(plan, arrays["x"].dtype)
    outputs = pl.pallas_call(
        kernel,
        grid=(programs, plan.rows),
        out_shape=tuple(jax.ShapeDtypeStruct(*shapes[name]) for name in writes),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=plan.interpret,
        name="top_k_" + stages[-1].run.__name__.strip("_"),
    )(*(arrays[name] for name in reads))
    arrays.update(zip(writes, outputs, strict=True))


def _maxima(refs, row, share, plan: _Plan) -> None:
    """Writes the largest key of every group in one piece of every stripe."""
    per_piece = plan.piece // plan.config.group
    i = _iota(_PIECES * per_piece)
    groups = i // per_piece * plan.sets + share * per_piece + i % per_piece
    maxima = jnp.max(_load_keys(refs, row, groups, groups < plan.groups, plan), axis=1)
    stored = refs["maxima"].dtype
    pltriton.store(refs["maxima"].at[row, groups], maxima.astype(stored))
    sets = share * per_piece + _iota(per_piece)
    largest = jnp.max(maxima.reshape(_PIECES, per_piece), axis=0)
    pltriton.store(refs["set_maxima"].at[row, sets], largest.astype(stored))


def _find_groups(refs, row, share, plan: _Plan) -> None:
    """Flags groups that hold the k largest entries."""
    sets = _iota(max(16, pl.next_power_of_2(plan.sets)))
    real = sets < plan.sets
    largest = pltriton.load(refs["set_maxima"].at[row, sets], mask=real, other=0).astype(jnp.int32)
    top = jnp.max(jnp.where(real, largest, ABSENT))
    mean = jnp.sum(jnp.where(real, largest.astype(jnp.float32), 0.0)) / plan.sets
    # An exponential tail falls by the factor `sets` from the mean of the maxima to the largest.
    slope = (top.astype(jnp.float32) - mean) / math.log(plan.sets)
    first = _to_int(mean + slope * math.log(_TAIL * plan.sets / _target(plan)))

    word = _iota(plan.words)
    groups = word[:, None] * _LANES + _iota(_LANES)[None, :]
    # In the array wherever they are: a load under a mask waits for the one before it.
    held = jnp.minimum(word, plan.sets * _PIECES // _LANES - 1)
    held = held[:, None] * _LANES + _iota(_LANES)[None, :]
    keys = pltriton.load(refs["maxima"].at[row, held]).astype(jnp.int32)
    keys = jnp.where(groups < plan.groups, keys, ABSENT)
    search = _Search(need=min(plan.k, plan.groups), first=first, top=top, slope=_to_int(slope))
    selector = _selector(share, plan)
    flags, count, edge = _pick(keys, search, plan)
    pltriton.store(refs["group_flags"].at[row, selector, word], flags)
    for i, value in enumerate((count, edge, search.top, search.slope)):
        refs["search"][row, selector, i] = value


def _list_groups(refs, row, share, plan: _Plan) -> None:
    """Lists the flagged groups."""
    selector, word = _selector(share, plan), _iota(plan.words)

    def write(slot, group, present):
        pltriton.store(refs["listed"].at[row, selector, slot], group, mask=present)

    flags = pltriton.load(refs["group_flags"].at[row, selector, word])
    _write_list(flags, word * _LANES, write)


def _find_candidates(refs, row, share, plan: _Plan) -> None:
    """Flags columns of the listed groups: those of the k largest entries among them."""
    selector, slot = _selector(share, plan), _iota(plan.slots)
    count, edge, top, slope = (refs["search"][row, selector, i] for i in range(4))
    keys = _load_keys(refs, row, _load_listed(refs, row, selector, plan), slot < count, plan)
    search = _Search(need=plan.k, first=edge, top=top, slope=slope)
    flags, count, _ = _pick(keys, search, plan)
    pltriton.store(refs["flags"].at[row, selector, slot], flags)
    refs["count"][row, selector] = count


def _list_candidates(refs, row, share, plan: _Plan) -> None:
    """Lists keys and columns of the flagged columns."""
    selector = _selector(share, plan)

    def write(slot, column, present):
        column = jnp.where(present, column, 0)
        key = to_keys(pltriton.load(refs["x"].at[row, column]))
        key = jnp.where(column < refs["limit"][...], key, minus_infinity(refs["x"].dtype))
        pltriton.store(refs["candidate_keys"].at[row, selector, slot], key, mask=present)
        pltriton.store(refs["candidate_ids"].at[row, selector, slot], column, mask=present)

    flags = pltriton.load(refs["flags"].at[row, selector, _iota(plan.slots)])
    listed = _load_listed(refs, row, selector, plan)
    _write_list(flags, listed * plan.config.group, write)


def _rank(refs, row, share, plan: _Plan) -> None:
    """Writes every `shares`-th block of candidates to their places in the output."""
    selector, block, wide = _selector(share, plan), plan.block, plan.wide
    length = refs["count"][row, selector]
    blocks, wides = (lax.div(length + (size - 1), size) for size in (block, wide))

    def load(name, index):
        return pltriton.load(refs[name].at[row, selector, index])

    def rank_block(turn, _):
        own = (share + turn * plan.config.shares) * block + _iota(block)
        key = load("candidate_keys", own)[:, None]

        def count(wins, number, ahead):
            other = number * wide + _iota(wide)
            keys = jnp.where(other < length, load("candidate_keys", other), ABSENT)
            return ahead + wins(keys[None, :], other[None, :]).astype(jnp.int32)

        # The list is in the order of columns: among equal keys the earlier one wins.
        before = functools.partial(count, lambda keys, _: keys >= key)
        within = functools.partial(
            count, lambda keys, i: (keys > key) | ((keys == key) & (i < own[:, None]))
        )
        after = functools.partial(count, lambda keys, _: keys > key)
        middle = lax.div((share + turn * plan.config.shares) * block, wide)
        ahead = lax.fori_loop(0, middle, before, jnp.zeros((block, wide), jnp.int32))
        ahead = lax.fori_loop(middle + 1, wides, after, within(middle, ahead))
        place = jnp.sum(ahead, axis=1)
        winner = (own < length) & (place < plan.k)
        values = to_values(load("candidate_keys", own), refs["values"].dtype)
        pltriton.store(refs["values"].at[row, place], values, mask=winner)
        pltriton.store(refs["ids"].at[row, place], load("candidate_ids", own), mask=winner)

    mine = jnp.maximum(blocks - share + plan.config.shares - 1, 0)
    lax.fori_loop(0, lax.div(mine, plan.config.shares), rank_block, None)


_MAXIMA = _Stage(_maxima, ("x", "limit"), ("maxima", "set_maxima"))
_SELECT = (
    _Stage(_find_groups, ("maxima", "set_maxima"), ("group_flags", "search")),
    _Stage(_list_groups, ("group_flags",), ("listed",)),
    _Stage(_find_candidates, ("x", "limit", "listed", "search"), ("flags", "count")),
    _Stage(
        _list_candidates,
        ("x", "limit", "search", "listed", "flags"),
        ("candidate_keys", "candidate_ids"),
    ),
)
_RANK = _Stage(_rank, ("candidate_keys", "candidate_ids", "count"), ("values", "ids"))


class _Search(typing.NamedTuple):
    """What is looked for among keys: the `need` largest.

    Attributes:
      need: how many.
      first: a guess at a key that so many reach.
      top: no key is larger.
      slope: what to add to a key to divide the number of those that reach it by e.
    """

    need: int
    first: jax.Array
    top: jax.Array
    slope: jax.Array


def _pick(keys: jax.Array, search: _Search, plan: _Plan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Flags of a set of keys [words, lanes] with the `need` largest, its size and its least key.

    The set has at most `slots` members. If some keys equal to the least have to be left out, the
    last ones are. Flags are an int32 for every word, a bit for every lane.
    """
    bit = jnp.left_shift(1, _iota(keys.shape[1]))[None, :]

    def flags_of(members: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(members, bit, 0), axis=1)

    def unsettled(state):
        low, high, count = state[:3]
        return (count > plan.enough) & (low < high)

    def probe(state):
        # At least `need` keys reach `low`, fewer exceed `high`. `count` reach `low`: `flags`.
        low, high, count, flags, at, turn = state
        new_flags = flags_of(keys >= at)
        new_count = jnp.sum(lax.population_count(new_flags))
        enough = new_count >= search.need
        low, high = jnp.where(enough, at, low), jnp.where(enough, high, at - 1)
        count = jnp.where(enough, new_count, count)
        flags = jnp.where(enough, new_flags, flags)
        excess = jnp.log(jnp.maximum(new_count, 1).astype(jnp.float32) / _target(plan))
        guess = at.astype(jnp.float32) + search.slope.astype(jnp.float32) * excess
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        at = jnp.where(turn < _GUESSES, _between(_to_int(guess), low, high), middle)
        return low, high, count, flags, at, turn + 1

    low, unknown = jnp.int32(ABSENT), jnp.int32(keys.size + plan.slots)
    none = jnp.zeros((keys.shape[0],), jnp.int32)
    first = _between(search.first, low, search.top)
    state = (low, search.top, unknown, none, first, jnp.int32(0))
    edge, _, count, flags, _, _ = lax.while_loop(unsettled, probe, state)

    def without_the_last():
        above, level = flags_of(keys > edge), flags_of(keys == edge)
        room = search.need - jnp.sum(lax.population_count(above))
        size = lax.population_count(level)
        room = jnp.clip(room - (jnp.cumsum(size) - size), 0, keys.shape[1])
        earlier = lax.population_count(level[:, None] & (bit - 1))
        return above | flags_of((keys == edge) & (earlier < room[:, None]))

    # Too many only if the search ended on one key, which more share than there is room for.
    crowded = count > plan.slots
    flags = lax.cond(crowded, without_the_last, lambda: flags)
    return flags, jnp.where(crowded, search.need, count), edge


def _write_list(flags: jax.Array, base: jax.Array, write: Callable) -> None:
    """Calls `write(slot, base + lane, present)` for every flag, `slot` counting up in order."""
    size = lax.population_count(flags)
    start = jnp.cumsum(size) - size

    def peel(turn, left):
        lowest = left & -left
        write(start + turn, base + lax.population_count(lowest - 1), left != 0)
        return left ^ lowest

    lax.fori_loop(0, jnp.max(size), peel, flags)


def _load_listed(refs, row, selector, plan: _Plan) -> jax.Array:
    """The list of groups [slots], with a group of the row where it holds none."""
    slot = _iota(plan.slots)
    listed = pltriton.load(refs["listed"].at[row, selector, slot])
    return jnp.where(slot < refs["search"][row, selector, 0], listed, 0)


def _load_keys(refs, row, groups: jax.Array, present: jax.Array, plan: _Plan) -> jax.Array:
    """Keys [groups, group] of the columns of groups, ABSENT beyond the row and if not present."""
    x, group = refs["x"], plan.config.group
    lane = _iota(group)[None, :]
    # Within the row wherever possible: a load under a mask waits for the one before it.
    held = jnp.minimum(groups, plan.groups - 1)[:, None] * group + lane
    real = present[:, None]
    if plan.columns % group:
        mask = held < plan.columns
        values = pltriton.load(x.at[row, held], mask=mask, other=jnp.zeros((), x.dtype))
        real &= lane < (plan.columns - groups * group)[:, None]
    else:
        values = pltriton.load(x.at[row, held])
    limit = refs["limit"][...]
    plan.wait()  # so that all loads are under way before the first is used
    padding = lane >= (limit - groups * group)[:, None]
    return jnp.where(real, jnp.where(padding, minus_infinity(x.dtype), to_keys(values)), ABSENT)


def _selector(share, plan: _Plan):
    """Whose lists a program works on: its own, unless the row has only one set of them."""
    return share if plan.selectors > 1 else 0


def _target(plan: _Plan) -> float:
    """How many a search aims at: enough for most guesses to be settled at once."""
    return 1.25 * plan.k


def _between(at: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """`at` within low + 1 .. high, where every probe tells something."""
    return jnp.minimum(jnp.maximum(at, low + 1), high)


def _to_int(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -(2.0**31), 2.0**31 - 128).astype(jnp.int32)


def _iota(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)
