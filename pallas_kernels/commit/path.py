"""What both commits check of their arguments."""

import jax
import jax.numpy as jnp

from pallas_kernels.concrete import concrete


def check_path(path: jax.Array, count: jax.Array | int, nodes: int) -> tuple[jax.Array, jax.Array]:
    """Returns `path` and `count` as int32 arrays, or says what is wrong with them."""
    path, count = jnp.asarray(path), jnp.asarray(count)
    if path.ndim != 1 or not path.size or not jnp.issubdtype(path.dtype, jnp.integer):
        raise ValueError(f"path must be integers [P], got {path.dtype} {path.shape}")
    check_scalar("count", count, 1, path.size)
    rows, known = concrete(path), concrete(count)
    if rows is not None and known is not None:
        rows = rows[: int(known)]
        if rows.min() < 0 or rows.max() >= nodes:
            raise ValueError(f"path must hold rows 0..{nodes - 1} up to count, got {rows}")
    return path.astype(jnp.int32), count.astype(jnp.int32)


def check_scalar(name: str, value: jax.Array, low: int, high: int) -> None:
    """Raises unless `value` is an integer scalar, in range where that is known."""
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer scalar, got {value.dtype} {value.shape}")
    known = concrete(value)
    if known is not None and not low <= int(known) <= high:
        raise ValueError(f"{name} must lie in {low}..{high}, got {known}")


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
