"""Addition and norm in one launch, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower_for_hopper

from pallas_kernels import choice
from pallas_kernels.add_norm import add_norm, pallas
from pallas_kernels.add_norm.specs import REAL, SMALL, Spec, make_inputs, solve

EPS = 1e-6
IMPLEMENTATIONS = ("reference", "xla", "pallas")
TOLERANCE = {"float32": 5e-7, "bfloat16": 4e-3}
# Interpreted kernels are large programs: compile time is what these tests cost.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@functools.cache
def compiled(implementation: str, **rest):
    call = functools.partial(add_norm, eps=EPS, implementation=implementation, **rest)
    return jax.jit(call, compiler_options=FAST_COMPILE)


def error(actual, expected: np.ndarray) -> float:
    """Norm of the difference over that of the expected values."""
    difference = np.asarray(actual, np.float64) - expected
    return float(np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30))


@specs(SMALL)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values(implementation, spec):
    arguments = make_inputs(spec)
    total, norm = compiled(implementation, zero_centred=spec.zero_centred)(*arguments)
    exact_total, exact_norm = solve(arguments, EPS, spec.zero_centred)
    assert total.dtype == norm.dtype == spec.dtype
    np.testing.assert_array_equal(np.asarray(total), exact_total)
    assert error(norm, exact_norm) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize(
    "config", [{"block": 64, "num_warps": 1}, {"block": 4096, "num_warps": 2}], ids=str
)
def test_other_cuts(config):
    arguments = make_inputs(Spec(name="", rows=2, size=200))
    add = functools.partial(pallas.add, config=pallas.Config(**config), interpret=True)
    total, norm = add(*arguments, EPS, False)
    exact_total, exact_norm = solve(arguments, EPS, False)
    np.testing.assert_array_equal(np.asarray(total), exact_total)
    assert error(norm, exact_norm) < TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_do_not_mix(implementation):
    """NaN and zeros in one row stay in that row."""
    x, delta, weight = make_inputs(Spec(name="", rows=4, size=40))
    run = compiled(implementation)
    clean = run(x, delta, weight)
    changed = run(x.at[1].set(np.nan).at[2].set(-delta[2]), delta, weight)
    for before, after in zip(clean, changed, strict=True):
        np.testing.assert_array_equal(after[::3], before[::3])
        assert np.isnan(after[1]).all()
        assert not np.any(after[2])


@specs((SMALL[1], SMALL[3], SMALL[7], *REAL))
def test_lowers_for_hopper(spec):
    spec = dataclasses.replace(spec, rows=2)
    call = functools.partial(pallas.add, eps=EPS, zero_centred=spec.zero_centred)
    assert "triton" in lower_for_hopper(call, *make_inputs(spec))


def test_auto_takes_xla_on_a_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(pallas, "add", None)
    total, _ = jax.eval_shape(lambda *x: add_norm(*x, EPS), *make_inputs(SMALL[1]))
    assert total.shape == (1, 40)


def test_unsupported_platform_falls_back_or_refuses(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    choice._warn_once.cache_clear()
    arguments = make_inputs(SMALL[1])
    with pytest.warns(UserWarning, match="add_norm falls back to XLA.*platform 'tpu'"):
        add_norm(*arguments, EPS)
    with pytest.raises(NotImplementedError, match=r"add_norm .*platform 'tpu'"):
        add_norm(*arguments, EPS, implementation="pallas")


def test_rows_too_long_for_the_kernel():
    arguments = [jnp.zeros((1, 16385)), jnp.zeros((1, 16385)), jnp.zeros(16385)]
    with pytest.raises(NotImplementedError, match="H must be at most 16384, got 16385"):
        add_norm(*arguments, EPS, implementation="pallas")
    assert not np.any(add_norm(*arguments, EPS)[1])


F32 = np.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": 1.0}, TypeError, "x must be an array, got float"),
        ({"weight": np.zeros(8, np.float16)}, TypeError, "weight must be float32 or bfloat16"),
        ({"delta": jnp.zeros((2, 8), "bfloat16")}, TypeError, "delta must be float32 like x"),
        ({"delta": jnp.zeros((3, 2, 8), "bfloat16")}, TypeError, "delta must be float32 in parts"),
        ({"delta": np.zeros((0, 2, 8), F32)}, ValueError, "delta must be"),
        ({"delta": np.zeros((3, 1, 8), F32)}, ValueError, r"or \[S, \*\(2, 8\)\], got"),
        ({"x": np.zeros(8, F32)}, ValueError, "x must have two axes"),
        ({"x": np.zeros((0, 8), F32)}, ValueError, "x must have two axes, none empty"),
        ({"delta": np.zeros((1, 8), F32)}, ValueError, r"delta must be \(2, 8\)"),
        ({"weight": np.zeros((1, 8), F32)}, ValueError, r"weight must be \(8,\)"),
        ({"eps": "x"}, TypeError, "eps must be a number, got 'x'"),
        ({"eps": -1.0}, ValueError, "eps must be finite and not negative, got -1.0"),
        ({"eps": np.nan}, ValueError, "eps must be finite and not negative, got nan"),
        ({"implementation": "triton"}, ValueError, "implementation must be one of auto, pallas"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    good = {"x": np.zeros((2, 8), F32), "delta": np.zeros((2, 8), F32), "weight": np.zeros(8, F32)}
    with pytest.raises(error, match=message):
        add_norm(**{**good, "eps": EPS, **change})


@pytest.mark.parametrize("change", [{"block": 48}, {"num_warps": 3}], ids=str)
def test_configuration_refuses_sizes(change):
    with pytest.raises(ValueError, match="must be a power of two, got"):
        pallas.Config(**change)
