"""Inverse of unit lower triangular matrices by products alone, as accurate as substitution.

Library solves on a CPU go through a threaded BLAS one small matrix at a time, which costs more
than everything around them; products are batched.
"""

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST
_POWERS = 8  # the largest block inverted by a power series; longer series lose all accuracy


def unit_lower_inverse(strict: jax.Array) -> jax.Array:
    """Inverse of `I + strict`, float32 [..., C, C].

    Blocks of eight are inverted by their (finite) power series, then merged pairwise:
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]].

    Args:
      strict: [..., C, C] float32, zero on and above the diagonal; any C.
    """
    # One axis for all matrices: XLA's products on a CPU take few axes, and merging adds more.
    return _inverse(strict.reshape(-1, *strict.shape[-2:])).reshape(strict.shape)


def _inverse(strict: jax.Array) -> jax.Array:
    """`unit_lower_inverse` of matrices [M, C, C]."""
    size = strict.shape[-1]
    if size <= _POWERS:
        eye = jnp.eye(size, dtype=strict.dtype)
        inverse, power = eye - strict, strict
        for _ in range(2):
            power = _product(power, power)
            inverse = inverse + _product(inverse, power)
        return inverse
    half = 1 << ((size - 1).bit_length() - 1)  # largest power of two below the size
    upper, lower = strict[:, :half, :half], strict[:, half:, half:]
    if 2 * half == size:
        first, second = jnp.split(_inverse(jnp.concatenate([upper, lower])), 2)
    else:
        first, second = _inverse(upper), _inverse(lower)
    below = -_product(second, _product(strict[:, half:, :half], first))
    corner = jnp.zeros((strict.shape[0], half, size - half), strict.dtype)
    top = jnp.concatenate([first, corner], axis=2)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=2)], axis=1)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=_HIGHEST)
