"""The draft tree in fixed-size arrays, and what every layer needs to know of its shape."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import gdn_tree

ROOT = 0
NO_PARENT = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """N rows: the root (the anchor token) and up to N - 1 drafted nodes, parents first.

    Padding rows can lie anywhere; only `valid` tells them (the root has no parent either).

    Attributes:
      token: [N] int32.
      parent: [N] int32, NO_PARENT at the root and at padding.
      depth: [N] int32, 0 at the root.
      score: [N] float32, sum of log-probabilities along the path; -inf at padding.
      logprob: [N] float32, log-probability of the node's own step; -inf at padding.
      rank: [N] int32, position in the pool row; -1 at the root and at padding.
      valid: [N] bool.
    """

    token: jax.Array
    parent: jax.Array
    depth: jax.Array
    score: jax.Array
    logprob: jax.Array
    rank: jax.Array
    valid: jax.Array

    @property
    def rows(self) -> int:
        return self.token.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """The shape of a tree, computed once a round and shared by all layers.

    Attributes:
      parents: [N] int32.
      depths: [N] int32.
      ancestors: [N, N] bool, ancestor or self; the own row is always visible.
      taps: [N, W] int32, each row's convolution inputs, oldest first, as indices into
        (W - 1 rows of history, N tree rows).
      gdn: what the tree solve needs of it.
    """

    parents: jax.Array
    depths: jax.Array
    ancestors: jax.Array
    taps: jax.Array
    gdn: gdn_tree.TreeTopology


def plant(token: jax.Array, rows: int) -> Tree:
    """A tree of `rows` rows that holds the root alone."""
    row = jnp.arange(rows)
    root = row == ROOT
    return Tree(
        token=jnp.where(root, token, 0).astype(jnp.int32),
        parent=jnp.full((rows,), NO_PARENT, jnp.int32),
        depth=jnp.zeros((rows,), jnp.int32),
        score=jnp.where(root, 0.0, -jnp.inf).astype(jnp.float32),
        logprob=jnp.where(root, 0.0, -jnp.inf).astype(jnp.float32),
        rank=jnp.full((rows,), -1, jnp.int32),
        valid=root,
    )


def topology(tree: Tree, conv_width: int) -> Topology:
    """Everything that verification needs of the tree's shape, for W = `conv_width` taps."""
    history = conv_width - 1
    rows = tree.rows
    # History rows come first, each the parent of the next; the root hangs on the newest one.
    chain = jnp.maximum(jnp.arange(history, dtype=jnp.int32) - 1, 0)
    hung = jnp.where(tree.parent == NO_PARENT, history - 1, tree.parent + history)
    above = jnp.concatenate([chain, hung.astype(jnp.int32)])
    taps = [jnp.arange(rows, dtype=jnp.int32) + history]
    for _ in range(history):
        taps.append(above[taps[-1]])
    gdn = gdn_tree.tree_topology(tree.parent, tree.valid)
    return Topology(
        parents=tree.parent,
        depths=tree.depth,
        ancestors=gdn.ancestors | jnp.eye(rows, dtype=bool),
        # Fused into every layer's gather, the chain above would be walked anew each time.
        taps=jax.lax.optimization_barrier(jnp.stack(taps[::-1], axis=-1)),
        gdn=gdn,
    )
