"""Prologue and epilogue of a gated delta-rule layer, against float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower_for_hopper

from pallas_kernels import choice
from pallas_kernels.gdn_inputs import (
    Columns,
    GDNInputs,
    gdn_inputs,
    gdn_output,
    pallas,
    pallas_output,
)
from pallas_kernels.gdn_inputs.specs import (
    REAL,
    SMALL,
    Spec,
    make_inputs,
    scaled,
    solve,
    solve_output,
)

EPS = 1e-6
IMPLEMENTATIONS = ("reference", "xla", "pallas")
# One rounding of bfloat16 in the kernel, one a step in XLA.
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}
XLA_BFLOAT16 = 1e-2
# Interpreted kernels are large programs: compile time is what these tests cost.
FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later releases have no such option
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@functools.cache
def compiled(function, implementation: str, **rest):
    call = functools.partial(function, implementation=implementation, **rest)
    return jax.jit(call, compiler_options=FAST_COMPILE)


def prepare(implementation: str, inputs, spec: Spec):
    sizes = {"key_heads": spec.key_heads, "key_dim": spec.key_dim}
    return compiled(gdn_inputs, implementation, **sizes)(*inputs.arguments(spec.dtype))


def error(actual, expected: np.ndarray) -> float:
    """Norm of the difference over that of the expected values."""
    difference = np.asarray(actual, np.float64) - expected
    return float(np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30))


def tolerance(spec: Spec, implementation: str) -> float:
    bf16 = implementation == "xla" and spec.dtype == "bfloat16"
    return XLA_BFLOAT16 if bf16 else TOLERANCE[spec.dtype]


@specs(SMALL)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inputs(implementation, spec):
    inputs = make_inputs(spec)
    result = prepare(implementation, inputs, spec)
    exact = solve(inputs, spec)
    for name, actual in result._asdict().items():
        assert actual.dtype == (spec.dtype if name in ("q", "k", "v") else jnp.float32), name
    for name, actual in scaled(result).items():
        assert error(actual, exact[name]) < tolerance(spec, implementation), name
    # However rounded, as long as they should be.
    for x, scale, length in (
        (result.q, result.q_scale, spec.key_dim**-0.5),
        (result.k, result.k_scale, 1.0),
    ):
        norm = np.sqrt(np.sum(np.asarray(x, np.float64) ** 2, axis=-1) + 1e-6)
        np.testing.assert_allclose(np.asarray(scale) * norm, length, rtol=1e-6)


@specs((SMALL[1], SMALL[5]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parts_of_a_wide_array(implementation, spec):
    """The same bits as from arrays of their own."""
    inputs = make_inputs(spec)
    sizes = {"key_heads": spec.key_heads, "key_dim": spec.key_dim}
    wide, columns = inputs.stacked(), inputs.columns()
    call = compiled(gdn_inputs, implementation, **sizes, columns=columns)
    result = call(*wide.arguments(spec.dtype))
    for x, y in zip(result, prepare(implementation, inputs, spec), strict=True):
        np.testing.assert_array_equal(x, y)
    call = compiled(gdn_output, implementation, eps=EPS, column=columns.z)
    result = call(*wide.output_arguments(spec.dtype))
    alone = compiled(gdn_output, implementation, eps=EPS)(*inputs.output_arguments(spec.dtype))
    np.testing.assert_array_equal(result, alone)


@pytest.mark.parametrize("block_n", [1, 4])
def test_inputs_in_blocks(block_n):
    spec = Spec(name="", rows=11, key_dim=12, value_dim=20)
    inputs = make_inputs(spec)
    config = pallas.Config(block_n=block_n)
    call = functools.partial(pallas.prepare, config=config, interpret=True)
    sizes = {"key_heads": spec.key_heads, "key_dim": spec.key_dim, "columns": Columns()}
    call = jax.jit(functools.partial(call, **sizes), compiler_options=FAST_COMPILE)
    result = scaled(GDNInputs(*call(*inputs.arguments("float32"))))
    for name, exact in solve(inputs, spec).items():
        assert error(result[name], exact) < TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_rows_do_not_mix(implementation):
    """NaN in a row reaches that row and those below it alone."""
    spec = Spec(name="", rows=9)
    inputs = make_inputs(spec)
    clean = prepare(implementation, inputs, spec)
    poisoned = dataclasses.replace(
        inputs, **{name: getattr(inputs, name).copy() for name in ("x", "a", "b")}
    )
    for name in ("x", "a", "b"):
        getattr(poisoned, name)[5] = np.nan
    result = prepare(implementation, poisoned, spec)
    reached = (inputs.taps == 5 + spec.width - 1).any(axis=1)
    for name in GDNInputs._fields:
        hit = np.arange(9) == 5 if name in ("g", "beta") else reached
        before, after = (np.asarray(getattr(x, name)) for x in (clean, result))
        np.testing.assert_array_equal(after[~hit], before[~hit])
        assert np.isnan(after[hit]).all(), name


def test_a_row_of_zeros_stays_zero():
    spec = Spec(name="", rows=9)
    inputs = make_inputs(spec)
    zeros = dataclasses.replace(inputs, x=inputs.x * 0, history=inputs.history * 0)
    for implementation in ("xla", "pallas"):
        result = prepare(implementation, zeros, spec)
        assert not any(np.any(np.asarray(x)) for x in result[:3])
        np.testing.assert_allclose(result.k_scale, 1e3, rtol=1e-6)


@specs(SMALL)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_output(implementation, spec):
    inputs = make_inputs(spec)
    arguments = inputs.output_arguments(spec.dtype)
    result = compiled(gdn_output, implementation, eps=EPS)(*arguments)
    assert result.dtype == spec.dtype
    assert error(result, solve_output(inputs, EPS)) < TOLERANCE[spec.dtype]


@specs((*SMALL[:4], REAL[1], REAL[4], REAL[7], REAL[10]))
def test_lowers_for_hopper(spec):
    inputs = make_inputs(dataclasses.replace(spec, key_heads=2, value_heads=4))
    columns, inputs = inputs.columns(), inputs.stacked()
    sizes = {"key_heads": 2, "key_dim": spec.key_dim}
    call = functools.partial(pallas.prepare, **sizes, columns=columns)
    assert "triton" in lower_for_hopper(call, *inputs.arguments(spec.dtype))
    call = functools.partial(pallas_output.finish, eps=EPS, column=columns.z)
    assert "triton" in lower_for_hopper(call, *inputs.output_arguments(spec.dtype))


def test_auto_takes_xla_on_a_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(pallas, "prepare", None)
    monkeypatch.setattr(pallas_output, "finish", None)
    inputs = make_inputs(SMALL[0])
    call = lambda *x: gdn_inputs(*x, key_heads=2, key_dim=16)
    assert jax.eval_shape(call, *inputs.arguments("float32")).v.shape == (1, 1, 16)
    call = lambda *x: gdn_output(*x, EPS)
    assert jax.eval_shape(call, *inputs.output_arguments("float32")).shape == (1, 16)


def test_unsupported_platform_falls_back_or_refuses(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    choice._warn_once.cache_clear()
    inputs = make_inputs(SMALL[0])
    sizes = {"key_heads": 2, "key_dim": 16}
    with pytest.warns(UserWarning, match="gdn_inputs falls back to XLA.*platform 'tpu'"):
        gdn_inputs(*inputs.arguments("float32"), **sizes)
    with pytest.raises(NotImplementedError, match=r"gdn_inputs .*platform 'tpu'"):
        gdn_inputs(*inputs.arguments("float32"), **sizes, implementation="pallas")
    with pytest.warns(UserWarning, match="gdn_output falls back to XLA.*platform 'tpu'"):
        gdn_output(*inputs.output_arguments("float32"), EPS)
    with pytest.raises(NotImplementedError, match=r"gdn_output .*platform 'tpu'"):
        gdn_output(*inputs.output_arguments("float32"), EPS, implementation="pallas")


ARGUMENTS = ("x", "history", "taps", "weight", "a", "b", "a_log", "dt_bias")
F32 = np.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": 1.0}, TypeError, "x must be an array, got float"),
        ({"x": np.zeros((5, 128), np.float16)}, TypeError, "x must be float32 or bfloat16"),
        ({"x": np.zeros(128, F32)}, ValueError, "x must have two axes"),
        ({"x": np.zeros((5, 129), F32)}, ValueError, r"x must be \(5, 128\)"),
        ({"weight": np.zeros((64, 4), F32)}, ValueError, "weight must have channels for 2 query"),
        ({"weight": np.zeros((129, 4), F32)}, ValueError, "each of 4 value heads, got 129"),
        ({"taps": np.zeros((5, 4), F32)}, TypeError, "taps must be int32, got float32"),
        ({"taps": np.zeros((5, 1), np.int32)}, ValueError, r"taps must be \[N, W\] with W >= 2"),
        ({"taps": np.full((5, 4), -1, np.int32)}, ValueError, r"taps must lie in 0\.\.7, got -1"),
        ({"taps": np.full((5, 4), 2**32)}, ValueError, r"taps must lie in 0\.\.7, got 4294967296"),
        ({"taps": np.zeros((4, 4), np.int32)}, ValueError, r"x must be \(4, 128\)"),
        ({"history": np.zeros((4, 128), F32)}, ValueError, r"history must be \(3, 128\)"),
        ({"weight": np.zeros((128, 3), F32)}, ValueError, r"weight must be \(128, 4\)"),
        ({"b": np.zeros((5, 5), F32)}, ValueError, r"b must be \(5, 4\)"),
        ({"a_log": np.zeros((4, 1), F32)}, ValueError, "a_log must have one axis"),
        ({"columns": Columns(a=1)}, ValueError, r"a must be \[5, 5 or more\] to hold 4 columns"),
        ({"columns": Columns(x=-1)}, ValueError, "first column of x must not be negative, got -1"),
        ({"dt_bias": np.zeros(3, F32)}, ValueError, r"dt_bias must be \(4,\)"),
        ({"key_dim": 0}, ValueError, "key_heads and key_dim must be positive"),
        ({"implementation": "triton"}, ValueError, "implementation must be one of auto, pallas"),
    ],
)
def test_inputs_refuse_bad_arguments(change, error, message):
    good = dict(
        zip(ARGUMENTS, make_inputs(Spec(name="", rows=5)).arguments("float32"), strict=True)
    )
    with pytest.raises(error, match=message):
        gdn_inputs(**{**good, "key_heads": 2, "key_dim": 16, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": np.zeros((5, 4, 16), np.float16)}, TypeError, "out must be float32, got float16"),
        ({"out": np.zeros((5, 64), F32)}, ValueError, "out must have three axes"),
        ({"z": np.zeros((5, 63), F32)}, ValueError, r"z must be \(5, 64\)"),
        ({"column": 8}, ValueError, r"z must be \[5, 72 or more\] to hold 64 columns from 8 on"),
        ({"weight": np.zeros(64, F32)}, ValueError, r"weight must be \(16,\)"),
        ({"eps": -1.0}, ValueError, "eps must be finite and not negative, got -1.0"),
    ],
)
def test_output_refuses_bad_arguments(change, error, message):
    arguments = make_inputs(Spec(name="", rows=5)).output_arguments("float32")
    good = dict(zip(("out", "z", "weight"), arguments, strict=True))
    with pytest.raises(error, match=message):
        gdn_output(**{**good, "eps": EPS, **change})


def test_configuration_refuses_sizes():
    with pytest.raises(ValueError, match="block_n must be a power of two, got 12"):
        pallas.Config(block_n=12)
