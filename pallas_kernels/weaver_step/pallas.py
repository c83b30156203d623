"""A growth as Pallas kernels on the Triton backend: six an expansion with one block.

take | attend | out | down | score | offer; the products behind a norm, qkv and up, are XLA's.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.weaver_step import frontier, xla
from pallas_kernels.weaver_step.attend import attend
from pallas_kernels.weaver_step.launch import Config
from pallas_kernels.weaver_step.project import MAX_NODES
from pallas_kernels.weaver_step.project import project as project_kernel
from pallas_kernels.weaver_step.score import score
from pallas_kernels.weaver_step.state import (
    Activation,
    Growth,
    Nodes,
    Pools,
    Projection,
    Weights,
)


def unsupported(width: int) -> str | None:
    """Returns why the kernels cannot expand this many nodes at once, None if they can."""
    if width > MAX_NODES:
        return f"at most {MAX_NODES} nodes are expanded at once, got {width}"
    return None


def take(
    growth: Growth,
    weights: Weights,
    start: jax.Array,
    *,
    width: int,
    depths: int,
    config: Config,
    interpret: bool,
) -> tuple[Growth, Nodes]:
    """`xla.take` in one launch with folded tables."""
    folded = weights.token_in is None
    growth, nodes = frontier.take(
        growth,
        weights.table,
        weights.position if folded else None,
        start,
        width=width,
        depths=depths,
        config=config,
        interpret=interpret,
    )
    if weights.token_in is not None:
        x = _project(nodes.x, weights.token_in, config=config, interpret=interpret)
        if weights.position is not None:
            x = x + weights.position[jnp.minimum(nodes.depth, depths - 1)]
        nodes = nodes._replace(x=x)
    return growth, nodes


def expand(
    growth: Growth,
    nodes: Nodes,
    weights: Weights,
    pools: Pools,
    start: jax.Array,
    *,
    activation: Activation,
    config: Config,
    interpret: bool,
) -> Growth:
    """`xla.expand` in few launches."""
    how = {"config": config, "interpret": interpret}
    x = nodes.x
    keys, values = [], []
    for index, block in enumerate(weights.blocks):
        qkv = _project(x, block.qkv, **how)
        mixed, key, value = attend(
            qkv,
            nodes.depth,
            growth.key[index],
            growth.value[index],
            growth,
            start,
            weights.rotation,
            **how,
        )
        x = _project(mixed, block.out, residual=x, **how)
        inner = _project(x, block.up, activation=activation, **how)
        x = _project(inner, block.down, residual=x, **how)
        keys.append(key)
        values.append(value)
    growth = growth._replace(key=tuple(keys), value=tuple(values))
    if weights.query_in is None:
        norm = weights.out_norm
    else:
        norm, query_in = None, Projection(weights.query_in.weight, norm=weights.out_norm)
        x = _project(x, query_in, **how)
    logits = score(x, nodes.depth, weights.head, norm, pools, **how)
    return frontier.offer(growth, nodes, logits, pools, start, **how)


def _project(x: jax.Array, projection: Projection, *, config: Config, interpret: bool, **how):
    # A norm inside the kernel made it three times as slow as XLA's norm and product (H200).
    if projection.norm is not None:
        return xla.project(x, projection, **how)
    return project_kernel(x, projection, config=config, interpret=interpret, **how)
