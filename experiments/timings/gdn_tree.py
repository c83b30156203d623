"""Verification of a draft tree through one gated delta-rule layer of Qwen3.6-27B."""

import functools

import jax
import jax.numpy as jnp

from experiments.timings.case import Candidate, Case, relative_error, rotations
from pallas_kernels.choice import interpreted
from pallas_kernels.gdn_tree import pallas, per_branch, specs, tree_topology, xla

SETS = 16  # input sets in rotation; together beyond the 50 MB cache of a Hopper GPU

# By the rows of a tree's blocks: (block_v, num_warps, prepare_warps).
CONFIGS = {
    16: ((16, 1, 0), (32, 4, 0)),
    32: ((16, 2, 0), (32, 4, 0), (32, 4, 4)),
    64: ((32, 4, 0), (16, 4, 4), (32, 4, 4), (64, 4, 4)),
    128: ((16, 4, 4), (32, 4, 4), (64, 4, 4)),
}
# Of the baseline, by the rows of the tree: (block_v, num_warps).
PER_BRANCH = {128: ((32, 4), (32, 2), (64, 4), (32, 8), (128, 8))}
PER_BRANCH_ELSEWHERE = ((8, 1), (32, 4))


def cases(*, tiny: bool, sweep: bool = False) -> list[Case]:
    """Returns one case for each number of rows; "sweep" compares the kernels' configurations."""
    if tiny:
        spec = specs.Spec(name="tiny", nodes=17, tree="spine", max_depth=7, raw=True)
        return [_case(spec, sweep=False)]
    sizes = (1, 16, 32, 64, 65, 128) if sweep else (1, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256)
    return [_case(specs.benchmark_spec(nodes), sweep) for nodes in sizes]


def _case(spec: specs.Spec, sweep: bool) -> Case:
    inputs = specs.make_inputs(spec).rounded()
    expected = specs.solve(inputs).out
    *args, parents, valid = inputs.arguments(jnp.bfloat16)
    topology = jax.jit(tree_topology)(parents, valid)
    # A model asks these of a tree once a step, for all its layers.
    of_tree = (parents, topology, jax.jit(pallas.describe)(topology))
    scales = inputs.scales()
    return Case(
        label={"nodes": spec.nodes},
        sets=[(*arrays, scales, *of_tree) for arrays in rotations(tuple(args), SETS)],
        candidates=_candidates(spec, sweep),
        error=lambda results: relative_error(results[0], expected),
        tolerance=1e-5,
        bytes=_bytes(spec),
        flops=_flops(spec),
    )


def _candidates(spec: specs.Spec, sweep: bool) -> list[Candidate]:
    cut = pallas.cut(spec.nodes)
    rows = cut.count * cut.size
    configs = [pallas.default_config(spec.nodes, spec.value_dim)]
    if sweep:
        shapes = (
            pallas.Config(block_v=v, num_warps=w, prepare_warps=p)
            for v, w, p in CONFIGS.get(rows, ())
        )
        configs += [config for config in shapes if config != configs[0]]
    return [
        *(
            Candidate(
                kind="pallas",
                call=functools.partial(_pallas, config),
                note=f"v{config.block_v} w{config.num_warps} p{config.prepare_warps}",
            )
            for config in configs
        ),
        Candidate(kind="xla", call=_xla),
        *(
            Candidate(
                kind="per_branch",
                call=functools.partial(_per_branch, block_v, num_warps),
                note=f"v{block_v} w{num_warps}",
            )
            for block_v, num_warps in PER_BRANCH.get(spec.nodes, PER_BRANCH_ELSEWHERE)
        ),
    ]


def _pallas(config, token, q, k, v, g, beta, s0, scales, parents, topology, tree):
    rest = {**scales, "config": config, "interpret": interpreted()}
    return pallas.verify(q, k, v, g, beta + token, s0, tree, **rest)


def _xla(token, q, k, v, g, beta, s0, scales, parents, topology, tree):
    return xla.verify(q, k, v, g, beta + token, s0, topology, **scales)


def _per_branch(block_v, num_warps, token, q, k, v, g, beta, s0, scales, parents, topology, tree):
    return per_branch.verify(
        q,
        k,
        v,
        g,
        beta + token,
        s0,
        parents,
        **scales,
        block_v=block_v,
        num_warps=num_warps,
        interpret=interpreted(),
    )


def _bytes(spec: specs.Spec) -> int:
    """The state, bfloat16 queries, keys and values, scales, gates, and two float32 results."""
    wide = spec.nodes * spec.value_heads * spec.value_dim
    keys = spec.nodes * spec.key_heads * spec.key_dim
    gates = spec.nodes * spec.value_heads
    scales = 2 * spec.nodes * spec.key_heads
    state = spec.value_heads * spec.key_dim * spec.value_dim
    return 4 * state + 2 * (2 * keys + wide) + 4 * (3 * gates + scales) + 2 * 4 * wide


def _flops(spec: specs.Spec) -> int:
    """What keys and queries read of the state, and four products with triangles."""
    read = 4 * spec.nodes * spec.key_dim * spec.value_dim
    triangles = 2 * spec.nodes * spec.nodes * (spec.key_dim + spec.value_dim)
    return spec.value_heads * (read + triangles)
