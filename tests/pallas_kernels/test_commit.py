"""Commit of all layers along an accepted path, against float64."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower_for_hopper

from pallas_kernels import choice
from pallas_kernels.commit import commit_kv, commit_linear, pallas, pallas_kv
from pallas_kernels.commit.specs import (
    REAL,
    REAL_KV,
    SMALL,
    SMALL_KV,
    KVSpec,
    Spec,
    make_inputs,
    make_kv,
    same,
    solve,
    solve_kv,
)
from pallas_kernels.gdn_tree import gdn_tree_verify

IMPLEMENTATIONS = ("reference", "xla", "pallas")
TOLERANCE = 5e-7
# Interpreted kernels are large programs: compile time is what these tests cost.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@functools.cache
def compiled(function, implementation: str):
    """The implementation for the CPU, the kernel interpreted."""
    if implementation != "pallas":  # interpreted on any machine
        function = functools.partial(function, implementation=implementation)
    elif function is commit_linear:
        function = functools.partial(pallas.advance, interpret=True)
    else:
        function = functools.partial(pallas_kv.compact, interpret=True)
    return jax.jit(function, compiler_options=FAST_COMPILE)


def error(actual, expected: np.ndarray) -> float:
    """Norm of the difference over that of the expected values."""
    difference = np.asarray(actual, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def check(result, inputs) -> None:
    states, histories = solve(inputs)
    for state, exact in zip(result[0], states, strict=True):
        assert state.dtype == np.float32
        assert error(state, exact) < TOLERANCE
    for history, exact in zip(result[1], histories, strict=True):
        assert same(history, exact)


@specs(SMALL)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_linear(implementation, spec):
    inputs = make_inputs(spec)
    poisoned = inputs.poisoned()
    call = compiled(commit_linear, implementation)
    result = call(*poisoned.arguments(spec.dtype), **poisoned.scales())
    check(result, inputs)
    assert all(history.dtype == spec.dtype for history in result[1])


def test_reference():
    inputs, arguments = make_inputs(SMALL[6]), make_kv(SMALL_KV[3])
    poisoned = inputs.poisoned()
    call = compiled(commit_linear, "reference")
    check(call(*poisoned.arguments("float32"), **poisoned.scales()), inputs)
    result = compiled(commit_kv, "reference")(*arguments)
    assert all(same(x, y) for x, y in zip(result, solve_kv(*arguments), strict=True))


def test_linear_in_blocks():
    """Several blocks each way and launches of two sizes."""
    spec = Spec(name="", nodes=19, count=6, layers=3, key_dim=72, value_dim=40, channels=300)
    inputs = make_inputs(spec)
    config = pallas.Config(layers=2, block_k=64, block_v=16, num_warps=1)
    advance = functools.partial(pallas.advance, config=config, interpret=True)
    run = jax.jit(advance, compiler_options=FAST_COMPILE)
    check(run(*inputs.poisoned().arguments(spec.dtype)), inputs)


def test_every_count_keeps_the_newest_inputs():
    spec = Spec(name="", nodes=6, count=6, path=6, layers=1, value_heads=1)
    inputs = make_inputs(spec)
    for count in range(1, 7):
        inputs = dataclasses.replace(inputs, count=count)
        check(compiled(commit_linear, "pallas")(*inputs.poisoned().arguments("float32")), inputs)


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers", 0), ("block_v", 8), ("block_k", 48), ("num_warps", 16)],
)
def test_configuration_refuses_sizes(name, value):
    with pytest.raises(ValueError, match=f"{name} .*got"):
        pallas.Config(**{name: value})


@specs(SMALL_KV)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_kv(implementation, spec):
    arguments = make_kv(spec)
    result = compiled(commit_kv, implementation)(*arguments)
    for cache, exact in zip(result, solve_kv(*arguments), strict=True):
        assert cache.dtype == spec.dtype
        assert same(cache, exact)


def test_kv_in_groups():
    arguments = make_kv(KVSpec(name="", nodes=6, count=4, length=2, path=6, caches=3))
    result = pallas_kv.compact(*arguments, group=2, interpret=True)
    for cache, exact in zip(result, solve_kv(*arguments), strict=True):
        assert same(cache, exact)


def test_kv_rows_take_the_type_of_the_cache():
    caches, rows, *rest = make_kv(KVSpec(name="", nodes=6, count=4, length=2, path=6))
    caches = [x.astype(jnp.bfloat16) for x in caches]
    exact = solve_kv(caches, [x.astype(jnp.bfloat16) for x in rows], *rest)
    for implementation in IMPLEMENTATIONS:
        result = compiled(commit_kv, implementation)(tuple(caches), rows, *rest)
        assert all(same(x, y) for x, y in zip(result, exact, strict=True)), implementation


def test_committing_drifts_no_more_than_stepping():
    """200 rounds of verify and commit against the plain float32 recurrence over the same tokens."""
    nodes, size = 8, 32
    verify = jax.jit(functools.partial(gdn_tree_verify, implementation="xla"))
    commit = compiled(commit_linear, "pallas")
    parents, path = np.arange(-1, nodes - 1, dtype=np.int32), np.arange(nodes, dtype=np.int32)
    rng = np.random.default_rng(0)
    history = (jnp.zeros((3, 16)),)
    state = walked = exact = np.zeros((1, size, size), np.float32)
    for _ in range(200):
        count = int(rng.integers(1, nodes + 1))
        k, v = (rng.standard_normal((nodes, 1, size)) for _ in range(2))
        k = np.float32(k / np.linalg.norm(k, axis=-1, keepdims=True))
        v, g = np.float32(v), np.float32(-rng.exponential(0.1, (nodes, 1)))
        beta = rng.uniform(0, 1, (nodes, 1)).astype(np.float32)
        result = verify(k, k, v, g, beta, jnp.asarray(state), parents)
        inputs = (jnp.zeros((nodes, 16)),)
        (state,), _ = commit(
            (jnp.asarray(state),),
            history,
            (jnp.asarray(k),),
            (result.u,),
            (result.log_decay,),
            inputs,
            jnp.asarray(path),
            jnp.int32(count),
        )
        for i in range(count):
            token = (k[i, 0], v[i, 0], g[i, 0], beta[i, 0])
            walked = _advance(walked, *token)
            exact = _advance(np.float64(exact), *map(np.float64, token))
    assert error(state, exact) <= max(error(walked, exact), 2e-7)


def _advance(state, k, v, g, beta):
    state = np.exp(g) * state
    return state + np.multiply.outer(k, beta * (v - k @ state[0]))


@specs((SMALL[3], REAL[1], REAL[2], REAL[9]))
def test_linear_lowers_for_hopper(spec):
    spec = dataclasses.replace(spec, layers=min(spec.layers, 3), channels=spec.channels // 8)
    inputs = make_inputs(spec)
    call = functools.partial(pallas.advance, **inputs.scales())
    assert "triton" in lower_for_hopper(call, *inputs.arguments(spec.dtype))


@specs((SMALL_KV[1], dataclasses.replace(REAL_KV[1], caches=3)))
def test_kv_lowers_for_hopper(spec):
    assert "triton" in lower_for_hopper(pallas_kv.compact, *make_kv(spec))


def test_auto_takes_xla_on_a_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(pallas, "advance", None)
    states, _ = jax.eval_shape(commit_linear, *make_inputs(SMALL[0]).arguments("float32"))
    assert states[0].shape == (1, 16, 16)


def test_unsupported_platform_falls_back_once_or_refuses(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    choice._warn_once.cache_clear()
    linear = (commit_linear, make_inputs(SMALL[0]).arguments("float32"))
    for function, arguments in (linear, (commit_kv, make_kv(SMALL_KV[0]))):
        # A new function each time: a traced one would not be asked again.
        name = function.__name__
        with pytest.warns(UserWarning, match=f"{name} falls back to XLA.*platform 'tpu'"):
            jax.eval_shape(lambda *x, f=function: f(*x), *arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.eval_shape(lambda *x, f=function: f(*x), *arguments)
        with pytest.raises(NotImplementedError, match=f"{name} .*platform 'tpu'"):
            function(*arguments, implementation="pallas")


LINEAR = ("states", "histories", "keys", "us", "log_decays", "inputs", "path", "count")
BASE = Spec(name="", nodes=4, count=2, path=4, layers=2, key_heads=2, value_heads=4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"states": ()}, ValueError, "states must hold an array for each of 0 layers"),
        ({"keys": (np.zeros((4, 2, 16), np.float32),)}, ValueError, "keys must hold .* got 1"),
        ({"us": (1.0, 2.0)}, TypeError, "us must hold arrays, got float"),
        ({"us": (np.zeros((4, 4, 16), np.float16),) * 2}, TypeError, "us must be float32, got"),
        ({"inputs": (np.zeros(4, np.float32),) * 2}, ValueError, "inputs must have 2 axes"),
        ({"us": (np.zeros((4, 3, 16), np.float32),) * 2}, ValueError, "3 value heads cannot share"),
        ({"states": (np.zeros((4, 16, 8), np.float32),) * 2}, ValueError, r"states must be \(4, 1"),
        (
            {"keys": (np.zeros((4, 2, 16), np.float32), np.zeros((4, 2, 8), np.float32))},
            ValueError,
            "keys must be alike in all layers",
        ),
        (
            {"inputs": (np.zeros((4, 63), np.float32),) * 2},
            ValueError,
            r"inputs must be \[4, >= 64",
        ),
        (
            {"inputs": (np.zeros((3, 64), np.float32),) * 2},
            ValueError,
            r"inputs must be \[4, >= 64",
        ),
        ({"key_scales": (np.zeros((4, 2), np.float32),)}, ValueError, "key_scales must hold an"),
        ({"key_scales": (np.zeros((4, 4), np.float32),) * 2}, ValueError, r"scales must be \(4, 2"),
        ({"key_scales": (jnp.ones((4, 2), "bfloat16"),) * 2}, TypeError, "scales must be float32"),
        ({"path": np.zeros(4, np.float32)}, ValueError, "path must be integers"),
        ({"path": np.asarray([0, 4], np.int32)}, ValueError, r"path must hold rows 0\.\.3"),
        ({"path": np.asarray([0, 2**32])}, ValueError, r"path must hold rows 0\.\.3"),
        ({"count": 0}, ValueError, r"count must lie in 1\.\.4, got 0"),
        ({"count": 1.5}, ValueError, "count must be an integer scalar"),
        ({"implementation": "triton"}, ValueError, "implementation must be one of auto, pallas"),
    ],
)
def test_linear_refuses_bad_arguments(change, error, message):
    good = dict(zip(LINEAR, make_inputs(BASE).arguments("float32"), strict=True))
    with pytest.raises(error, match=message):
        commit_linear(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"caches": ()}, ValueError, "caches must hold an array"),
        (
            {"rows": (np.zeros((2, 7, 8), np.float32),) * 2},
            ValueError,
            r"rows must be \(2, 7, 16\)",
        ),
        ({"rows": (np.zeros((2, 7, 16), np.int32),) * 2}, TypeError, "rows must be float32 or b"),
        ({"length": 41}, ValueError, r"length must lie in 0\.\.40, got 41"),
        (
            {"length": np.int64(2**32 + 3)},
            ValueError,
            r"length must lie in 0\.\.40, got 4294967299",
        ),
        ({"count": 17}, ValueError, r"count must lie in 1\.\.16, got 17"),
    ],
)
def test_kv_refuses_bad_arguments(change, error, message):
    names = ("caches", "rows", "path", "count", "length")
    spec = KVSpec(name="", nodes=7, count=3, length=5)
    good = dict(zip(names, make_kv(spec), strict=True))
    with pytest.raises(error, match=message):
        commit_kv(**{**good, **change})
