"""Trees of the most probable paths under independent marginals: DDTree's own rule.

Candidates of a depth are put in order first, the most probable one first. A path is then a list of
places in these orders, and everything that is no worse place by place comes before it: its own
beginnings, and all paths that go through better candidates. Which paths can be among the best is
therefore known beforehand, whatever the probabilities are, and a tree is one choice from that list.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.top_k import top_k
from tfm_jax.config import MAX_POOL
from tfm_jax.tree import NO_PARENT, ROOT, Tree

_PLACE_BITS = MAX_POOL.bit_length()
# Paths: those of 128 nodes and 15 depths, as constants of 13 MB. On a GPU each level that a list
# saves is a launch of two sorts; on a CPU lists are slower than levels from about 2^16 paths on.
_LONGEST_LIST = 2**18


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Paths:
    """Paths in dictionary order, each before its extensions.

    Attributes:
      places: [D, M] int32 in the orders of the depths, 0 beyond a path's end.
      last: [M] int32, the last place of each path.
      depth: [M] int32, 1 .. D.
      parent: [M] int32, the path without its last step; -1 at depth 1.
    """

    places: np.ndarray
    last: np.ndarray
    depth: np.ndarray
    parent: np.ndarray


def ddtree(root: jax.Array, ids: jax.Array, logprobs: jax.Array, budget: int) -> Tree:
    """The `budget` most probable paths, most probable first.

    Of equally probable paths the first in dictionary order of the candidates' places comes first,
    a path before its extensions; equally probable candidates stand in the order of the pool.

    Args:
      root: int32 scalar.
      ids, logprobs: [D, K]; any number of children is allowed.
      budget: nodes.

    Raises:
      ValueError: a pool of more than MAX_POOL candidates.
    """
    chex.assert_equal_shape([ids, logprobs])
    depth, pool = ids.shape
    if pool > MAX_POOL:
        raise ValueError(f"pools hold at most {MAX_POOL} candidates, got {pool}")
    children = min(pool, budget)
    steps, ranks = top_k(logprobs, children)  # [D, C]
    if count_paths(budget, depth, children) > _LONGEST_LIST:
        score, place, level, parent = _choose_by_levels(steps, budget)
    else:
        score, place, level, parent = _choose_from_list(steps, budget)
    real = score > -jnp.inf
    rank = ranks[level, place]

    def rows(first, rest: jax.Array, padding) -> jax.Array:
        rest = jnp.where(real, rest, padding)
        return jnp.concatenate([jnp.asarray([first], rest.dtype), rest])

    return Tree(
        token=rows(0, ids[level, rank], 0).at[ROOT].set(root),
        parent=rows(NO_PARENT, parent, NO_PARENT),
        depth=rows(0, level + 1, 0),
        score=rows(0.0, score, -jnp.inf),
        logprob=rows(0.0, steps[level, place], -jnp.inf),
        rank=rows(-1, rank, -1),
        valid=rows(True, real, False),
    )


@functools.cache
def count_paths(budget: int, depth: int, children: int) -> int:
    """How many paths of at most `depth` steps have fewer than `budget` others before them."""
    total, counts = 0, {(budget, 1): 1}  # by nodes that are left, and paths of a prefix's length
    for _ in range(depth):
        longer: dict[tuple[int, int], int] = {}
        for (left, paths), count in counts.items():
            for place in range(min(children, left // paths)):
                wider = paths * (place + 1)
                key = (left - wider, wider)
                longer[key] = longer.get(key, 0) + count
        counts = longer
        total += sum(counts.values())
    return total


@functools.lru_cache(maxsize=8)
def _list_paths(budget: int, depth: int, children: int) -> _Paths:
    """The paths that `count_paths` counts.

    Before a path come, for each of its beginnings, the product of (place + 1) over that beginning's
    steps: all paths of that length that are no worse place by place, itself included.
    """
    left, paths = np.asarray([budget]), np.asarray([1])
    levels = []  # (index of the parent in the level above, place)
    for _ in range(depth):
        counts = np.minimum(children, left // paths)
        above = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(above)) - np.repeat(np.cumsum(counts) - counts, counts)
        paths = paths[above] * (place + 1)
        left = left[above] - paths
        levels.append((above, place))

    sizes = [np.ones(len(above), int) for above, _ in levels]  # of the subtrees
    for (above, _), size, higher in zip(levels[:0:-1], sizes[:0:-1], sizes[-2::-1], strict=True):
        higher += np.bincount(above, size, len(higher)).astype(int)
    total = sizes[0].sum()
    places = np.zeros((depth, total), np.int32)
    last, at, parent = (np.zeros(total, np.int32) for _ in range(3))
    before = np.asarray([-1])  # where the level above lies in the list; the root is before it
    rows = np.zeros((0, 1), int)
    for level, ((above, place), size) in enumerate(zip(levels, sizes, strict=True)):
        ends = np.cumsum(size)
        first = np.searchsorted(above, above)  # the first child of the same parent
        here = before[above] + 1 + (ends - size) - (ends - size)[first]
        rows = np.concatenate([rows[:, above], place[None]])
        places[: level + 1, here] = rows
        last[here], at[here], parent[here] = place, level + 1, before[above]
        before = here
    return _Paths(places=places, last=last, depth=at, parent=parent)


def _choose_from_list(steps: jax.Array, budget: int) -> tuple[jax.Array, ...]:
    """Score, last place, level and parent's row [budget] of the best paths, by one choice."""
    depth, children = steps.shape
    paths = _list_paths(budget, depth, children)
    score = jnp.zeros(paths.last.shape, jnp.float32)
    for level in range(depth):  # in order, as a walk down the tree adds them
        further = score + steps[level, paths.places[level]]
        score = jnp.where(paths.depth > level, further, score)
    kept = min(budget, score.size)
    score, best = (x[0] for x in top_k(score[None], kept))
    parent = jnp.asarray(paths.parent)[best]
    row = 1 + jnp.argmax(parent[:, None] == best, axis=1).astype(jnp.int32)
    chosen = (
        score,
        jnp.asarray(paths.last)[best],
        jnp.asarray(paths.depth)[best] - 1,
        jnp.where(parent < 0, ROOT, row),
    )
    padding = (-jnp.inf, 0, 0, ROOT)
    return tuple(
        jnp.pad(x, (0, budget - kept), constant_values=value)
        for x, value in zip(chosen, padding, strict=True)
    )


