"""Pools -> Tree. The methods differ in the scorer (marginals or Weaver) and in the shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.weaver_step import Pools, growth_rows, weaver_grow
from tfm_jax.config import TreeConfig
from tfm_jax.decoding.draft import Draft
from tfm_jax.decoding.state import Trio
from tfm_jax.models.weaver import pool_logits
from tfm_jax.tree import NO_PARENT, ROOT, Tree, plant


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Expansion:
    """w nodes that are about to get children, in consecutive rows from `start`.

    Attributes:
      start: int32 scalar.
      token, parent, depth: [w] int32; depth is limited to the last pool row.
      ancestors: [w, N] bool, ancestor or self.
    """

    start: jax.Array
    token: jax.Array
    parent: jax.Array
    depth: jax.Array
    ancestors: jax.Array


Memory = Any
Scorer = Callable[[Memory, Expansion], tuple[Memory, jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Frontier:
    """Offered children; entry `C * parent row + order` keeps ties in (parent, rank) order."""

    score: jax.Array  # [N * C], -inf where nothing is offered
    logprob: jax.Array
    token: jax.Array
    rank: jax.Array


def grow(
    root: jax.Array, ids: jax.Array, score: Scorer, memory: Memory, config: TreeConfig
) -> Tree:
    """Grows a tree best-first, `config.expand` nodes at a time (paper, section on trees).

    Frontier entries are taken by score, then lower parent row, then better pool rank. The
    nodes of the last round get no children. A round that finds the frontier empty leaves
    padding in its rows.

    Args:
      root: int32 scalar, the anchor token.
      ids: [D, K] int32 pools; D is the depth limit.
      score: gives log-probabilities [w, K] of the pool rows of w nodes, and its next memory.
      memory: the scorer's own state, with room for `slots(config)` rows.
      config: the shape; at most K children are offered.

    Returns:
      A tree of `config.budget + 1` rows.
    """
    chex.assert_rank(ids, 2)
    depth_limit, pool = ids.shape
    width, rows = min(config.expand, config.budget), slots(config)
    rounds = (rows - 1) // width
    children = min(config.children, pool)
    entries = rows * children
    frontier = _Frontier(
        score=jnp.full((entries,), -jnp.inf, jnp.float32),
        logprob=jnp.full((entries,), -jnp.inf, jnp.float32),
        token=jnp.zeros((entries,), jnp.int32),
        rank=jnp.zeros((entries,), jnp.int32),
    )
    tree = plant(root, rows)
    ancestors = jnp.zeros((rows, rows), bool).at[ROOT, ROOT].set(True)

    def expand(
        tree: Tree, ancestors: jax.Array, frontier: _Frontier, memory: Memory, start, count: int
    ) -> tuple[_Frontier, Memory]:
        def rows_of(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, count)

        depth = rows_of(tree.depth)
        level = jnp.minimum(depth, depth_limit - 1)
        memory, logprobs = score(
            memory,
            Expansion(
                start=start,
                token=rows_of(tree.token),
                parent=rows_of(tree.parent),
                depth=level,
                ancestors=rows_of(ancestors),
            ),
        )
        logprob, rank = jax.lax.top_k(logprobs, children)  # [w, C]
        open_ = rows_of(tree.valid) & (depth < depth_limit)
        offered = open_[:, None] & (logprob > -jnp.inf)
        total = jnp.where(offered, rows_of(tree.score)[:, None] + logprob, -jnp.inf)

        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(x, new.reshape(-1), start * children, 0)

        return _Frontier(
            score=put(frontier.score, total),
            logprob=put(frontier.logprob, logprob),
            token=put(frontier.token, jnp.take_along_axis(ids[level], rank, axis=-1)),
            rank=put(frontier.rank, rank.astype(jnp.int32)),
        ), memory

    def take(
        tree: Tree, ancestors: jax.Array, frontier: _Frontier, start
    ) -> tuple[Tree, jax.Array, _Frontier]:
        score, entry = jax.lax.top_k(frontier.score, width)  # [w]
        real = score > -jnp.inf
        parent = entry // children

        def put(x: jax.Array, new: jax.Array, padding) -> jax.Array:
            new = jnp.where(real, new, padding).astype(x.dtype)
            return jax.lax.dynamic_update_slice_in_dim(x, new, start, 0)

        own = jnp.arange(rows) == (start + jnp.arange(width))[:, None]
        path = (ancestors[parent] | own) & real[:, None]
        tree = Tree(
            token=put(tree.token, frontier.token[entry], 0),
            parent=put(tree.parent, parent, NO_PARENT),
            depth=put(tree.depth, tree.depth[parent] + 1, 0),
            score=put(tree.score, score, -jnp.inf),
            logprob=put(tree.logprob, frontier.logprob[entry], -jnp.inf),
            rank=put(tree.rank, frontier.rank[entry], -1),
            valid=put(tree.valid, real, False),
        )
        ancestors = jax.lax.dynamic_update_slice_in_dim(ancestors, path, start, 0)
        taken = dataclasses.replace(frontier, score=frontier.score.at[entry].set(-jnp.inf))
        return tree, ancestors, taken

    def one_round(i, carry):
        tree, ancestors, frontier, memory = carry
        start = 1 + i * width
        tree, ancestors, frontier = take(tree, ancestors, frontier, start)
        frontier, memory = expand(tree, ancestors, frontier, memory, start, width)
        return tree, ancestors, frontier, memory

    frontier, memory = expand(tree, ancestors, frontier, memory, jnp.int32(ROOT), 1)
    carry = (tree, ancestors, frontier, memory)
    tree, ancestors, frontier, memory = jax.lax.fori_loop(0, rounds - 1, one_round, carry)
    tree, _, _ = take(tree, ancestors, frontier, jnp.int32(1 + (rounds - 1) * width))
    return jax.tree.map(lambda x: x[: config.budget + 1], tree)


def slots(config: TreeConfig) -> int:
    """Rows in use while a tree of this shape grows."""
    return growth_rows(config.budget, config.expand)


def marginal_scorer(logprobs: jax.Array) -> Scorer:
    """Scores every node of a depth alike, by the drafter's marginals [D, K]."""

    def score(memory: Memory, nodes: Expansion) -> tuple[Memory, jax.Array]:
        return memory, logprobs[nodes.depth]

    return score


