"""What public functions check of an array before anything else."""

from typing import Any

import jax.numpy as jnp

FLOATS = (jnp.float32, jnp.bfloat16)


def check_array(name: str, x: Any, dtypes: tuple = FLOATS) -> None:
    """Raises TypeError unless `x` is an array of one of the given types."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if x.dtype not in dtypes:
        allowed = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must be {allowed}, got {x.dtype}")
