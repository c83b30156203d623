"""The state after an accepted path, from what verification kept: one small matrix product."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import check_array, check_path, check_scalar
from pallas_kernels.gdn_tree.scales import scaled
from pallas_kernels.gdn_tree.topology import tree_topology


def gdn_tree_commit(
    s0: jax.Array,
    k: jax.Array,
    u: jax.Array,
    log_decay: jax.Array,
    parents: jax.Array,
    node: jax.Array | int,
    *,
    k_scale: jax.Array | None = None,
) -> jax.Array:
    """Returns the state after the path root..`node`, float32 [HV, DK, DV].

    `S = exp(L_n) S0 + sum over j on the path of exp(L_n - L_j) k_j u_j^T`, L = `log_decay`, the
    keys times their scales.

    Args:
      s0: float32 [HV, DK, DV], the state the tree was verified from.
      k: [N, HK, DK] float32 or bfloat16, as given to `gdn_tree_verify`.
      u: float32 [N, HV, DV], from `gdn_tree_verify`.
      log_decay: float32 [N, HV], from `gdn_tree_verify`.
      parents: int32 [N].
      node: row of the last accepted node; may be traced.
      k_scale: float32 [N, HK], as given to `gdn_tree_verify`.

    Raises:
      TypeError: a float argument of another type.
      ValueError: shapes that do not belong together, or a node that is no row.
    """
    _check(s0, k, u, log_decay, k_scale)
    if parents.shape != k.shape[:1]:
        raise ValueError(f"parents must be [N] = {k.shape[:1]}, got {parents.shape}")
    node = check_scalar("node", node, 0, k.shape[0] - 1)
    on_path = tree_topology(parents).ancestors[node]
    return _fold(s0, k, u, log_decay, on_path, log_decay[node], k_scale)


def gdn_tree_commit_path(
    s0: jax.Array,
    k: jax.Array,
    u: jax.Array,
    log_decay: jax.Array,
    path: jax.Array,
    count: jax.Array | int,
    *,
    k_scale: jax.Array | None = None,
) -> jax.Array:
    """Returns the state after the first `count` rows of `path`, float32 [HV, DK, DV].

    The same sum as `gdn_tree_commit` over P gathered rows instead of all N.

    Args:
      s0, k, u, log_decay, k_scale: as in `gdn_tree_commit`.
      path: int32 [P], rows root..leaf; entries from `count` on may hold anything.
      count: number of accepted rows, 1 <= count <= P; may be traced.

    Raises:
      TypeError: a float argument of another type.
      ValueError: shapes that do not belong together, or a path or count that is known and out of
        range.
    """
    _check(s0, k, u, log_decay, k_scale)
    path, count = check_path(path, count, k.shape[0])
    on_path = jnp.arange(path.shape[0], dtype=jnp.int32) < count
    rows = jnp.where(on_path, path, path[0])
    last = log_decay[rows[count - 1]]
    k_scale = None if k_scale is None else k_scale[rows]
    return _fold(s0, k[rows], u[rows], log_decay[rows], on_path, last, k_scale)


def _fold(
    s0: jax.Array,
    k: jax.Array,
    u: jax.Array,
    log_decay: jax.Array,
    on_path: jax.Array,
    last: jax.Array,
    k_scale: jax.Array | None,
) -> jax.Array:
    rows, key_heads, key_dim = k.shape
    value_heads, value_dim = u.shape[1:]
    group = value_heads // key_heads
    zero = jnp.float32(0)
    exponent = jnp.where(on_path[:, None], last - log_decay, zero)  # masked before exp
    k = scaled(k, k_scale)
    k = jnp.where(on_path[:, None, None], k, zero)
    u = jnp.where(on_path[:, None, None], u * jnp.exp(exponent)[:, :, None], zero)
    u = u.reshape(rows, key_heads, group, value_dim)
    added = jnp.einsum("phk,phrv->hrkv", k, u, precision=lax.Precision.HIGHEST)
    added = added.reshape(value_heads, key_dim, value_dim)
    return jnp.exp(last)[:, None, None] * s0 + added


def _check(
    s0: jax.Array, k: jax.Array, u: jax.Array, log_decay: jax.Array, k_scale: jax.Array | None
) -> None:
    check_array("k", k)
    for name, x in (("s0", s0), ("u", u), ("log_decay", log_decay), ("k_scale", k_scale)):
        if x is not None and x.dtype != jnp.float32:
            raise TypeError(f"{name} must be float32, got {x.dtype}")
    if u.ndim != 3 or 0 in u.shape or 0 in k.shape:
        raise ValueError(f"u must be [N, HV, DV] and no axis empty, got u {u.shape}, k {k.shape}")
    nodes, value_heads, value_dim = u.shape
    if s0.ndim != 3 or s0.shape[0] != value_heads or s0.shape[2] != value_dim:
        raise ValueError(f"s0 must be [HV, DK, DV] for u {u.shape}, got {s0.shape}")
    if k.ndim != 3 or k.shape[0] != nodes or k.shape[2] != s0.shape[1]:
        raise ValueError(f"k must be [N, HK, DK] for u {u.shape} and s0 {s0.shape}, got {k.shape}")
    if value_heads % k.shape[1]:
        raise ValueError(f"{value_heads} value heads cannot share {k.shape[1]} key heads evenly")
    if k_scale is not None and k_scale.shape != k.shape[:2]:
        raise ValueError(f"k_scale must be {k.shape[:2]} for k {k.shape}, got {k_scale.shape}")
    if log_decay.shape != (nodes, value_heads):
        raise ValueError(f"log_decay must be {(nodes, value_heads)}, got {log_decay.shape}")
