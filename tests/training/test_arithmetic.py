"""What a step computes, and how much of a measured rate that is."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfm_jax.models.qwen36 import Verifier
from tfm_jax.presets import parse_geometry
from tfm_jax.training import arithmetic
from tfm_jax.training.arithmetic import count_flops, matrix_rate, rates_of
from tfm_jax.training.trainer import OptimiserConfig, flatten, make_optimiser, make_step, start
from tfm_jax.training.verifier import verifier_objective

LARGER = Path(__file__).parents[2] / "configs" / "larger.json"
FEW = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
SQUARE = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
PRODUCT = 2 * 8 * 16 * 16


def test_a_product_counts_two_operations_a_multiplication() -> None:
    assert count_flops(jax.jit(jnp.matmul), FEW, SQUARE) == PRODUCT
    both_ways = jax.jit(
        lambda a, b: jax.value_and_grad(lambda *x: jnp.sum(x[0] @ x[1]), (0, 1))(a, b)
    )
    assert count_flops(both_ways, FEW, SQUARE) == 3 * PRODUCT
    many = lambda a, b: jnp.einsum("xij,xkj->xik", a, b)
    stacked = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in (FEW, SQUARE)]
    assert count_flops(many, *stacked) == 5 * PRODUCT
    assert count_flops(jnp.add, FEW, FEW) == 0


def test_a_scan_counts_as_often_as_it_runs() -> None:
    def power(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jax.jit(jnp.matmul)(x, b), None), a, length=7)[0]

    assert count_flops(power, FEW, SQUARE) == 7 * PRODUCT
    assert count_flops(jax.checkpoint(power), FEW, SQUARE) == 7 * PRODUCT


def test_of_a_cond_the_branch_with_most_counts() -> None:
    def either(which: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.cond(which, lambda: a @ b @ b, lambda: a @ b)

    assert count_flops(either, jnp.bool_(True), FEW, SQUARE) == 2 * PRODUCT


def test_a_step_of_the_larger_verifier_computes_what_its_size_says() -> None:
    """Six operations a parameter and token, and on top attention, delta rule and Muon."""
    settings = json.loads(LARGER.read_text("utf-8"))
    config, stage = parse_geometry(settings, "larger").verifier, settings["stages"]["verifier"]
    schedule = OptimiserConfig(steps=1)
    optimiser = make_optimiser(schedule)
    params = jax.eval_shape(lambda: flatten(Verifier(config, rngs=nnx.Rngs(0))))
    state = jax.eval_shape(lambda params: start(params, optimiser, 1), params)
    tokens = jax.ShapeDtypeStruct((stage["rows"], stage["length"] + 1), np.int32)
    flops = count_flops(
        make_step(verifier_objective(config), optimiser, schedule, 0), state, tokens
    )
    size = sum(x.size for x in params.values())
    assert 1.0 < flops / (6 * size * stage["rows"] * stage["length"]) < 1.3


def test_a_share_is_of_the_matrix_rate_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"step": 9, "flops_per_step": 10**12, "steps_per_second": 2.5, "tokens_per_second": 80}
    monkeypatch.setattr(arithmetic, "matrix_rate", lambda: 4e12)
    assert rates_of(record, 2) == {
        "steps_per_second": 2.5,
        "tokens_per_second": 80,
        "flops_per_step": 10**12,
        "tflops_per_second": 2.5,
        "matrix_tflops_per_second": 8.0,
        "share_of_matrix_rate": 0.3125,
    }


def test_a_matrix_rate_is_that_of_some_device() -> None:
    assert 1e9 < matrix_rate() < 1e16
