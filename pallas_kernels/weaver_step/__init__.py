"""Growth of a draft tree under Weaver, one launch for each thing that must wait for another."""

from pallas_kernels.weaver_step.grow import growth_rows, weaver_grow
from pallas_kernels.weaver_step.state import (
    Activation,
    Block,
    GrownTree,
    Norm,
    Pools,
    Projection,
    Rotation,
    Weights,
)

__all__ = [
    "Activation",
    "Block",
    "GrownTree",
    "Norm",
    "Pools",
    "Projection",
    "Rotation",
    "Weights",
    "growth_rows",
    "weaver_grow",
]
