"""A growth as Pallas kernels on the Triton backend: six an expansion with one block.

take | attend | out | down | score | offer; the products behind a norm, qkv and up, are XLA's.
"""

import jax

from pallas_kernels.checks import beyond
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

MAX_POOL = 1024  # all candidates of a depth are compared with each other
MAX_MEMORY_ROWS = 288  # held at once: float32 heads of 128 take 255 registers, and none is spilled


def unsupported(width: int, pool: int, memory_rows: int) -> str | None:
    """Returns why the kernels cannot grow a tree of this size, None if they can."""
    return beyond(
        {
            "nodes at once": (width, MAX_NODES),
            "candidates of a depth": (pool, MAX_POOL),
            "memory rows, prefix and tree,": (memory_rows, MAX_MEMORY_ROWS),
        }
    )


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
    """`xla.take` in one launch."""
    return frontier.take(
        growth,
        weights.table,
        weights.position,
        start,
        width=width,
        depths=depths,
        config=config,
        interpret=interpret,
    )


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
    logits = score(x, nodes.depth, weights.head, weights.out_norm, pools, **how)
    return frontier.offer(growth, nodes, logits, pools, start, **how)


def _project(x: jax.Array, projection: Projection, *, config: Config, interpret: bool, **how):
    # A norm inside the kernel made it three times as slow as XLA's norm and product (H200).
    if projection.norm is not None:
        return xla.project(x, projection, **how)
    return project_kernel(x, projection, config=config, interpret=interpret, **how)
