"""One round of decoding: draft, grow, verify, accept, commit."""

from __future__ import annotations

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
    depth = draft_depth(trio, method)
    tree = propose(trio, state, request, method, shape)
    verification = verify(trio, state, tree, request, depth)
    acceptance = take(state, tree, verification, request, depth)
    return commit(trio, state, tree, verification, acceptance, request), tree, acceptance


def propose(
    trio: Trio, state: DecodeState, request: Request, method: str, shape: TreeConfig
) -> Tree:
    """Drafts and grows the method's tree. Plain decoding is a tree that is the anchor alone."""
    anchor = state.tokens[state.length]
    if method == "ar":
        return plant(anchor, 1)
    drafted = draft(trio, state, request, shape.pool)
    return grow_tree(trio, anchor, drafted, state.hidden, method, shape)


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


def take(
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


def shape_for(method: str, shape: TreeConfig) -> TreeConfig:
    """The shape with everything the method does not use at its default: one program for all."""
    if method == "ar":
        return TreeConfig()
    if method == "tfm":
        return shape
    return TreeConfig(budget=shape.budget, pool=shape.pool)


def draft_depth(trio: Trio, method: str) -> int:
    """Deepest node of the method's trees."""
    return 0 if method == "ar" else trio.depth
