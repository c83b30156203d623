"""Float32-grade matrix products on 16-bit tensor cores, for use inside kernels.

A float32 value is a sum of 16-bit values, and the products of two of those are exact in a float32
accumulator (Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for
Higher-Precision Computations", 2019). Products below the last kept bit are left out:

| scheme | terms | products | relative error | range |
| --- | --- | --- | --- | --- |
| bf16x3 | 2 bfloat16 | 3 | 2^-16 | that of float32 |
| bf16x6 | 3 bfloat16 | 6 | 2^-23 | that of float32 |
| f16x3 | 2 float16 | 3 | 2^-21 of the largest value | values are scaled to below 2 |
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

Scheme = typing.Literal["bf16x3", "bf16x6", "f16x3"]


_F16_LOW = 2.0**-11  # float16 has few exponents: the low term is kept as large as the high one


class Split(typing.NamedTuple):
    """A matrix as a scaled sum of terms, largest first.

    Attributes:
      terms: 16-bit; a second float16 term counts 2^-11 of what it holds.
      scale: of the whole; None stands for 1.
    """

    terms: tuple[jax.Array, ...]
    scale: jax.Array | None = None


def split(x: jax.Array, scheme: Scheme, *, bounded: bool = False) -> Split:
    """Returns the 16-bit terms of `x`. `bounded` promises float16's range and saves the scaling.

    A bfloat16 `x` is its own single term; it cannot take part in "f16x3".
    """
    if x.dtype == jnp.bfloat16:
        return Split((x,))
    if scheme == "f16x3":
        scale = None
        if not bounded:
            scale, inverse = _power_of_two(jnp.max(jnp.abs(x)))
            x = x * inverse
        head = _round(x, 11)
        low = (x - head) * (1 / _F16_LOW)
        return Split((head.astype(jnp.float16), low.astype(jnp.float16)), scale)
    terms = []
    for _ in range(2 if scheme == "bf16x6" else 1):
        head = _round(x, 8)
        terms.append(head.astype(jnp.bfloat16))
        x = x - head
    return Split((*terms, x.astype(jnp.bfloat16)))


def dot(x: Split, y: Split, *, transpose_y: bool = False) -> jax.Array:
    """Returns the float32 product of two split matrices, `x @ y` or `x @ y.T`."""
    contract = (((1,), (1 if transpose_y else 0,)), ((), ()))
    total = None
    most = max(len(x.terms), len(y.terms))
    for order in reversed(range(most)):  # smallest first, so that they are not lost
        if total is not None and x.terms[0].dtype == jnp.float16:
            total = total * _F16_LOW
        for i, x_i in enumerate(x.terms):
            if not 0 <= order - i < len(y.terms):
                continue
            y_j = y.terms[order - i]
            product = lax.dot_general(x_i, y_j, contract, preferred_element_type=jnp.float32)
            total = product if total is None else total + product
    assert total is not None
    for scale in (x.scale, y.scale):
        total = total if scale is None else total * scale
    return total


def _round(x: jax.Array, bits: int) -> jax.Array:
    """`x` rounded to a mantissa of `bits`, still float32."""
    # On the bits: XLA may drop a pair of conversions float32 -> bfloat16 -> float32.
    low = 1 << (24 - bits)
    raw = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((raw + low // 2) & -low, jnp.float32)


def _power_of_two(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The power of two at or below `largest` and its inverse; one if `largest` is tiny or zero."""
    exponent = lax.bitcast_convert_type(largest, jnp.int32) >> 23
    exponent = jnp.clip(jnp.where(exponent < 27, 127, exponent), 27, 227)
    power = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    return power, inverse
