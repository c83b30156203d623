"""The compiled kernels on the cases of `specs.py`, at the sizes of the published Weaver too."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.weaver_step import pallas, weaver_grow
from pallas_kernels.weaver_step.launch import Config
from pallas_kernels.weaver_step.specs import LARGE, REAL, SMALL, Spec, make_inputs, path_error
from pallas_kernels.weaver_step.state import plant

pytestmark = pytest.mark.gpu

CASES = [
    *((spec, jnp.float32) for spec in (*SMALL, *LARGE, *REAL)),
    *((spec, jnp.bfloat16) for spec in (SMALL[0], *REAL)),
]


@functools.cache
def inputs_of(spec: Spec, dtype) -> tuple:
    return make_inputs(spec, dtype=dtype)


@pytest.fixture(scope="module")
def compiled():
    """Whole growths, compiled side by side: compiling is most of the time."""

    def compile_one(case):
        spec, dtype = case
        call = functools.partial(weaver_grow, **spec.options, implementation="pallas")
        return jax.jit(call).lower(*inputs_of(spec, dtype)).compile()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return dict(zip(CASES, pool.map(compile_one, CASES), strict=True))


def run(compiled, spec: Spec, dtype):
    return jax.tree.map(np.asarray, compiled[spec, dtype](*inputs_of(spec, dtype)))


@pytest.mark.parametrize("spec", [*SMALL, *LARGE, *REAL], ids=lambda spec: spec.name)
def test_float32_growth_is_best_first(compiled, spec):
    inputs = inputs_of(spec, jnp.float32)
    expected = weaver_grow(*inputs, **spec.options, implementation="reference")
    tree = run(compiled, spec, jnp.float32)
    for name in ("token", "parent", "depth", "rank", "valid"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name), name)
    for name in ("score", "logprob"):
        np.testing.assert_allclose(getattr(tree, name), getattr(expected, name), 1e-5, 1e-5)


@pytest.mark.parametrize("spec", [SMALL[0], *REAL], ids=lambda spec: spec.name)
def test_bfloat16_growth_is_accurate_along_its_paths(compiled, spec):
    tree = run(compiled, spec, jnp.bfloat16)
    assert tree.valid.all()
    assert path_error(inputs_of(spec, jnp.bfloat16), tree, spec.activation) < 0.05


@pytest.mark.parametrize("case", [CASES[1], *CASES[-3:]], ids=lambda case: case[0].name)
def test_same_bits_twice(compiled, case):
    first = run(compiled, *case)
    for _ in range(5):
        for x, y in zip(first, run(compiled, *case), strict=True):
            np.testing.assert_array_equal(x, y)


def test_memory_that_nobody_wrote_is_not_read():
    spec = REAL[0]
    _, pools, weights, key, value = inputs_of(spec, jnp.bfloat16)
    start = 9
    unwritten = jnp.arange(key[0].shape[1])[:, None] >= spec.depths + 1 + start
    how = {"config": Config(), "interpret": False}

    @jax.jit
    def one_round(key, value):
        growth = plant(jnp.int32(1), spec.rows, spec.children, key, value)
        growth = growth._replace(
            offered_score=growth.offered_score.at[0].set(-jnp.arange(spec.children) / 8.0)
        )
        growth, nodes = pallas.take(
            growth, weights, jnp.int32(start), width=spec.expand, depths=spec.depths, **how
        )
        growth = pallas.expand(
            growth, nodes, weights, pools, jnp.int32(start), activation=spec.activation, **how
        )
        return growth.offered_score, growth.offered_rank

    poisoned = (tuple(jnp.where(unwritten, jnp.nan, x) for x in memory) for memory in (key, value))
    for x, y in zip(one_round(key, value), one_round(*poisoned), strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.isfinite(one_round(key, value)[0][start : start + spec.expand]).all()


@pytest.mark.parametrize("change", [{"project_warps": 4}, {"project_columns": 64}])
def test_other_configurations(change):
    """Fewer warps, and a longer loop over shorter pieces, make the same offers."""
    spec = REAL[0]
    _, pools, weights, key, value = inputs_of(spec, jnp.float32)
    results = []
    for config in (Config(), dataclasses.replace(Config(), **change)):

        @jax.jit
        def expand_root(key, value, config=config):
            growth = plant(jnp.int32(1), spec.rows, spec.children, key, value)
            growth = growth._replace(offered_score=growth.offered_score.at[0, :4].set(-1.0))
            how = {"config": config, "interpret": False}
            growth, nodes = pallas.take(
                growth, weights, jnp.int32(1), width=spec.expand, depths=spec.depths, **how
            )
            return pallas.expand(
                growth, nodes, weights, pools, jnp.int32(1), activation=spec.activation, **how
            ).offered_logprob

        results.append(expand_root(key, value)[1:5])
    np.testing.assert_allclose(*results, 1e-5, 1e-5)


def test_auto_takes_the_kernels():
    spec = SMALL[0]
    call = functools.partial(weaver_grow, **spec.options)
    text = jax.jit(call).lower(*inputs_of(spec, jnp.float32)).as_text()
    assert "xla.gpu.triton" in text
