"""Floating-point values as integers of the same order, so that selection needs no floats.

The order is `lax.top_k`'s on a CPU, that of the bits: -NaN < -inf < ... < -0.0 < 0.0 < ... < inf <
NaN, where -NaN is a NaN with its sign bit set.
"""

import jax
import jax.numpy as jnp
from jax import lax

ABSENT = -(2**31)  # what is no column of the array: at or below the key of every value

# Of the type's width: the integer type, and the bits that a negative value has inverted.
_WIDTHS = {2: (jnp.int16, 0x7FFF), 4: (jnp.int32, 0x7FFFFFFF)}


def to_keys(x: jax.Array) -> jax.Array:
    """Returns an int32 for every float32 or bfloat16 value of `x`, in the same order."""
    integer, rest = _WIDTHS[x.dtype.itemsize]
    return _flip(lax.bitcast_convert_type(x, integer).astype(jnp.int32), rest)


def to_values(keys: jax.Array, dtype) -> jax.Array:
    """Returns the values of type `dtype` whose keys these are, bit for bit."""
    integer, rest = _WIDTHS[jnp.dtype(dtype).itemsize]
    return lax.bitcast_convert_type(_flip(keys, rest).astype(integer), dtype)


def minus_infinity(dtype) -> int:
    """Returns the key of minus infinity."""
    return -0x7F81 if jnp.dtype(dtype).itemsize == 2 else -0x7F800001


def stored_dtype(dtype):
    """Returns the narrowest integer type that holds the keys of `dtype`."""
    return _WIDTHS[jnp.dtype(dtype).itemsize][0]


def _flip(bits: jax.Array, rest: int) -> jax.Array:
    return bits ^ ((bits >> 31) & rest)
