"""The compiled product of a few rows on the cases of `specs.py`."""

import concurrent.futures
import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_kernels.skinny_matmul import pallas, skinny_matmul
from pallas_kernels.skinny_matmul.specs import REAL, SMALL, Spec, joined, make_inputs, solve

pytestmark = pytest.mark.gpu

# The tensor cores of Hopper cut their sums off instead of rounding them: seen were 6.4e-6 after
# 5,803 terms, growing with the number of terms.
ROUNDED, SUMMED = 3e-3, 1e-5
CUTS = {
    "narrow": pallas.Config(block_n=16, block_k=16, splits=3, num_stages=1),
    "wide": pallas.Config(block_n=128, block_k=128, splits=2, num_warps=8, num_stages=3),
    "more_splits_than_steps": pallas.Config(splits=30),
}
CUT = Spec(name="cut", rows=66, inputs=1600, outputs=136, parts=True)
WAVES = pallas.Config(block_n=32, splits=4, wave=3)


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@pytest.fixture(scope="module")
def compiled():
    """All shapes compiled side by side: compiling is most of the time."""

    def build(job):
        spec, call = job
        return jax.jit(call).lower(*make_inputs(spec)).compile()

    jobs = {
        spec.name: (
            spec,
            functools.partial(skinny_matmul, parts=spec.parts, implementation="pallas"),
        )
        for spec in (*SMALL, *REAL)
    }
    for name, config in CUTS.items():
        jobs[name] = (CUT, functools.partial(pallas.multiply, parts=True, config=config))
    jobs["waves"] = (CUT, functools.partial(pallas.multiply, config=WAVES))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return dict(zip(jobs, pool.map(build, jobs.values()), strict=True))


def check(program, spec) -> None:
    arguments = make_inputs(spec)
    expected = solve(arguments)
    difference = np.linalg.norm(joined(program(*arguments)) - expected)
    assert difference / np.linalg.norm(expected) < (SUMMED if spec.parts else ROUNDED)


@specs((*SMALL, *REAL))
def test_values(compiled, spec):
    check(compiled[spec.name], spec)


@pytest.mark.parametrize("cut", CUTS)
def test_other_cuts(compiled, cut):
    check(compiled[cut], CUT)


def test_blocks_left_over_are_shared(compiled):
    check(compiled["waves"], dataclasses.replace(CUT, parts=False))


@specs((SMALL[4], SMALL[9]))
def test_rows_do_not_mix(compiled, spec):
    """NaN in one row, or in one row of the weight, stays there."""
    x, weight = make_inputs(spec)
    run = compiled[spec.name]
    clean = joined(run(x, weight))
    changed = joined(run(x.at[64].set(np.nan), weight))
    np.testing.assert_array_equal(changed[:64], clean[:64])
    assert np.isnan(changed[64]).all()
    changed = joined(run(x, weight.at[7].set(np.nan)))
    np.testing.assert_array_equal(np.delete(changed, 7, 1), np.delete(clean, 7, 1))


@specs((SMALL[4], SMALL[9], REAL[1]))
def test_same_bits_twice(compiled, spec):
    first, second = (compiled[spec.name](*make_inputs(spec)) for _ in range(2))
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def test_auto_takes_the_kernel():
    multiply = jax.jit(skinny_matmul)
    assert "triton" in multiply.lower(*make_inputs(SMALL[4])).as_text()
