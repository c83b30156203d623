"""What both commits check of the arrays of all layers."""

import jax
import jax.numpy as jnp


def check_same(
    name: str, arrays: tuple[jax.Array, ...], layers: int, axes: int, dtypes: tuple
) -> None:
    """Raises unless there is an array for every layer, all alike and with the given axes."""
    if not layers or len(arrays) != layers:
        raise ValueError(
            f"{name} must hold an array for each of {layers} layers, at least one, "
            f"got {len(arrays)}"
        )
    for x in arrays:
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name} must hold arrays, got {type(x).__name__}")
    first = arrays[0]
    if first.dtype not in dtypes:
        allowed = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must be {allowed}, got {first.dtype}")
    if first.ndim != axes or 0 in first.shape:
        raise ValueError(f"{name} must have {axes} axes, none empty, got {first.shape}")
    for x in arrays:
        if x.shape != first.shape or x.dtype != first.dtype:
            raise ValueError(
                f"{name} must be alike in all layers, got {first.dtype} {first.shape} and "
                f"{x.dtype} {x.shape}"
            )
