"""One round of decoding: draft, grow, verify, accept, commit."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax

from tfm_jax.config import TreeConfig
from tfm_jax.decoding.accept import Acceptance, accept
from tfm_jax.decoding.commit import commit
from tfm_jax.decoding.ddtree import ddtree
from tfm_jax.decoding.draft import Draft, draft
from tfm_jax.decoding.grow import (
    chain,
    grow,
    grow_fused,
    slots,
    weaver_scorer,
)
from tfm_jax.decoding.state import DecodeState, Request, Trio
from tfm_jax.decoding.verify import Verification, verify
from tfm_jax.tree import Tree, plant

Method = Literal["ar", "dflash", "ddtree", "tfm"]
METHODS: tuple[str, ...] = get_args(Method)


def speculate(
    trio: Trio, state: DecodeState, request: Request, method: str, shape: TreeConfig
) -> tuple[DecodeState, Tree, Acceptance]:
    """Runs one round and returns the next state, and what was drafted and accepted."""
    depth, anchor = draft_depth(trio, method), state.tokens[state.length]
    if method == "ar":  # plain decoding: a tree that is the anchor alone
        tree = plant(anchor, 1)
    else:
        drafted = draft(trio, state, request, shape.pool)
        tree = grow_tree(trio, anchor, drafted, state.hidden, method, shape)
    verification = verify(trio, state, tree, request, depth)
    acceptance = accept_within(state, tree, verification, request, depth)
    return commit(trio, state, tree, verification, acceptance, request), tree, acceptance


def grow_tree(
    trio: Trio,
    anchor: jax.Array,
    drafted: Draft,
    hidden: jax.Array,
    method: str,
    shape: TreeConfig,
) -> Tree:
    """The method's tree over drafted pools, as deep as these.

    Args:
      trio: its Weaver grows the trees of "tfm".
      anchor: int32 scalar, the root's token.
      drafted: pools and drafter states.
      hidden: [H] verifier's final-norm state that predicted the anchor.
      method: "dflash", "ddtree" or "tfm".
      shape: of the tree.
    """
    if method == "dflash":
        return chain(anchor, drafted.ids, drafted.marginals, shape.budget)
    if method == "ddtree":
        return ddtree(anchor, drafted.ids, drafted.marginals, shape.budget)
    if trio.growth is not None:
        return grow_fused(anchor, trio, drafted, hidden, shape)
    scorer, memory = weaver_scorer(trio, drafted, hidden, slots(shape))
    return grow(anchor, drafted.ids, scorer, memory, shape)


def accept_within(
    state: DecodeState, tree: Tree, verification: Verification, request: Request, depth: int
) -> Acceptance:
    """Accepts what the request still has room for."""
    return accept(
        tree,
        verification.targets,
        depth=depth,
        limit=request.total - state.length - 1,
        end_tokens=request.end_tokens,
    )


def shape_for(trio: Trio, method: str, shape: TreeConfig) -> TreeConfig:
    """The shape that stands for all that grow the same trees: one program serves them.

    What the method does not use is at its default, what exceeds the trio's sizes is cut to them.
    """
    if method == "ar":
        return TreeConfig()
    pool = min(shape.pool, trio.verifier.config.vocab_size)
    if method == "dflash":
        return TreeConfig(budget=min(shape.budget, trio.depth), pool=pool)
    if method == "ddtree":
        return TreeConfig(budget=shape.budget, pool=pool)
    return dataclasses.replace(
        shape,
        expand=min(shape.expand, shape.budget),
        children=min(shape.children, pool),
        pool=pool,
    )


def draft_depth(trio: Trio, method: str) -> int:
    """Deepest node of the method's trees."""
    return 0 if method == "ar" else trio.depth
