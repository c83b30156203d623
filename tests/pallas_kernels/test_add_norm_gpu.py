"""The compiled addition and norm on the cases of `specs.py`."""

import concurrent.futures
import functools

import jax
import numpy as np
import pytest

from pallas_kernels.add_norm import add_norm, pallas
from pallas_kernels.add_norm.specs import REAL, SMALL, make_inputs, solve

pytestmark = pytest.mark.gpu

EPS = 1e-6
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}
CUTS = {
    "small_block": pallas.Config(block=1024),
    "large_block": pallas.Config(block=8192, num_warps=16),
}


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@pytest.fixture(scope="module")
def compiled():
    """All shapes compiled side by side: compiling is most of the time."""

    def build(job):
        spec, add = job
        call = functools.partial(add, eps=EPS, zero_centred=spec.zero_centred)
        return jax.jit(call).lower(*make_inputs(spec)).compile()

    kernel = functools.partial(add_norm, implementation="pallas")
    jobs = {spec.name: (spec, kernel) for spec in (*SMALL, *REAL)}
    for name, config in CUTS.items():
        jobs[name] = (REAL[5], functools.partial(pallas.add, config=config))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return dict(zip(jobs, pool.map(build, jobs.values()), strict=True))


def error(actual, expected: np.ndarray) -> float:
    """Norm of the difference over that of the expected values."""
    difference = np.asarray(actual, np.float64) - expected
    return float(np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30))


def check(program, spec) -> None:
    arguments = make_inputs(spec)
    total, norm = program(*arguments)
    exact_total, exact_norm = solve(arguments, EPS, spec.zero_centred)
    np.testing.assert_array_equal(np.asarray(total), exact_total)
    assert error(norm, exact_norm) < TOLERANCE[spec.dtype]


@specs((*SMALL, *REAL))
def test_values(compiled, spec):
    check(compiled[spec.name], spec)


@pytest.mark.parametrize("cut", CUTS)
def test_other_cuts(compiled, cut):
    check(compiled[cut], REAL[5])


def test_rows_do_not_mix(compiled):
    """NaN and zeros in one row stay in that row."""
    x, delta, weight = make_inputs(REAL[5])
    run = compiled[REAL[5].name]
    clean = run(x, delta, weight)
    changed = run(x.at[1].set(np.nan).at[2].set(-delta[2]), delta, weight)
    for before, after in zip(clean, changed, strict=True):
        np.testing.assert_array_equal(np.asarray(after[3:]), np.asarray(before[3:]))
        assert np.isnan(np.asarray(after[1], np.float32)).all()
        assert not np.asarray(after[2], np.float32).any()


@specs(REAL[4:6])
def test_same_bits_twice(compiled, spec):
    first, second = (compiled[spec.name](*make_inputs(spec)) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_auto_takes_the_kernel():
    add = jax.jit(lambda *x: add_norm(*x, EPS))
    assert "triton" in add.lower(*make_inputs(SMALL[1])).as_text()