def weaver_scorer(
    trio: Trio, drafted: Draft, hidden: jax.Array, rows: int
) -> tuple[Scorer, Memory]:
    """Scores a node given its own path, and the memory to start from.

    Args:
      trio: its Weaver is used.
      drafted: pools and drafter states.
      hidden: [H] verifier's final-norm state that predicted the root.
      rows: nodes that the memory has room for.
    """
    weaver, verifier = trio.weaver, trio.verifier
    assert weaver is not None

    def score(memory: Memory, nodes: Expansion) -> tuple[Memory, jax.Array]:
        memory, query = weaver.node_step(
            memory, verifier.embed_tokens(nodes.token), nodes.depth, nodes.start, nodes.ancestors
        )
        pool = verifier.output_rows[drafted.ids[nodes.depth]]  # [w, K, H]
        logits = pool_logits(query, drafted.logits[nodes.depth], pool)
        return memory, drafted.log_probs(logits, nodes.depth)

    return score, weaver.prefix(hidden, drafted.hidden, rows)


def grow_fused(
    root: jax.Array, trio: Trio, drafted: Draft, hidden: jax.Array, config: TreeConfig
) -> Tree:
    """The tree of `grow` under `weaver_scorer`, in few launches.

    Arguments as there; `trio.growth` holds the parameters.
    """
    assert trio.weaver is not None
    assert trio.growth is not None
    memory = trio.weaver.prefix(hidden, drafted.hidden, slots(config))
    tree = weaver_grow(
        root,
        Pools(
            ids=drafted.ids,
            prior=drafted.logits,
            noise=drafted.noise,
            temperature=drafted.temperature,
        ),
        trio.growth,
        memory.key,
        memory.value,
        budget=config.budget,
        expand=config.expand,
        children=config.children,
        activation=trio.weaver.activation,
    )
    return Tree(**tree._asdict())


def chain(root: jax.Array, ids: jax.Array, logprobs: jax.Array, budget: int) -> Tree:
    """The best candidate of each depth, one below the other: the plain DFlash draft.

    Args:
      root: int32 scalar.
      ids, logprobs: [D, K].
      budget: nodes, at most D are used.
    """
    chex.assert_equal_shape([ids, logprobs])
    nodes = min(budget, ids.shape[0])
    rank = jnp.argmax(logprobs[:nodes], axis=-1).astype(jnp.int32)  # [nodes]
    step = jnp.take_along_axis(logprobs[:nodes], rank[:, None], axis=-1)[:, 0]
    token = jnp.take_along_axis(ids[:nodes], rank[:, None], axis=-1)[:, 0]
    tree = plant(root, nodes + 1)
    row = jnp.arange(nodes, dtype=jnp.int32)
    return Tree(
        token=tree.token.at[1:].set(token),
        parent=tree.parent.at[1:].set(row),
        depth=tree.depth.at[1:].set(row + 1),
        score=tree.score.at[1:].set(jnp.cumsum(step)),
        logprob=tree.logprob.at[1:].set(step),
        rank=tree.rank.at[1:].set(rank),
        valid=jnp.ones((nodes + 1,), bool),
    )
