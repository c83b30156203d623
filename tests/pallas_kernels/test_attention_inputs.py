"""Queries, keys and values of an attention layer, against float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower_for_hopper

from pallas_kernels import choice
from pallas_kernels.attention_inputs import HeadColumns, attention_inputs, pallas, turns
from pallas_kernels.attention_inputs.specs import EPS, REAL, SMALL, Spec, make_inputs, solve

IMPLEMENTATIONS = ("reference", "xla", "pallas")
# One rounding of bfloat16 in the kernel, one a step in XLA.
TOLERANCE = {"float32": 5e-7, "bfloat16": 3e-3}
XLA_BFLOAT16 = 6e-3
# Interpreted kernels are large programs: compile time is what these tests cost.
FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later releases have no such option
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@functools.cache
def compiled(implementation: str, spec: Spec, columns: HeadColumns | None):
    settings = {**spec.settings, "columns": columns, "implementation": implementation}
    return jax.jit(functools.partial(attention_inputs, **settings), compiler_options=FAST_COMPILE)


def prepare(implementation: str, inputs, spec: Spec, *, wide: bool = False):
    arguments = (inputs.stacked(spec) if wide else inputs).arguments(spec.dtype)
    return compiled(implementation, spec, spec.columns if wide else None)(*arguments)


def error(actual, expected: np.ndarray) -> float:
    """Norm of the difference over that of the expected values, of the worst head of a row."""
    difference = np.linalg.norm(np.asarray(actual, np.float64) - expected, axis=-1)
    return float((difference / np.maximum(np.linalg.norm(expected, axis=-1), 1e-30)).max())


@specs(SMALL)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values(implementation, spec):
    """From a stacked projection that holds NaN wherever nobody reads."""
    inputs = make_inputs(spec)
    result = prepare(implementation, inputs, spec, wide=True)
    exact = solve(inputs, spec)
    bf16 = implementation == "xla" and spec.dtype == "bfloat16"
    for name, actual in result._asdict().items():
        assert actual.dtype == spec.dtype, name
        bound = XLA_BFLOAT16 if bf16 else TOLERANCE[spec.dtype]
        assert error(actual, exact[name]) < bound, name
    np.testing.assert_array_equal(result.v, exact["v"])


@specs((SMALL[1], SMALL[7]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_arrays_of_their_own_give_the_same_bits(implementation, spec):
    inputs = make_inputs(spec)
    result = prepare(implementation, inputs, spec)
    for x, y in zip(result, prepare(implementation, inputs, spec, wide=True), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("block_n", [1, 8])
def test_values_in_blocks(block_n):
    spec = dataclasses.replace(SMALL[1], rows=11)
    inputs = make_inputs(spec)
    q, k, v, positions, *weights = inputs.arguments(spec.dtype)
    cos, sin = turns(positions, spec.theta, spec.rotary, q.dtype)
    call = functools.partial(pallas.prepare, config=pallas.Config(block_n=block_n), interpret=True)
    settings = (EPS, spec.heads, spec.key_heads, spec.zero_centred, HeadColumns(step=spec.size))
    result = call(q, k, v, cos, sin, *weights, *settings)
    for x, exact in zip(result, solve(inputs, spec).values(), strict=True):
        assert error(x, exact) < TOLERANCE["float32"]


def test_angles():
    """Off by no more than a float32 product and a frequency's rounding must be."""
    positions = np.r_[0, 1, 1023, 8191, 262_143].astype(np.int32)
    angles = positions[:, None] * 1e7 ** (-np.arange(0, 64, 2) / 64)
    cos, sin = turns(jnp.asarray(positions), 1e7, 64, jnp.float32)
    for actual, exact in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        assert np.all(np.abs(actual - exact) < 2e-7 + 3e-7 * angles)
    rounded, _ = turns(jnp.asarray(positions), 1e7, 64, jnp.bfloat16)
    np.testing.assert_array_equal(rounded, cos.astype(jnp.bfloat16))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_rows_and_heads_do_not_mix(implementation):
    """NaN in a row's second query head and first key head reaches these alone."""
    spec = Spec(name="", rows=9)
    inputs = make_inputs(spec)
    clean = prepare(implementation, inputs, spec, wide=True)
    poisoned = dataclasses.replace(inputs, q=inputs.q.copy(), k=inputs.k.copy())
    poisoned.q[5, 16:32] = np.nan
    poisoned.k[5, :16] = np.nan
    result = prepare(implementation, poisoned, spec, wide=True)
    expected = clean._replace(q=clean.q.at[5, 1].set(jnp.nan), k=clean.k.at[0, 5].set(jnp.nan))
    for x, y in zip(result, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_of_zeros_stays_zero(implementation):
    spec = Spec(name="", rows=2)
    inputs = make_inputs(spec)
    zeros = dataclasses.replace(inputs, q=inputs.q * 0, k=inputs.k * 0)
    result = prepare(implementation, zeros, spec)
    assert not np.any(result.q)
    assert not np.any(result.k)


def test_position_zero_turns_nothing():
    spec = Spec(name="", rows=1, start=0, zero_centred=False)
    inputs = dataclasses.replace(
        make_inputs(spec), positions=np.zeros(1, np.int32), k_weight=np.ones(16, np.float32)
    )
    k = inputs.k.reshape(2, 1, 16)
    k = k / np.sqrt((k * k).mean(-1, keepdims=True) + EPS)
    np.testing.assert_allclose(prepare("pallas", inputs, spec).k, k, rtol=1e-6)


def test_gradient_of_the_array_form():
    """What training needs: against a difference quotient."""
    spec = Spec(name="", rows=3)
    inputs = make_inputs(spec).stacked(spec)
    wide, _, _, *rest = inputs.arguments("float32")
    wide = jnp.nan_to_num(wide)
    settings = {**spec.settings, "columns": spec.columns}

    def total(x):
        made = attention_inputs(x, x, x, *rest, **settings, implementation="xla")
        return sum(jnp.sum(jnp.sin(y)) for y in made)

    step = 1e-2 * jax.random.normal(jax.random.key(0), wide.shape)
    slope = (total(wide + step) - total(wide - step)) / 2
    assert abs(jnp.vdot(jax.grad(total)(wide), step) - slope) < 1e-3 * abs(slope) + 1e-4


@specs((*SMALL[:4], REAL[1], REAL[6], REAL[7], REAL[13]))
def test_lowers_for_hopper(spec):
    spec = dataclasses.replace(spec, heads=2 * spec.key_heads)
    q, k, v, positions, *weights = make_inputs(spec).stacked(spec).arguments(spec.dtype)
    cos, sin = turns(positions, spec.theta, spec.rotary, q.dtype)
    call = lambda *arrays: pallas.prepare(
        *arrays, EPS, spec.heads, spec.key_heads, spec.zero_centred, spec.columns
    )
    assert "triton" in lower_for_hopper(call, q, k, v, cos, sin, *weights)


def test_auto_takes_xla_on_a_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(pallas, "prepare", None)
    call = lambda *x: attention_inputs(*x, **SMALL[0].settings)
    assert jax.eval_shape(call, *make_inputs(SMALL[0]).arguments("float32")).k.shape == (1, 1, 16)


def test_unsupported_platform_falls_back_or_refuses(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    choice._warn_once.cache_clear()
    call = functools.partial(
        attention_inputs, *make_inputs(SMALL[0]).arguments("float32"), **SMALL[0].settings
    )
    with pytest.warns(UserWarning, match="attention_inputs falls back to XLA.*platform 'tpu'"):
        call()
    with pytest.raises(NotImplementedError, match=r"attention_inputs .*platform 'tpu'"):
        call(implementation="pallas")


F32 = np.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": 1.0}, TypeError, "q must be an array, got float"),
        ({"q": np.zeros((5, 64), np.float16)}, TypeError, "q must be float32 or bfloat16"),
        ({"k": jnp.zeros((5, 32), jnp.bfloat16)}, TypeError, "k must be float32 as q, got bfl"),
        ({"positions": np.zeros(5, F32)}, TypeError, "positions must be int32 or int64, got fl"),
        ({"positions": np.full(5, 2**32)}, ValueError, "positions must lie in 0.*got 4294967296"),
        ({"positions": np.zeros(4, np.int32)}, ValueError, r"positions must be \(5,\) for q"),
        ({"q": np.zeros((5, 65), F32)}, ValueError, r"q must be \[N, 64\] unless columns are"),
        ({"v": np.zeros((5, 31), F32)}, ValueError, r"v must be \[N, 32\] unless columns are"),
        ({"v": np.zeros((4, 32), F32)}, ValueError, r"v must be \[5, 32 or more\]"),
        ({"q": np.zeros((0, 64), F32)}, ValueError, "q must have two axes, none empty"),
        ({"q_weight": np.zeros((1, 16), F32)}, ValueError, "q_weight must have one axis"),
        ({"k_weight": np.zeros(15, F32)}, ValueError, r"k_weight must be \(16,\) as q_weight"),
        ({"key_heads": 3}, ValueError, "heads must be a positive multiple of key_heads, got 4, 3"),
        ({"rotary": 3}, ValueError, "rotary must be even and 2 to 16, got 3"),
        ({"rotary": 18}, ValueError, "rotary must be even and 2 to 16, got 18"),
        ({"theta": 0.0}, ValueError, "theta must be positive, got 0"),
        (
            {"columns": HeadColumns(step=15)},
            ValueError,
            "step must be at least 16, the size of",
        ),
        (
            {"columns": HeadColumns(step=32)},
            ValueError,
            r"q must be \[5, 112 or more\] to",
        ),
        ({"columns": HeadColumns(step=16, k=-1)}, ValueError, "column of k must not be negative"),
        (
            {"columns": HeadColumns(step=16, v=8)},
            ValueError,
            r"v must be \[5, 40 or more\] to",
        ),
        ({"implementation": "triton"}, ValueError, "implementation must be one of auto, pallas"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    names = ("q", "k", "v", "positions", "q_weight", "k_weight")
    spec = Spec(name="", rows=5)
    good = dict(zip(names, make_inputs(spec).arguments("float32"), strict=True))
    with pytest.raises(error, match=message):
        attention_inputs(**{**good, **spec.settings, **change})


def test_configuration_refuses_sizes():
    with pytest.raises(ValueError, match="block_n must be a power of two, got 12"):
        pallas.Config(block_n=12)
