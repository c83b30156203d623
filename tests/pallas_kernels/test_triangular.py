"""Inverses of unit lower triangular matrices, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triangular import unit_lower_inverse


def strict(*shape: int) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(shape) * shape[-1] ** -0.5
    return np.tril(values, -1)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 50, 64, 129])
def test_values(size):
    x = strict(3, size, size)
    found = np.asarray(jax.jit(unit_lower_inverse)(jnp.asarray(x, jnp.float32)))
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(size) + x), atol=2e-6)


def test_many_axes_and_the_gradient():
    """As training meets it: texts, chunks, heads. XLA's products on a CPU take few axes."""
    x, weights = strict(2, 3, 2, 2, 64, 64), strict(2, 3, 2, 2, 64, 64)
    inverse = np.linalg.inv(np.eye(64) + x)
    expected = -np.swapaxes(inverse, -1, -2) @ weights @ np.swapaxes(inverse, -1, -2)

    def loss(x):
        return jnp.sum(jax.vmap(unit_lower_inverse)(x) * jnp.asarray(weights, jnp.float32))

    found = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(x, jnp.float32)))
    np.testing.assert_allclose(np.tril(found, -1), np.tril(expected, -1), atol=2e-5)
