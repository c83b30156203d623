"""Maps whose results come in parts or are stacked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.choice import automatic
from tfm_jax.models.layers import Linear, RMSNorm, Stacked, project


def linear(inputs: int, outputs: int, *, bias: bool = False) -> Linear:
    return Linear(inputs, outputs, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, bias=bias)


def test_a_product_in_parts_enters_the_residual_stream_whole():
    """Interpreted kernels: three parts of a product, summed by the addition and norm."""
    down, norm = linear(2048, 64), RMSNorm(64, 1e-6, dtype=jnp.bfloat16)
    inner = jax.random.normal(jax.random.key(1), (3, 2048), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(2), (3, 64), jnp.bfloat16)
    with automatic("pallas"):
        parts = down.parts(inner)
        total, normed = norm.after(x, parts)
    assert parts.shape[0] > 1
    exact = np.asarray(inner, np.float64) @ np.asarray(down.weight[...], np.float64).T
    expected = np.asarray(x, np.float64) + exact
    np.testing.assert_allclose(np.asarray(total, np.float64), expected, rtol=8e-3, atol=8e-3)
    scale = np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected / scale, atol=2e-2)


def test_parts_and_stacks_have_no_place_for_a_bias():
    biased = linear(8, 4, bias=True)
    with pytest.raises(ValueError, match="no place for a bias"):
        biased.parts(jnp.zeros((1, 8), jnp.bfloat16))
    with pytest.raises(ValueError, match="cannot be stacked"):
        Stacked([linear(8, 4), biased])


def test_a_stack_is_its_maps_side_by_side():
    maps = [linear(64, 8), linear(64, 24)]
    x = jax.random.normal(jax.random.key(3), (5, 64), jnp.bfloat16)
    found = Stacked(maps)(x)
    for part, one in zip(found, maps, strict=True):
        np.testing.assert_array_equal(
            np.asarray(part, np.float32), np.asarray(project(x, one.weight[...]), np.float32)
        )
