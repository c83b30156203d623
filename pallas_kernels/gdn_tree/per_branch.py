"""The usual way to verify a tree, as a baseline: walk the nodes, one stored state for each.

A program owns a value head and a block of value columns and advances it node by node; states live
in device memory and the newest one stays in registers for a child that comes next. Nothing here
is part of the public interface.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import load, span, store


def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    s0: jax.Array,
    parents: jax.Array,
    *,
    block_v: int = 32,
    num_warps: int = 4,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns `(out, states)`, float32 [N, HV, DV] and [N, HV, DK, DV], for a tree without padding.

    Shapes as in `gdn_tree_verify`.
    """
    nodes, value_heads, value_dim = v.shape
    return pl.pallas_call(
        functools.partial(_kernel, block_v=block_v, interpret=interpret),
        grid=(value_heads, pl.cdiv(value_dim, block_v)),
        out_shape=(
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            jax.ShapeDtypeStruct((nodes, *s0.shape), jnp.float32),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_tree_per_branch",
    )(q, k, v, g, beta, s0, parents)


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    g_ref,
    beta_ref,
    s0_ref,
    parents_ref,
    out_ref,
    states_ref,
    *,
    block_v: int,
    interpret: bool,
):
    head = pl.program_id(0)
    key_head = head // (s0_ref.shape[0] // k_ref.shape[1])
    keys = span(0, pl.next_power_of_2(k_ref.shape[2]))
    columns = span(pl.program_id(1), block_v)

    def step(node, newest):
        parent = parents_ref[node]
        state = lax.cond(
            parent == node - 1,
            lambda: newest,
            lambda: load(states_ref, parent, head, keys, columns),
        )
        k = load(k_ref, node, key_head, keys).astype(jnp.float32)[:, None]
        q = load(q_ref, node, key_head, keys).astype(jnp.float32)[:, None]
        v = load(v_ref, node, head, columns).astype(jnp.float32)
        state = jnp.exp(g_ref[node, head]) * state
        u = beta_ref[node, head] * (v - jnp.sum(k * state, axis=0))
        state = state + k * u[None, :]
        store(out_ref, jnp.sum(q * state, axis=0), node, head, columns)
        store(states_ref, state, node, head, keys, columns)
        if not interpret:
            pltriton.debug_barrier()  # a child may read the state back through other threads
        return state

    # The root's parent is -1 = node - 1, so it takes the committed state as the newest.
    lax.fori_loop(0, q_ref.shape[0], step, load(s0_ref, head, keys, columns))
