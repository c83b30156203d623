"""Tree -> what the target says at every node, in one pass; nothing is committed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from tfm_jax.decoding.sampling import choose
from tfm_jax.decoding.state import DecodeState, Request, Trio
from tfm_jax.models.qwen36 import Hidden, Pending
from tfm_jax.tree import Tree, topology


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The target's answer to a tree.

    Attributes:
      targets: [N] int32, the target's token after each node's path.
      hidden: final-norm states and drafter features of the rows.
      pending: per layer, what its cache needs to advance along any path.
    """

    targets: jax.Array
    hidden: Hidden
    pending: tuple[Pending, ...]


def verify(
    trio: Trio, state: DecodeState, tree: Tree, request: Request, depth: int
) -> Verification:
    """Runs the tree, at most `depth` deep, on top of the committed text."""
    verifier = trio.verifier
    shape = topology(tree, verifier.config.linear_conv_kernel_dim)
    hidden, pending = verifier.verify(tree.token, state.caches, state.length, shape, trio.taps)
    positions = state.length + 1 + jnp.arange(depth + 1)
    targets = choose(verifier.logits(hidden.final), tree.depth, positions, request)
    return Verification(targets=targets, hidden=hidden, pending=pending)
