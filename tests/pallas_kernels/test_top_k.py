"""Every implementation of top_k against a stable sort, ties and hostile rows included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower_for_hopper
from jax import lax

from pallas_kernels import choice
from pallas_kernels.top_k import pallas, reference, top_k, xla
from pallas_kernels.top_k.specs import KINDS, SMALL, Spec, make_inputs, mistakes, solve

# Several chunks of the small rows, and programs that share them.
CONFIG = pallas.Config(chunk=256, shares=2, block=16, wide=32)
# Interpreted kernels are large programs: compile time is what these tests cost.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@functools.cache
def compiled(implementation: str, k: int, config: pallas.Config = CONFIG):
    """The implementation for the CPU, the kernel interpreted."""

    def call(x, limit):
        if implementation == "pallas":
            return pallas.top_k(x, k, limit, config=config, interpret=True)
        return {"xla": xla, "reference": reference}[implementation].top_k(x, k, limit)

    return jax.jit(call, compiler_options=FAST_COMPILE)


def wrong(spec: Spec, implementation: str, config: pallas.Config = CONFIG) -> float:
    x = make_inputs(spec)
    limit = spec.columns if spec.limit is None else spec.limit
    result = compiled(implementation, spec.k, config)(jnp.asarray(x), jnp.int32(limit))
    return mistakes(result, solve(x, spec.k, spec.limit))


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
def test_equals_a_stable_sort(implementation, spec):
    assert wrong(spec, implementation) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_lists_made_once_for_all_programs_of_a_row(kind):
    config = dataclasses.replace(CONFIG, launches=2)
    spec = Spec(rows=2, columns=1300, k=40, kind=kind, limit=1111)
    assert wrong(spec, "pallas", config) == 0


def test_the_exact_result_is_that_of_lax():
    for spec in SMALL:
        x = make_inputs(dataclasses.replace(spec, limit=None))
        assert mistakes(lax.top_k(jnp.asarray(x), spec.k), solve(x, spec.k)) == 0, spec.name


def test_public_function_interprets_the_kernel_on_a_cpu(monkeypatch):
    monkeypatch.setattr(pallas, "default_config", lambda rows, columns: CONFIG)
    x = jnp.asarray(make_inputs(Spec(rows=1, columns=9, k=1)))
    result = top_k(x, 1, implementation="pallas")
    assert mistakes(result, solve(np.asarray(x), 1)) == 0


def test_limit_may_be_traced_and_changes_without_compiling():
    x = make_inputs(Spec(rows=3, columns=300, k=20, kind="few"))
    call = jax.jit(lambda x, limit: top_k(x, 20, limit=limit, implementation="xla"))
    for limit in (0, 1, 19, 20, 299, 300):
        assert mistakes(call(x, limit), solve(x, 20, limit)) == 0
    assert call._cache_size() == 1


def test_auto_takes_xla_on_a_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(pallas, "top_k", None)
    values, ids = jax.eval_shape(lambda x: top_k(x, 5), jnp.zeros((2, 9), jnp.bfloat16))
    assert (values.shape, values.dtype) == ((2, 5), jnp.bfloat16)
    assert (ids.shape, ids.dtype) == ((2, 5), jnp.int32)


def test_unsupported_platform_falls_back_once_or_refuses(monkeypatch):
    x = jnp.arange(12.0).reshape(2, 6)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    choice._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="top_k falls back to XLA.*platform 'tpu'"):
        values, ids = top_k(x, 2)
    np.testing.assert_array_equal(values, [[5, 4], [11, 10]])
    np.testing.assert_array_equal(ids, [[5, 4], [5, 4]])
    top_k(x, 2)  # says it once
    with pytest.raises(NotImplementedError, match="platform 'tpu'"):
        top_k(x, 2, implementation="pallas")


@pytest.mark.parametrize(
    ("rows", "columns", "k", "message"),
    [
        (1, 2000, 1025, "at most 1024 entries are supported, got 1025"),
        (1, 2**19 + 1, 5, "at most 524288 columns are supported, got 524289"),
        (65536, 8, 5, "at most 65535 rows are supported, got 65536"),
    ],
)
def test_sizes_beyond_the_kernel(rows, columns, k, message):
    x = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda x: top_k(x, k, implementation="pallas"), x)
    assert jax.eval_shape(lambda x: top_k(x, k), x)[0].shape == (rows, k)


@pytest.mark.parametrize(
    ("x", "k", "options", "error", "message"),
    [
        ([1.0], 1, {}, TypeError, "x must be an array, got list"),
        (np.zeros((2, 3), np.float16), 1, {}, TypeError, "x must be float32 or bfloat16"),
        (np.zeros(3, np.float32), 1, {}, ValueError, r"x must have two axes.*got \(3,\)"),
        (np.zeros((0, 3), np.float32), 1, {}, ValueError, "none empty"),
        (np.zeros((2, 3), np.float32), 1.5, {}, TypeError, "k must be an integer, got float"),
        (np.zeros((2, 3), np.float32), 0, {}, ValueError, r"k must lie in 1\.\.3.*got 0"),
        (np.zeros((2, 3), np.float32), 4, {}, ValueError, r"k must lie in 1\.\.3.*got 4"),
        (np.zeros((2, 3), np.float32), 1, {"limit": 4}, ValueError, r"limit must lie in 0\.\.3"),
        (np.zeros((2, 3), np.float32), 1, {"limit": -1}, ValueError, "got -1"),
        (np.zeros((2, 3), np.float32), 1, {"limit": 2.0}, TypeError, "limit must be an int32"),
        (
            np.zeros((2, 3), np.float32),
            1,
            {"limit": np.zeros(2, np.int32)},
            ValueError,
            r"limit must be an int32 scalar, got shape \(2,\)",
        ),
        (
            np.zeros((2, 3), np.float32),
            1,
            {"implementation": "triton"},
            ValueError,
            "implementation must be one of auto, pallas",
        ),
    ],
)
def test_refuses_bad_arguments(x, k, options, error, message):
    with pytest.raises(error, match=message):
        top_k(x, k, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 12}, "group must be 8, 16 or 32, got 12"),
        ({"chunk": 384}, "chunk must be a power of two >= 256, got 384"),
        ({"wide": 16}, "wide must be a multiple of block, got 16 and 64"),
        ({"launches": 3}, "launches must be 1 or 2, got 3"),
    ],
)
def test_refuses_bad_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        pallas.Config(**change)


@pytest.mark.parametrize(
    ("rows", "columns", "k", "dtype", "launches"),
    [
        (15, 248320, 512, jnp.float32, 1),
        (15, 248320, 512, jnp.bfloat16, 2),
        (3, 151937, 1024, jnp.float32, 1),
        (300, 77, 1, jnp.bfloat16, 1),
    ],
)
def test_lowers_for_hopper(rows, columns, k, dtype, launches):
    config = dataclasses.replace(pallas.default_config(rows, columns), launches=launches)

    def call(x, limit):
        return pallas.top_k(x, k, limit, config=config)

    x, limit = jax.ShapeDtypeStruct((rows, columns), dtype), jax.ShapeDtypeStruct((), jnp.int32)
    assert lower_for_hopper(call, x, limit).count("xla.gpu.triton") == 1 + launches
