"""Tree and targets -> the accepted path.

Target-only acceptance: from the root, follow the child that carries the target's token; where
no child does, that token is the bonus. Every emitted token is the target's own, so any tree is
lossless, and no lossless rule accepts more on a tree that does not depend on random draws.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from tfm_jax.tree import ROOT, Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """An accepted path of the tree.

    Attributes:
      path: [P] int32 rows from the root down; ROOT beyond `count`.
      count: int32, accepted rows, the root included; also the number of emitted tokens.
      emitted: [P] int32, the accepted tokens below the root, then the bonus token.
      bonus: int32, the target's token after the last accepted row.
    """

    path: jax.Array
    count: jax.Array
    emitted: jax.Array
    bonus: jax.Array


def accept(
    tree: Tree, targets: jax.Array, *, depth: int, limit: jax.Array, end_tokens: jax.Array
) -> Acceptance:
    """Walks down the tree; an end token is never passed, nor is `limit` exceeded.

    Args:
      tree: N rows, at most `depth` deep.
      targets: [N] int32.
      depth: static; P = depth + 1.
      limit: int32 scalar >= 1, tokens that may still be emitted.
      end_tokens: [E] int32; one of these is always the last token.
    """
    chex.assert_shape(targets, (tree.rows,))
    rows = jnp.arange(tree.rows)
    above = jnp.maximum(tree.parent, ROOT)
    ends = (tree.token[:, None] == end_tokens).any(axis=-1)
    carries = tree.valid & (tree.token == targets[above]) & ~ends & (tree.depth < limit)
    # First such child, should hostile input give siblings the same token.
    child = jnp.where(carries & (above == rows[:, None]) & (rows > ROOT), rows, tree.rows)
    following = child.min(axis=-1)  # [N], N where no child carries the target's token

    def step(row: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        row = jnp.where(row < tree.rows, following[jnp.minimum(row, tree.rows - 1)], row)
        return row, row

    _, below = jax.lax.scan(step, jnp.int32(ROOT), None, length=depth, unroll=True)
    path = jnp.concatenate([jnp.zeros((1,), below.dtype), below])
    accepted = path < tree.rows
    path = jnp.where(accepted, path, ROOT).astype(jnp.int32)
    count = accepted.sum(dtype=jnp.int32)
    bonus = targets[path[count - 1]]
    tokens = jnp.append(tree.token[path[1:]], 0)
    emitted = jnp.where(jnp.arange(depth + 1) == count - 1, bonus, tokens)
    return Acceptance(path=path, count=count, emitted=emitted, bonus=bonus)
