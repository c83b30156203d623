"""The definition: every node carries its own state, advanced from its parent's."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gdn_tree.scales import FORGET


def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    s0: jax.Array,
    parents: jax.Array,
    valid: jax.Array,
    *,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `(out, u, log_decay)` by walking the nodes in order, in the type of `s0`.

    Shapes as in `gdn_tree_verify`. Per node, with S the parent's state and `s0` above the root:
    `S <- exp(g) S; u = beta (v - k^T S); S <- S + k u^T; out = q^T S` (Gated DeltaNet,
    arXiv 2412.06464, along each path of the tree). Under `jax.enable_x64` with a float64 `s0` it
    is the yardstick of the other implementations.
    """
    nodes = q.shape[0]
    group = v.shape[1] // k.shape[1]
    dtype = s0.dtype

    def clean(x: jax.Array) -> jax.Array:
        keep = valid.reshape((nodes,) + (1,) * (x.ndim - 1))
        return jnp.where(keep, x.astype(dtype), jnp.zeros((), dtype))

    def heads(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        x = clean(x) if scale is None else clean(x) * clean(scale)[:, :, None]
        return jnp.repeat(x, group, axis=1)  # [N, HV, DK]

    parents = jnp.where(valid, parents.astype(jnp.int32), -1)
    q, k = heads(q, q_scale), heads(k, k_scale)
    v, g, beta = clean(v), clean(jnp.maximum(g, FORGET)), clean(beta)

    def step(carry, node):
        states, sums = carry  # row N holds what stands above the root
        row, parent, q_i, k_i, v_i, g_i, beta_i = node
        above = jnp.where(parent < 0, nodes, parent)
        state = jnp.exp(g_i)[:, None, None] * states[above]
        read = _contract("hk,hkv->hv", k_i, state)
        u_i = beta_i[:, None] * (v_i - read)
        state = state + k_i[:, :, None] * u_i[:, None, :]
        out_i = _contract("hk,hkv->hv", q_i, state)
        sum_i = sums[above] + g_i
        return (states.at[row].set(state), sums.at[row].set(sum_i)), (out_i, u_i, sum_i)

    states = jnp.zeros((nodes + 1, *s0.shape), dtype).at[nodes].set(s0)
    sums = jnp.zeros((nodes + 1, s0.shape[0]), dtype)
    rows = jnp.arange(nodes, dtype=jnp.int32)
    _, (out, u, log_decay) = lax.scan(step, (states, sums), (rows, parents, q, k, v, g, beta))
    return out, u, log_decay


def _contract(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)
