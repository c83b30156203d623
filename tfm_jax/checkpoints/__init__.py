"""Published checkpoints in, modules out: reading, checking, converting and exporting."""

from tfm_jax.checkpoints.build import (
    build_drafter,
    build_verifier,
    build_weaver,
    fill,
    module_params,
    parameter_shapes,
)
from tfm_jax.checkpoints.convert import Report, convert
from tfm_jax.checkpoints.errors import CheckpointError
from tfm_jax.checkpoints.export import write_hf
from tfm_jax.checkpoints.pairing import check_pair
from tfm_jax.checkpoints.trio import Part, StoredTrio, read_trio

__all__ = [
    "CheckpointError",
    "Part",
    "Report",
    "StoredTrio",
    "build_drafter",
    "build_verifier",
    "build_weaver",
    "check_pair",
    "convert",
    "fill",
    "module_params",
    "parameter_shapes",
    "read_trio",
    "write_hf",
]
