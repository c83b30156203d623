"""The compiled prologue and epilogue kernels on the cases of `specs.py`."""

import concurrent.futures
import functools

import jax
import numpy as np
import pytest

from pallas_kernels.gdn_inputs import gdn_inputs, gdn_output
from pallas_kernels.gdn_inputs.specs import (
    REAL,
    SMALL,
    make_inputs,
    scaled,
    solve,
    solve_output,
)

pytestmark = pytest.mark.gpu

EPS = 1e-6
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


def kernels(spec, columns=None):
    sizes = {"key_heads": spec.key_heads, "key_dim": spec.key_dim, "columns": columns}
    column = None if columns is None else columns.z
    return (
        jax.jit(functools.partial(gdn_inputs, **sizes, implementation="pallas")),
        jax.jit(functools.partial(gdn_output, eps=EPS, column=column, implementation="pallas")),
    )


@pytest.fixture(scope="module")
def compiled():
    """All shapes compiled side by side: compiling is most of the time."""

    def build(spec):
        inputs = make_inputs(spec)
        prepare, finish = kernels(spec)
        wide_prepare, wide_finish = kernels(spec, inputs.columns())
        wide = inputs.stacked()
        return (
            prepare.lower(*inputs.arguments(spec.dtype)).compile(),
            finish.lower(*inputs.output_arguments(spec.dtype)).compile(),
            wide_prepare.lower(*wide.arguments(spec.dtype)).compile(),
            wide_finish.lower(*wide.output_arguments(spec.dtype)).compile(),
        )

    cases = (*SMALL, *REAL)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return dict(zip([spec.name for spec in cases], pool.map(build, cases), strict=True))


def error(actual, expected: np.ndarray) -> float:
    """Norm of the difference over that of the expected values."""
    difference = np.asarray(actual, np.float64) - expected
    return float(np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30))


@specs((*SMALL, *REAL))
@pytest.mark.parametrize("wide", [False, True])
def test_inputs(compiled, spec, wide):
    inputs = make_inputs(spec)
    arguments = (inputs.stacked() if wide else inputs).arguments(spec.dtype)
    result = compiled[spec.name][2 * wide](*arguments)
    exact = solve(inputs, spec)
    for name, actual in scaled(result).items():
        bound = TOLERANCE[spec.dtype if name in ("q", "k", "v") else "float32"]
        assert error(actual, exact[name]) < bound, name
    for x, scale, length in (
        (result.q, result.q_scale, spec.key_dim**-0.5),
        (result.k, result.k_scale, 1.0),
    ):
        norm = np.sqrt(np.sum(np.asarray(x, np.float64) ** 2, axis=-1) + 1e-6)
        np.testing.assert_allclose(np.asarray(scale) * norm, length, rtol=2e-6)


@specs((*SMALL, *REAL))
@pytest.mark.parametrize("wide", [False, True])
def test_output(compiled, spec, wide):
    inputs = make_inputs(spec)
    arguments = (inputs.stacked() if wide else inputs).output_arguments(spec.dtype)
    result = compiled[spec.name][2 * wide + 1](*arguments)
    assert error(result, solve_output(inputs, EPS)) < TOLERANCE[spec.dtype]


@specs(REAL[4:8])
def test_same_bits_twice(compiled, spec):
    inputs, (prepare, finish, *_) = make_inputs(spec), compiled[spec.name]
    for program, arguments in (
        (prepare, inputs.arguments(spec.dtype)),
        (finish, inputs.output_arguments(spec.dtype)),
    ):
        first, second = (jax.tree.leaves(program(*arguments)) for _ in range(2))
        for x, y in zip(first, second, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_auto_takes_the_kernels():
    inputs = make_inputs(SMALL[0])
    prepare = jax.jit(lambda *x: gdn_inputs(*x, key_heads=2, key_dim=16))
    assert "triton" in prepare.lower(*inputs.arguments("float32")).as_text()
    finish = jax.jit(lambda *x: gdn_output(*x, EPS))
    assert "triton" in finish.lower(*inputs.output_arguments("float32")).as_text()
