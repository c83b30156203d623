"""The compiled kernel on the cases of `specs.py`."""

import concurrent.futures
import functools

import jax
import numpy as np
import pytest

from pallas_kernels.attention_inputs import attention_inputs
from pallas_kernels.attention_inputs.specs import REAL, SMALL, make_inputs, solve

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 1e-6, "bfloat16": 3e-3}


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@pytest.fixture(scope="module")
def compiled():
    """All shapes compiled side by side: compiling is most of the time."""

    def build(spec):
        programs = []
        inputs = make_inputs(spec)
        for columns, given in ((None, inputs), (spec.columns, inputs.stacked(spec))):
            call = functools.partial(
                attention_inputs, **spec.settings, columns=columns, implementation="pallas"
            )
            programs.append(jax.jit(call).lower(*given.arguments(spec.dtype)).compile())
        return programs

    cases = (*SMALL, *REAL)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return dict(zip([spec.name for spec in cases], pool.map(build, cases), strict=True))


def error(actual, expected: np.ndarray) -> float:
    """Norm of the difference over that of the expected values, of the worst head of a row."""
    difference = np.linalg.norm(np.asarray(actual, np.float64) - expected, axis=-1)
    return float((difference / np.maximum(np.linalg.norm(expected, axis=-1), 1e-30)).max())


@specs((*SMALL, *REAL))
@pytest.mark.parametrize("wide", [False, True])
def test_values(compiled, spec, wide):
    inputs = make_inputs(spec)
    given = inputs.stacked(spec) if wide else inputs
    result = compiled[spec.name][wide](*given.arguments(spec.dtype))
    exact = solve(inputs, spec)
    for name, actual in result._asdict().items():
        assert error(actual, exact[name]) < TOLERANCE[spec.dtype], name
    np.testing.assert_array_equal(result.v, exact["v"])


@specs(REAL[4:8])
def test_same_bits_twice(compiled, spec):
    arguments = make_inputs(spec).arguments(spec.dtype)
    first, second = (compiled[spec.name][0](*arguments) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_auto_takes_the_kernel():
    call = jax.jit(lambda *x: attention_inputs(*x, **SMALL[0].settings))
    assert "triton" in call.lower(*make_inputs(SMALL[0]).arguments("float32")).as_text()