def _choose_by_levels(steps: jax.Array, budget: int) -> tuple[jax.Array, ...]:
    """As `_choose_from_list`, from the best paths of each depth in turn: for large budgets."""
    depth, children = steps.shape
    score = jnp.where(jnp.arange(budget) == 0, 0.0, -jnp.inf)  # the root, as a level of its own
    path = jnp.zeros((budget, depth), jnp.int32)  # place + 1 of every step, 0 past the end
    levels = []
    for d in range(depth):
        candidates = (score[:, None] + steps[d]).reshape(-1)
        kept = min(budget, candidates.size)
        chosen = jnp.sort(jax.lax.top_k(candidates, kept)[1])  # back in dictionary order
        chosen = jnp.pad(chosen, (0, budget - kept))
        above, place = chosen // children, chosen % children
        score = jnp.where(jnp.arange(budget) < kept, candidates[chosen], -jnp.inf)
        path = path[above].at[:, d].set(place + 1)
        levels.append((score, place, above, path))
    score, place, above, path = (jnp.concatenate(parts) for parts in zip(*levels, strict=True))
    level = jnp.repeat(jnp.arange(depth, dtype=jnp.int32), budget)

    path = jnp.pad(path, ((0, 0), (0, depth % 2)))
    words = (path[:, 0::2] << _PLACE_BITS) | path[:, 1::2]
    index = jnp.arange(score.size, dtype=jnp.int32)
    keys = (-score, *words.T, index)
    order = jax.lax.sort(keys, num_keys=len(keys) - 1)[-1]
    row = jnp.zeros_like(index).at[order].set(index + 1)  # index -> row of the tree
    best = order[:budget]
    parent = jnp.where(level[best] == 0, ROOT, row[(level[best] - 1) * budget + above[best]])
    return score[best], place[best], level[best], parent
