"""What the kernels need to know about a tree, computed once per decoding step for all layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.concrete import concrete

NO_PARENT = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeTopology:
    """The shape of one tree of N rows.

    Attributes:
      ancestors: bool [N, N]; `ancestors[i, j]` says that j is i or lies on the path root..i.
        False in the rows and columns of padding.
      depth: int32 [N]; number of strict ancestors, 0 at the root, -1 on padding rows.
    """

    ancestors: jax.Array
    depth: jax.Array

    @property
    def valid(self) -> jax.Array:
        """Rows that are nodes, bool [N]."""
        return self.depth >= 0


def tree_topology(parents: jax.Array, valid: jax.Array | None = None) -> TreeTopology:
    """Returns the topology of the tree given by parent rows.

    Args:
      parents: int32 [N]; `parents[i] < i`, -1 at the root and on padding rows; the parent of a
        node is a node. Checked unless traced.
      valid: bool [N]; False marks padding rows, which may sit anywhere. All rows by default.

    Raises:
      ValueError: `parents` is not a vector of integers or no tree, or `valid` has another shape.
    """
    parents = jnp.asarray(parents)
    if parents.ndim != 1 or not jnp.issubdtype(parents.dtype, jnp.integer):
        raise ValueError(f"parents must be integers [N], got {parents.dtype} {parents.shape}")
    if valid is None:
        valid = jnp.ones(parents.shape, jnp.bool_)
    valid = jnp.asarray(valid, jnp.bool_)
    if valid.shape != parents.shape:
        raise ValueError(f"valid must have the shape of parents {parents.shape}, got {valid.shape}")
    _check_order(parents, valid)
    nodes = parents.shape[0]
    # Each step doubles the distance covered, so log2(N) gathers reach every ancestor.
    ancestors = jnp.eye(nodes, dtype=jnp.bool_) & valid[:, None]
    jump = jnp.where(valid, parents.astype(jnp.int32), NO_PARENT)
    for _ in range((nodes - 1).bit_length()):
        landed = jump != NO_PARENT
        ancestors |= ancestors[jump] & landed[:, None]
        jump = jnp.where(landed, jump[jump], NO_PARENT)
        # Fused into a consumer, a chain of gathers would be walked anew for every element.
        ancestors, jump = jax.lax.optimization_barrier((ancestors, jump))
    depth = jnp.sum(ancestors, axis=1, dtype=jnp.int32) - 1
    return TreeTopology(ancestors=ancestors, depth=depth)


def _check_order(parents: jax.Array, valid: jax.Array) -> None:
    above, node = concrete(parents), concrete(valid)
    if above is None or node is None:
        return
    rows = np.arange(above.size)
    astray = rows[node & ((above < NO_PARENT) | (above >= rows))]
    if astray.size:
        row = int(astray[0])
        raise ValueError(f"parents[i] must lie in -1..i-1, got parents[{row}] = {above[row]}")
    orphans = rows[node & (above >= 0) & ~node[np.maximum(above, 0)]]
    if orphans.size:
        row = int(orphans[0])
        raise ValueError(f"the parent of node {row} is row {above[row]}, which is padding")
