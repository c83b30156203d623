"""Products of a few rows, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower_for_hopper

from pallas_kernels import choice
from pallas_kernels.skinny_matmul import multiply, pallas, skinny_matmul
from pallas_kernels.skinny_matmul.specs import REAL, SMALL, Spec, joined, make_inputs, solve

IMPLEMENTATIONS = ("reference", "xla", "pallas")
ROUNDED, SUMMED = 3e-3, 2e-6  # one rounding to bfloat16, float32 sums
# Interpreted kernels are large programs: compile time is what these tests cost.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


def run(implementation: str, arguments, **rest):
    call = functools.partial(skinny_matmul, implementation=implementation, **rest)
    return jax.jit(call, compiler_options=FAST_COMPILE)(*arguments)


def error(actual, expected: np.ndarray) -> float:
    """Norm of the difference over that of the expected values."""
    return float(np.linalg.norm(joined(actual) - expected) / np.linalg.norm(expected))


@specs(SMALL)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values(implementation, spec):
    arguments = make_inputs(spec)
    result = run(implementation, arguments, parts=spec.parts)
    in_parts = spec.parts and implementation == "pallas"
    assert result.dtype == ("float32" if in_parts else "bfloat16")
    assert result.shape[in_parts:] == (spec.rows, spec.outputs)
    assert error(result, solve(arguments)) < (SUMMED if in_parts else ROUNDED)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_float32_is_exact(implementation):
    arguments = [x.astype("float32") for x in make_inputs(SMALL[4])]
    assert error(run(implementation, arguments), solve(arguments)) < SUMMED


@pytest.mark.parametrize(
    "config",
    [
        {"block_n": 16, "block_k": 16, "splits": 3},
        {"block_n": 128, "block_k": 128, "splits": 2, "num_warps": 8},
        {"block_n": 32, "block_k": 64, "splits": 7},  # more splits than steps
    ],
    ids=str,
)
def test_other_cuts(config):
    arguments = make_inputs(Spec(name="", rows=66, inputs=256, outputs=136))
    config = pallas.Config(**config)
    result = pallas.multiply(*arguments, True, config=config, interpret=True)
    assert result.shape == (config.splits, 66, 136)
    assert error(result, solve(arguments)) < SUMMED


@pytest.mark.parametrize(
    ("wave", "splits", "rows"),
    [
        (3, 4, 66),  # a wave of three blocks, the two left over shared by four
        (2, 3, 1),
        (9, 2, 17),  # no whole wave
        (5, 2, 17),  # nothing left over
        (1, 2, 5),
    ],
)
def test_blocks_left_over_are_shared(wave, splits, rows):
    arguments = make_inputs(Spec(name="", rows=rows, inputs=320, outputs=136))
    config = pallas.Config(block_n=32, splits=splits, wave=wave)
    result = jax.jit(functools.partial(pallas.multiply, config=config, interpret=True))(*arguments)
    assert result.shape == (rows, 136)
    assert result.dtype == jnp.bfloat16
    assert error(result, solve(arguments)) < ROUNDED


@pytest.mark.parametrize(
    ("outputs", "inputs", "wave", "splits"),
    [
        (34816, 5120, 132, 16),  # 272 blocks: two waves and 8
        (34816, 1024, 132, 4),
        (24576, 4096, 132, 2),
        (33792, 5120, None, 1),  # 264 blocks
        (16480, 5120, None, 1),  # less than a wave
        (30000, 5120, None, 1),  # 103 left over: no two programs for each
    ],
)
def test_default_cut_shares_what_a_wave_leaves(outputs, inputs, wave, splits):
    config = pallas.default_config(65, outputs, inputs, parts=False)
    assert (config.wave, config.splits) == (wave, splits)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_do_not_mix(implementation):
    """NaN in one row, or in one row of the weight, stays there."""
    x, weight = make_inputs(SMALL[4])
    clean = run(implementation, (x, weight))
    changed = np.asarray(run(implementation, (x.at[64].set(np.nan), weight)))
    np.testing.assert_array_equal(changed[:64], clean[:64])
    assert np.isnan(changed[64].astype(np.float32)).all()
    changed = np.asarray(run(implementation, (x, weight.at[7].set(np.nan))))
    np.testing.assert_array_equal(np.delete(changed, 7, 1), np.delete(clean, 7, 1))


@pytest.mark.parametrize(
    "spec", [*SMALL[:2], SMALL[4], SMALL[9], *REAL], ids=lambda spec: spec.name
)
def test_lowers_for_hopper(spec):
    call = functools.partial(pallas.multiply, parts=spec.parts)
    shapes = jax.eval_shape(lambda: make_inputs(Spec(name="", rows=1, inputs=64, outputs=1)))
    x = jax.ShapeDtypeStruct((spec.rows, spec.inputs), shapes[0].dtype)
    weight = jax.ShapeDtypeStruct((spec.outputs, spec.inputs), shapes[1].dtype)
    assert "triton" in lower_for_hopper(call, x, weight)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("spec", [SMALL[0], SMALL[8]], ids=lambda spec: spec.name)
def test_many_are_one_product(spec, axes):
    """Under `vmap` no kernel reads the weight again for every member."""
    call = functools.partial(skinny_matmul, parts=spec.parts, implementation="pallas")
    pairs = [make_inputs(spec, seed) for seed in range(3)]
    columns = [
        [pairs[0 if axis is None else i][j] for i in range(3)] for j, axis in enumerate(axes)
    ]
    stacked = [
        column[0] if axis is None else jnp.stack(column)
        for column, axis in zip(columns, axes, strict=True)
    ]
    result = jax.jit(jax.vmap(call, in_axes=axes))(*stacked)
    assert result.shape[1:] == jax.eval_shape(call, *pairs[0]).shape
    for one, *arguments in zip(result, *columns, strict=True):
        assert error(one, solve(arguments)) < ROUNDED
    assert "pallas" not in str(jax.make_jaxpr(jax.vmap(call, in_axes=axes))(*stacked))


def choose_on_a_gpu(monkeypatch, rows: int, outputs: int, **rest) -> str:
    """The implementation that "auto" takes on a GPU, for 128 inputs."""
    taken = []
    monkeypatch.setattr(choice, "_unsupported_device", lambda platform: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for name, module in (("pallas", pallas), ("xla", multiply.xla)):
        monkeypatch.setattr(module, "multiply", lambda *x, name=name, **y: taken.append(name))
    x = jnp.zeros((rows, 128), rest.pop("dtype", "bfloat16"))
    skinny_matmul(x, jnp.zeros((outputs, 128), x.dtype), **rest)
    return taken[0]


@pytest.mark.parametrize(
    ("rows", "outputs", "rest", "taken"),
    [
        (65, 200, {}, "pallas"),
        (1, 200, {}, "pallas"),
        (80, 200, {"parts": True}, "pallas"),
        (1, 30000, {}, "pallas"),
        (32, 30000, {}, "pallas"),
        (33, 30000, {}, "xla"),
        (81, 200, {"parts": True}, "xla"),
        (145, 200, {}, "xla"),
        (65, 200, {"dtype": "float32"}, "xla"),
    ],
)
def test_auto_takes_what_is_faster(monkeypatch, recwarn, rows, outputs, rest, taken):
    assert choose_on_a_gpu(monkeypatch, rows, outputs, **rest) == taken
    assert not recwarn.list


def test_auto_takes_xla_on_a_cpu(monkeypatch):
    monkeypatch.setattr(pallas, "multiply", None)
    assert skinny_matmul(*make_inputs(SMALL[4]), parts=True).shape == (65, 200)


def test_unsupported_platform_falls_back_or_refuses(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    choice._warn_once.cache_clear()
    arguments = make_inputs(SMALL[4])
    with pytest.warns(UserWarning, match="skinny_matmul falls back to XLA.*platform 'tpu'"):
        skinny_matmul(*arguments)
    with pytest.raises(NotImplementedError, match=r"skinny_matmul .*platform 'tpu'"):
        skinny_matmul(*arguments, implementation="pallas")


@pytest.mark.parametrize(
    ("rows", "inputs", "dtype", "message"),
    [
        (145, 64, "bfloat16", "up to 144 rows, got 145"),
        (1, 96, "bfloat16", "K must be a multiple of 64, got 96"),
        (1, 64, "float32", "it takes bfloat16, got float32"),
    ],
)
def test_kernel_refuses_shapes(rows, inputs, dtype, message):
    x, weight = jnp.zeros((rows, inputs), dtype), jnp.zeros((3, inputs), dtype)
    with pytest.raises(NotImplementedError, match=message):
        skinny_matmul(x, weight, implementation="pallas")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": 1.0}, TypeError, "x must be an array, got float"),
        ({"weight": np.zeros((3, 8), np.float16)}, TypeError, "weight must be float32 or bfloat16"),
        ({"weight": jnp.zeros((3, 8), "bfloat16")}, TypeError, "weight must be float32 like x"),
        ({"x": np.zeros(8, np.float32)}, ValueError, "x must have two axes"),
        ({"x": np.zeros((0, 8), np.float32)}, ValueError, "x must have two axes, none empty"),
        ({"weight": np.zeros((8, 3), np.float32)}, ValueError, r"weight must be \[N, 8\]"),
        ({"implementation": "triton"}, ValueError, "implementation must be one of auto, pallas"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    good = {"x": np.zeros((2, 8), np.float32), "weight": np.zeros((3, 8), np.float32)}
    with pytest.raises(error, match=message):
        skinny_matmul(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_n": 48}, "block_n must be a power of two >= 16, got 48"),
        ({"block_k": 8}, "block_k must be a power of two >= 16, got 8"),
        ({"num_warps": 3}, "num_warps must be a power of two >= 1, got 3"),
        ({"splits": 0}, "must be at least 1"),
        ({"wave": 0}, "must be at least 1"),
    ],
)
def test_configuration_refuses_sizes(change, message):
    with pytest.raises(ValueError, match=message):
        pallas.Config(**change)


def test_splits_need_parts():
    with pytest.raises(ValueError, match="2 splits comes in parts"):
        pallas.multiply(*make_inputs(SMALL[0]), config=pallas.Config(splits=2), interpret=True)


def test_parts_have_no_waves():
    with pytest.raises(ValueError, match="all its blocks shared"):
        pallas.multiply(*make_inputs(SMALL[8]), True, config=pallas.Config(wave=2), interpret=True)
