"""The usual way to verify a tree, as a baseline: walk the nodes, one stored state for each.

A program owns a value head and a block of value columns and advances it node by node; states live
in device memory, and the two newest stay in registers for children that come next. What a node
needs is read two nodes ahead. Nothing here is part of the public interface.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import load, span, store
from pallas_kernels.gdn_tree.pallas import step
from pallas_kernels.gdn_tree.scales import given


def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    s0: jax.Array,
    parents: jax.Array,
    *,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
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
    )(q, k, v, g, beta, s0, given(q_scale, q), given(k_scale, k), parents)


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    g_ref,
    beta_ref,
    s0_ref,
    q_scale_ref,
    k_scale_ref,
    parents_ref,
    out_ref,
    states_ref,
    *,
    block_v: int,
    interpret: bool,
):
    head = pl.program_id(0)
    key_head = lax.div(head, s0_ref.shape[0] // k_ref.shape[1])
    keys = span(0, pl.next_power_of_2(k_ref.shape[2]))
    columns = span(pl.program_id(1), block_v)
    nodes = q_ref.shape[0]

    def read(node):
        """A node's inputs, and its parent's state unless that is one of the two newest."""
        node = jnp.minimum(node, nodes - 1)
        parent = parents_ref[node]
        older = node - 1 - parent  # 0: the newest state is the parent's, 1: the one before
        state = load(states_ref, jnp.maximum(parent, 0), head, keys, columns, when=older > 1)
        vectors = (load(ref, node, key_head, keys) for ref in (q_ref, k_ref))
        scales = (ref[node, key_head] for ref in (q_scale_ref, k_scale_ref))
        v = load(v_ref, node, head, columns)
        return older, state, *vectors, *scales, v, g_ref[node, head], beta_ref[node, head]

    def advance(node, newest, before, inputs):
        """The node's state, and the inputs of the node after next."""
        if not interpret:
            pltriton.debug_barrier()  # states are read back through other threads
        older, state, q, k, q_scale, k_scale, v, g, beta = inputs
        state = jnp.where(older == 0, newest, jnp.where(older == 1, before, state))
        following = read(node + 2)
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        state, out, _ = step(state, q * q_scale, k * k_scale, v, g, beta)
        store(out_ref, out, node, head, columns)
        store(states_ref, state, node, head, keys, columns)
        return state, following

    def advance_two(i, carry):
        # By twos, so that inputs on their way stay in the registers they arrive in.
        newest, before, first, second = carry
        before, first = advance(2 * i, newest, before, first)
        newest, second = advance(2 * i + 1, before, newest, second)
        return newest, before, first, second

    # The root's parent is -1, one before it, so it takes the committed state as the newest.
    s0 = load(s0_ref, head, keys, columns)
    carry = lax.fori_loop(0, nodes // 2, advance_two, (s0, s0, read(0), read(1)))
    if nodes % 2:
        newest, before, first, _ = carry
        advance(jnp.int32(nodes - 1), newest, before, first)
