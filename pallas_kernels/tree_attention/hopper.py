"""When attention runs on Hopper's own instructions: the rules, apart from `mosaic.py`.

To import the kernel takes a quarter of a second, which other devices need not wait for.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.choice import capability

CAPABILITY = "9.0"  # Hopper's, whose products of warp groups no other card has
TILE = 64  # rows and keys of one product
_MAX_SIZE = 256  # columns of a head: more would not fit into shared memory
# The capacity stands for the length, which is traced. In shorter caches what comes before the first
# key costs as much as is gained.
_MIN_CAPACITY = 8192
_MAX_NODES = 1024  # whose mask, as wide as their scores, is still small


def refusal(size: int, capacity: int, dtype, window: int | None) -> str | None:
    """Why the kernel does not take these arguments; None if it does."""
    if dtype != jnp.bfloat16:
        return f"it takes bfloat16, got {jnp.dtype(dtype).name}"
    if size % TILE or not 0 < size <= _MAX_SIZE:
        return f"it takes heads of 64, 128, 192 or 256 columns, got {size}"
    if capacity % TILE or not capacity:
        return f"it takes a cache of whole blocks of {TILE} rows, got {capacity}"
    return None if window is None else f"it takes no window, got {window}"


def faster(q: jax.Array, keys: jax.Array, window: int | None) -> bool:
    """Whether to prefer this kernel on the default device.

    By timings on an H200 with heads of 256 columns.
    """
    if capability() != CAPABILITY:
        return False
    (nodes, heads, _), (groups, capacity, size) = q.shape, keys.shape
    many = nodes * heads > groups * TILE and nodes <= _MAX_NODES
    return many and capacity >= _MIN_CAPACITY and not refusal(size, capacity, q.dtype, window)
