"""The compiled kernel on the cases of `specs.py`, at the sizes of the checkpoints."""

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.top_k import pallas, top_k
from pallas_kernels.top_k.specs import KINDS, REAL, SMALL, Spec, make_inputs, mistakes, solve

pytestmark = pytest.mark.gpu

SPECS = (*SMALL, *REAL)
# Other cuts than the default, each over several kinds of rows.
CONFIGS = {
    "two_launches": pallas.Config(launches=2),
    "wide_groups": pallas.Config(group=32, chunk=8192, read_warps=8),
    "few_warps": pallas.Config(num_warps=8, shares=4, block=32),
}
HOSTILE = ("normal", "few", "equal", "ascending", "nan")


def key(spec: Spec):
    return spec.rows, spec.columns, spec.k, spec.dtype


def call(spec: Spec, config: pallas.Config | None = None):
    if config is None:
        return lambda x, limit: top_k(x, spec.k, limit=limit, implementation="pallas")
    return lambda x, limit: pallas.top_k(x, spec.k, limit, config=config)


def compile_for(spec: Spec, config: pallas.Config | None = None):
    x = jax.ShapeDtypeStruct((spec.rows, spec.columns), spec.dtype)
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.jit(call(spec, config)).lower(x, limit).compile()


@pytest.fixture(scope="module")
def compiled():
    """Programs for the shapes of all cases, compiled side by side."""
    shapes = {(key(spec), None): spec for spec in SPECS}
    for name in CONFIGS:
        shapes[(key(REAL[0]), name)] = REAL[0]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        jobs = {
            (shape, name): pool.submit(compile_for, spec, CONFIGS.get(name))
            for (shape, name), spec in shapes.items()
        }
        return {name: job.result() for name, job in jobs.items()}


def run(compiled, spec: Spec, x: np.ndarray, config: str | None = None):
    limit = spec.columns if spec.limit is None else spec.limit
    return compiled[key(spec), config](jnp.asarray(x), jnp.int32(limit))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_equals_a_stable_sort(compiled, spec):
    x = make_inputs(spec)
    assert mistakes(run(compiled, spec, x), solve(x, spec.k, spec.limit)) == 0


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("config", CONFIGS)
def test_other_configurations(compiled, config, kind):
    spec = dataclasses.replace(REAL[0], kind=kind, limit=248077)
    x = make_inputs(spec)
    assert mistakes(run(compiled, spec, x, config), solve(x, spec.k, spec.limit)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_twice(compiled, kind):
    spec = dataclasses.replace(REAL[0], kind=kind)
    x = jnp.asarray(make_inputs(spec))
    first = [np.asarray(y) for y in run(compiled, spec, x)]
    for _ in range(20):
        for y, z in zip(first, run(compiled, spec, x), strict=True):
            np.testing.assert_array_equal(y.view(np.int32), np.asarray(z).view(np.int32))


def test_auto_takes_the_kernel():
    x = jax.ShapeDtypeStruct((15, 248320), jnp.float32)
    assert "xla.gpu.triton" in jax.jit(lambda x: top_k(x, 512)).lower(x).as_text()
