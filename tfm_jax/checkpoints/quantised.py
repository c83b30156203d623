"""8-bit float weights with block scales, as published FP8 checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tfm_jax.checkpoints.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"
_FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))


def is_float8(array: np.ndarray) -> bool:
    return array.dtype in _FLOAT8


def block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, from `quantization_config`; refuses other schemes."""
    given = config.get("quantization_config")
    quantisation = {} if given is None else given
    if not isinstance(quantisation, Mapping):
        raise CheckpointError(f"quantization_config must be an object, got {quantisation!r}")
    method = quantisation.get("quant_method", "fp8")
    if method != "fp8":
        raise CheckpointError(f"quant_method {method!r} is not supported, only block-scaled 'fp8'")
    block = quantisation.get("weight_block_size", [128, 128])
    if not isinstance(block, list) or len(block) != 2 or not all(_is_size(n) for n in block):
        raise CheckpointError(f"weight_block_size must be two positive integers, got {block!r}")
    return block[0], block[1]


def scale_problem(
    weight: np.ndarray, scale: np.ndarray | None, block: tuple[int, int]
) -> str | None:
    """Why `weight` cannot be dequantised with `scale`, or None if it can."""
    if scale is None:
        return "8-bit float without its scales (weight_scale_inv)"
    if weight.ndim != 2:
        return f"8-bit float of shape {list(weight.shape)}; only matrices have block scales"
    expected = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    if list(scale.shape) != expected:
        return (
            f"scales of shape {list(scale.shape)}, expected {expected} "
            f"for {list(weight.shape)} in blocks of {list(block)}"
        )
    if scale.dtype not in (np.float32, ml_dtypes.bfloat16, np.float16):
        return f"scales stored as {scale.dtype}, expected a float of 16 or 32 bits"
    return None


def dequantise(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """bfloat16 [out, in]: each weight times the scale of its block.

    Despite the published name `weight_scale_inv` the scale multiplies. Edge blocks may be
    smaller than `block`.

    Args:
      weight: [out, in] 8-bit float.
      scale: [ceil(out / block[0]), ceil(in / block[1])].
    """
    rows, columns = block
    out = np.empty(weight.shape, ml_dtypes.bfloat16)
    for i, factors in enumerate(scale.astype(np.float32)):
        strip = slice(i * rows, (i + 1) * rows)  # a strip at a time: float32 is four times larger
        wide = np.repeat(factors, columns)[: weight.shape[1]]
        out[strip] = (weight[strip].astype(np.float32) * wide).astype(ml_dtypes.bfloat16)
    return out


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
