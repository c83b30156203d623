"""The trainer: schedule, float32 parameters, steps that are not finite, runs of a given time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tfm_jax.decoding.state import Trio
from tfm_jax.training.trainer import (
    OptimiserConfig,
    compute_copy,
    fill,
    fit,
    flatten,
    host_params,
    make_optimiser,
    make_step,
    rate_share,
    start,
)

SHAPES = {
    "a.weight": (6, 4),
    "b.weight": (6, 4),
    "c.weight": (3, 8),
    "embed_tokens.weight": (5, 4),
    "scale": (7,),
}


def params(seed: int = 0) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    return {k: jnp.asarray(random.standard_normal(s), jnp.float32) for k, s in SHAPES.items()}


def quadratic(params, batch, key):
    del key
    value = sum(jnp.sum(jnp.square(x.astype(jnp.float32) - batch)) for x in params.values())
    return value, {"vector": jnp.arange(2.0)}


def test_schedule_rises_holds_and_falls_to_zero() -> None:
    config = OptimiserConfig(steps=1, warmup=0.1, decay=0.5)
    shares = [float(rate_share(config, jnp.int32(i), jnp.int32(20))) for i in range(21)]
    assert shares[:3] == [0.5, 1.0, 1.0]
    assert shares[10] == 1.0
    np.testing.assert_allclose(shares[11:], np.linspace(0.9, 0.0, 10), atol=1e-6)


def test_a_step_compiled_ahead_is_taken() -> None:
    config = OptimiserConfig(steps=3)
    optimiser = make_optimiser(config)
    state = jax.eval_shape(lambda: start(params(), optimiser, 1))
    step = make_step(quadratic, optimiser, config, 5).lower(state, np.float32(1)).compile()
    records = []
    told = {"seed": 5, "on_record": records.append}
    plain = fit(params(), quadratic, lambda _: np.float32(1), config, **told)

    def never(*_):
        raise AssertionError("the loss was traced again")

    ahead = fit(params(), never, lambda _: np.float32(1), config, step=step, **told)
    for name, value in plain.params.items():
        np.testing.assert_array_equal(value, ahead.params[name])
    assert records[0]["flops_per_step"] > 0
    assert "flops_per_step" not in records[1]


def test_updates_equal_muon_and_adamw_of_single_parameters() -> None:
    config = OptimiserConfig(steps=9, clip=1e9, weight_decay=0.1)
    optimiser = make_optimiser(config)
    ours = params()
    state = optimiser.init(ours)
    muon = optax.contrib.scale_by_muon(
        weight_dimension_numbers=lambda p: {k: optax.contrib.MuonDimensionNumbers(1, 0) for k in p}
    )
    adam = optax.scale_by_adam(b2=0.99, nesterov=True)
    theirs = params()
    matrix = {k: muon.init({k: v}) for k, v in theirs.items() if k[0] in "abc"}
    other = {k: adam.init({k: v}) for k, v in theirs.items() if k[0] not in "abc"}
    for i in range(3):
        gradient = params(i + 1)
        updates, state = optimiser.update(gradient, state, ours)
        ours = optax.apply_updates(ours, updates)
        for k, value in theirs.items():
            if k in matrix:
                step, matrix[k] = muon.update({k: gradient[k]}, matrix[k], {k: value})
                out, in_ = value.shape
                step = step[k] * max(1.0, out / in_) ** 0.5 + 0.1 * value
                theirs[k] = value - config.matrix_rate * step
            else:
                step, other[k] = adam.update({k: gradient[k]}, other[k])
                theirs[k] = value - config.other_rate * step[k]
    for k in SHAPES:
        np.testing.assert_allclose(ours[k], theirs[k], atol=1e-5, err_msg=k)


def test_gradients_are_clipped_to_a_norm() -> None:
    optimiser = make_optimiser(OptimiserConfig(steps=1, clip=0.5))
    before = {"scale": params()["scale"]}
    unit = params(1)["scale"] / jnp.linalg.norm(params(1)["scale"])

    def moments(norm: float) -> list[np.ndarray]:
        _, state = optimiser.update({"scale": norm * unit}, optimiser.init(before), before)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state) if leaf.shape == unit.shape]

    assert len(moments(0.5)) == 2
    for at, above, below in zip(moments(0.5), moments(50.0), moments(0.25), strict=True):
        np.testing.assert_allclose(above, at, rtol=1e-5)
        assert (np.abs(below) < 0.6 * np.abs(at)).all()


def test_parameters_are_float32_and_small_rates_move_them() -> None:
    config = OptimiserConfig(steps=1000, matrix_rate=1e-6, other_rate=1e-6, warmup=0, decay=0)
    step = make_step(quadratic, make_optimiser(config), config, 0)
    before = params()
    half = {k: v.astype(jnp.bfloat16) for k, v in before.items()}
    state = start(half, make_optimiser(config), 1000)
    for _ in range(4):
        state, _ = step(state, jnp.float32(3))
    for k, value in state.params.items():
        assert value.dtype == jnp.float32
        assert not np.array_equal(value, half[k].astype(jnp.float32)), k
        assert compute_copy({k: value})[k].dtype == jnp.bfloat16
    kinds = {str(x.dtype) for x in jax.tree.leaves(state.optimiser)}
    assert kinds == {"float32", "int32"}


def test_decay_gates_and_their_norm_stay_float32(tiny_trio: Trio) -> None:
    copy = compute_copy(flatten(tiny_trio.verifier))
    kept = {name for name, value in copy.items() if value.dtype == jnp.float32}
    names = ("A_log", "dt_bias", "norm.weight")
    assert kept == {f"layers.{i}.linear_attn.{name}" for i in (0, 2) for name in names}


def test_fill_is_the_inverse_of_flatten(tiny_trio: Trio) -> None:
    filled = fill(nnx.split(tiny_trio.drafter)[0], flatten(tiny_trio.drafter))
    for name, value in flatten(filled).items():
        np.testing.assert_array_equal(value, flatten(tiny_trio.drafter)[name])


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_steps_that_are_not_finite_change_nothing_and_are_reported(
    broken: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def loss(params, batch, key):
        value, metrics = quadratic(params, 0.0, key)
        if broken == "loss":
            return value + jnp.where(batch, jnp.nan, 0.0), metrics
        # The value is finite, the derivative of the root at zero is not.
        return value + jnp.sqrt(jnp.where(batch, 0.0, 1.0) * jnp.abs(params["scale"][0])), metrics

    config = OptimiserConfig(steps=6, warmup=0, decay=0)
    log = tmp_path / "log.jsonl"
    bad = [False, True, False, False, True, False]
    state = fit(params(), loss, lambda i: jnp.bool_(bad[i]), config, log=log, log_every=3)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.params))
    assert int(state.skipped) == 2
    assert int(state.step) == 6
    shown = capsys.readouterr().out
    assert "skipped 1 steps that were not finite, last 2" in shown
    assert "skipped 1 steps that were not finite, last 5" in shown
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records] == [3, 6]
    assert records[0]["vector"] == [0.0, 1.0]

    good = [i for i in range(6) if not bad[i]]
    step = make_step(loss, make_optimiser(config), config, 0)
    clean = start(params(), make_optimiser(config), 6)
    for _ in good:
        clean, _ = step(clean, jnp.bool_(False))
    for k in SHAPES:
        np.testing.assert_array_equal(state.params[k], clean.params[k])


def test_steps_are_fitted_to_the_time(tmp_path: Path) -> None:
    def slow(step: int) -> float:
        time.sleep(0.01)
        return 0.0

    log = tmp_path / "log.jsonl"
    config = OptimiserConfig(steps=100, decay=0.5)
    begin = time.monotonic()
    state = fit(params(), quadratic, slow, config, log=log, log_every=10, seconds=6.0)
    assert 4.0 < time.monotonic() - begin < 9.0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert int(state.step) == int(state.total) == records[-1]["step"] == records[-1]["steps"] > 60
    # The schedule came down to the end, and the plan was left alone while it did.
    assert records[-1]["rate_share"] < 0.05
    falling = [
        record["steps"] for record in records if record["step"] > 20 and record["rate_share"] < 0.9
    ]
    assert len(set(falling)) == 1


def test_a_step_too_large_for_float32_is_skipped() -> None:
    def loss(params, batch, key):
        del batch, key
        return -1e-3 * params["scale"].astype(jnp.float32).sum(), {}

    config = OptimiserConfig(steps=2, other_rate=1e38, warmup=0, decay=0)
    state = fit({"scale": jnp.full((1,), 3.3e38)}, loss, lambda _: 0.0, config)
    assert int(state.skipped) == 2
    np.testing.assert_array_equal(state.params["scale"], np.float32([3.3e38]))


def test_parameters_that_are_not_finite_are_not_published() -> None:
    state = start(params(), make_optimiser(OptimiserConfig(steps=1)), 1)
    assert host_params(state).keys() == SHAPES.keys()
    state.params["scale"] = state.params["scale"].at[2].set(jnp.inf)
    with pytest.raises(ValueError, match=r"after 0 steps 1 of 5 parameters .* first is scale"):
        host_params(state)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"steps": 0}, "steps must be positive, got 0"),
        ({"steps": 2.5}, r"steps must be an integer, got 2\.5"),
        ({"warmup": 0.7, "decay": 0.7}, "shares of the run"),
        ({"warmup": float("nan")}, r"warmup must lie in 0\.\.1, got nan"),
        ({"decay": -0.1}, r"decay must lie in 0\.\.1, got -0\.1"),
        ({"matrix_rate": float("nan")}, "matrix_rate must be finite and at least 0, got nan"),
        ({"matrix_rate": "x"}, "matrix_rate must be finite and at least 0, got 'x'"),
        ({"other_rate": float("inf")}, "other_rate must be finite and at least 0, got inf"),
        ({"weight_decay": None}, "weight_decay must be finite and at least 0, got None"),
        ({"clip": -1}, "clip must be finite and at least 0, got -1"),
        ({"clip": 0}, "clip must be positive, got 0"),
    ],
)
def test_settings_are_checked(entries: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimiserConfig(**{"steps": 1, **entries})
