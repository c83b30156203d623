"""All nodes at once as dense algebra and one triangular inverse, for any backend.

Unrolling the recurrence along every path turns it into (DFlash-TfM, arXiv 2607.06763, and
tree-shaped WY forms)

    (I + X) U = beta (V - a K S0),   X_ij = [j < i] beta_i exp(D_ij) (k_i . k_j)
    O = a Q S0 + Y U,                Y_ij = [j <= i] exp(D_ij) (q_i . k_j)

where `j <= i` says that j lies on the path root..i, D_ij sums g over the path from below j to i,
and a_i = exp(sum of g over root..i). X is strictly lower triangular as parents precede children.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gdn_tree.scales import FORGET, scaled
from pallas_kernels.gdn_tree.topology import TreeTopology
from pallas_kernels.triangular import unit_lower_inverse

_HIGHEST = lax.Precision.HIGHEST


def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    s0: jax.Array,
    topology: TreeTopology,
    *,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `(out, u, log_decay)` in float32. Shapes as in `gdn_tree_verify`."""
    nodes, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    group = value_heads // key_heads
    inputs = (scaled(q, q_scale), scaled(k, k_scale), v, jnp.maximum(g, FORGET), beta)
    q, k, v, g, beta = (_clean(x, topology.valid) for x in inputs)

    decay, log_decay = _segment_decay(g, topology.ancestors)  # [HV, N, N], [N, HV]

    # Keys and queries share every product: one pass over the keys, one over the states.
    kq = jnp.stack([k, q]).transpose(2, 0, 1, 3).reshape(key_heads, 2 * nodes, key_dim)
    gram = jnp.einsum("hid,jhd->hij", kq, k, precision=_HIGHEST)
    gram = gram.reshape(key_heads, 1, 2, nodes, nodes)
    gram = gram * decay.reshape(key_heads, group, 1, nodes, nodes)
    gram = gram.reshape(value_heads, 2, nodes, nodes)
    read = jnp.einsum("hid,hdv->hiv", jnp.repeat(kq, group, axis=0), s0, precision=_HIGHEST)
    read = read.reshape(value_heads, 2, nodes, value_dim)
    read = read * jnp.exp(log_decay).T[:, None, :, None]

    x = jnp.tril(gram[:, 0], -1) * beta.T[:, :, None]
    rhs = beta.T[:, :, None] * (v.transpose(1, 0, 2) - read[:, 0])
    u = jnp.einsum("hij,hjv->hiv", unit_lower_inverse(x), rhs, precision=_HIGHEST)
    out = read[:, 1] + jnp.einsum("hij,hjv->hiv", gram[:, 1], u, precision=_HIGHEST)
    return out.transpose(1, 0, 2), u.transpose(1, 0, 2), log_decay


def _clean(x: jax.Array, valid: jax.Array) -> jax.Array:
    """`x` in float32 with zeros on padding rows, whatever those hold."""
    keep = valid.reshape(valid.shape + (1,) * (x.ndim - 1))
    return jnp.where(keep, x.astype(jnp.float32), jnp.float32(0))


def _segment_decay(g: jax.Array, ancestors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decay from node j down to node i, zero off the path [HV, N, N], and the path sums [N, HV].

    The segment is summed as such: the difference of two long sums would lose its digits.
    """
    nodes = ancestors.shape[0]
    along = jnp.where(ancestors, g.T[:, None, :], jnp.float32(0))  # [HV, N, N]
    # On one path a later row is a deeper node, so the rows after j are those below j.
    after = jnp.tril(jnp.ones((nodes, nodes), jnp.float32), -1)  # [m, j]: m > j
    segment = jnp.einsum("him,mj->hij", along, after, precision=_HIGHEST)
    segment = jnp.where(ancestors, segment, jnp.float32(0))
    decay = jnp.where(ancestors, jnp.exp(segment), jnp.float32(0))
    return decay, jnp.sum(along, axis=2).T
