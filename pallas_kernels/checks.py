"""What public functions check of an array before anything else."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.concrete import concrete

FLOATS = (jnp.float32, jnp.bfloat16)


def check_array(name: str, x: Any, dtypes: tuple = FLOATS) -> None:
    """Raises TypeError unless `x` is an array of one of the given types."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if x.dtype not in dtypes:
        allowed = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must be {allowed}, got {x.dtype}")


def check_range(name: str, array: Any, low: int, high: int) -> None:
    """Raises ValueError if integers that are known lie outside low..high."""
    known = concrete(array)
    if known is not None and known.size and (known.min() < low or known.max() > high):
        astray = known[(known < low) | (known > high)]
        raise ValueError(f"{name} must lie in {low}..{high}, got {astray.flat[0]}")


def check_epsilon(name: str, value: Any) -> None:
    """Raises unless `value` is a finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {value}")


def check_scalar(name: str, value: Any, low: int, high: int) -> jax.Array:
    """Returns `value` as int32; raises unless it is an integer scalar, in range where known."""
    known = concrete(value)
    given = value if known is None else known
    if given.shape != () or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer scalar, got {given.dtype} {given.shape}")
    if known is not None and not low <= int(known) <= high:
        raise ValueError(f"{name} must lie in {low}..{high}, got {known}")
    return jnp.asarray(value, jnp.int32)


def check_path(path: Any, count: Any, nodes: int) -> tuple[jax.Array, jax.Array]:
    """Returns a path's rows [P] and how many count, as int32, or says what is wrong with them."""
    # Known values are those given: as JAX arrays, wide integers would have wrapped.
    rows, known = concrete(path), concrete(count)
    path = jnp.asarray(path)
    if path.ndim != 1 or not path.size or not jnp.issubdtype(path.dtype, jnp.integer):
        raise ValueError(f"path must be integers [P], got {path.dtype} {path.shape}")
    count = check_scalar("count", count, 1, path.size)
    if rows is not None and known is not None:
        rows = rows[: int(known)]
        if rows.min() < 0 or rows.max() >= nodes:
            raise ValueError(f"path must hold rows 0..{nodes - 1} up to count, got {rows}")
    return path.astype(jnp.int32), count


def beyond(limits: Mapping[str, tuple[int, int]]) -> str | None:
    """Returns which size exceeds what a kernel supports, in words; None if none does.

    Args:
      limits: size and the largest supported one, by what there are so many of.
    """
    for name, (size, most) in limits.items():
        if size > most:
            return f"at most {most} {name} are supported, got {size}"
    return None


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
