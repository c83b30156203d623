"""Lowering for Hopper on a machine without a GPU."""

import warnings

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def lower_for_hopper(function, *args) -> str:
    """Text of `function` lowered for the card: finds whatever a kernel body may not contain."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
