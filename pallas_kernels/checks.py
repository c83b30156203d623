"""What public functions check of an array before anything else."""

from typing import Any

import jax
import jax.numpy as jnp

FLOATS = (jnp.float32, jnp.bfloat16)


def check_array(name: str, x: Any, dtypes: tuple = FLOATS) -> None:
    """Raises TypeError unless `x` is an array of one of the given types."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if x.dtype not in dtypes:
        allowed = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must be {allowed}, got {x.dtype}")


def check_part(name: str, array: jax.Array, shape: tuple[int, int], start: int) -> None:
    """Raises ValueError unless `array` holds rows of this shape from column `start` on."""
    rows, size = shape
    if start < 0:
        raise ValueError(f"the first column of {name} must not be negative, got {start}")
    if array.ndim != 2 or array.shape[0] != rows or array.shape[1] < start + size:
        raise ValueError(
            f"{name} must be [{rows}, {start + size} or more] to hold {size} columns from "
            f"{start} on, got {array.shape}"
        )


def check_power(name: str, size: int, least: int | None = None) -> None:
    """Raises ValueError unless a size of a kernel's cut is a power of two, at least `least`."""
    if size < (least or 1) or size & (size - 1):
        bound = "" if least is None else f" >= {least}"
        raise ValueError(f"{name} must be a power of two{bound}, got {size}")
