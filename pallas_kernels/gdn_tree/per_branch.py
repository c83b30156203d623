"""The usual way to verify a tree, as a baseline: walk the nodes, one stored state for each.

A program owns a value head and a block of value columns and advances it node by node; states live
in device memory and the newest one stays in registers for a child that comes next. What the next
node needs is read while this one is computed. Nothing here is part of the public interface.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import load, span, store
from pallas_kernels.gdn_tree.pallas import step


def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    s0: jax.Array,
    parents: jax.Array,
    *,
    block_v: int = 16,
    num_warps: int = 1,
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
    nodes = q_ref.shape[0]

    def read(node):
        """A node's inputs, and its parent's state unless that is the newest one."""
        parent = parents_ref[node]
        stored = parent != node - 1
        state = load(states_ref, jnp.maximum(parent, 0), head, keys, columns, when=stored)
        q, k = (load(ref, node, key_head, keys) for ref in (q_ref, k_ref))
        v = load(v_ref, node, head, columns)
        return stored, state, q, k, v, g_ref[node, head], beta_ref[node, head]

    def advance(node, carry):
        newest, (stored, state, q, k, v, g, beta) = carry
        if not interpret:
            pltriton.debug_barrier()  # states are read back through other threads
        following = read(jnp.minimum(node + 1, nodes - 1))
        state = jnp.where(stored, state, newest)
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        state, out, _ = step(state, q, k, v, g, beta)
        store(out_ref, out, node, head, columns)
        store(states_ref, state, node, head, keys, columns)
        return state, following

    # The root's parent is -1 = node - 1, so it takes the committed state as the newest.
    lax.fori_loop(0, nodes, advance, (load(s0_ref, head, keys, columns), read(0)))
