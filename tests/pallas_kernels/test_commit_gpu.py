"""The compiled commit kernels on the cases of `specs.py`, at the sizes of the checkpoints."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.commit import commit_kv, commit_linear, pallas
from pallas_kernels.commit.specs import (
    REAL,
    REAL_KV,
    SMALL,
    SMALL_KV,
    Spec,
    make_inputs,
    make_kv,
    same,
    solve,
    solve_kv,
)
from pallas_kernels.gdn_tree import gdn_tree_verify

pytestmark = pytest.mark.gpu

TOLERANCE = 5e-7
CUTS = {
    "launches": pallas.Config(layers=8),
    "tall": pallas.Config(layers=6, block_k=128, block_v=32),
}


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


def donating(function):
    return jax.jit(functools.partial(function, implementation="pallas"), donate_argnums=(0, 1))


linear = donating(commit_linear)
kv = jax.jit(functools.partial(commit_kv, implementation="pallas"), donate_argnums=0)


@pytest.fixture(scope="module")
def compiled():
    """All shapes compiled side by side: compiling is most of the time."""
    jobs = []
    for spec in (*SMALL, *REAL):
        inputs = make_inputs(spec)
        jobs.append((linear, inputs.arguments(spec.dtype), inputs.scales(), spec.name))
    jobs += [(kv, make_kv(spec), {}, f"kv_{spec.name}") for spec in (*SMALL_KV, *REAL_KV)]
    arguments = make_inputs(REAL[2]).arguments(REAL[2].dtype)
    jobs += [
        (jax.jit(functools.partial(pallas.advance, config=config)), arguments, {}, name)
        for name, config in CUTS.items()
    ]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        programs = pool.map(lambda job: job[0].lower(*job[1], **job[2]).compile(), jobs)
        return dict(zip([name for *_, name in jobs], programs, strict=True))


def error(actual, expected: np.ndarray) -> float:
    """Norm of the difference over that of the expected values."""
    difference = np.asarray(actual, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def check(result, inputs) -> None:
    states, histories = solve(inputs)
    for state, exact in zip(result[0], states, strict=True):
        assert error(state, exact) < TOLERANCE
    for history, exact in zip(result[1], histories, strict=True):
        assert same(history, exact)


@specs((*SMALL, *REAL))
def test_linear(compiled, spec):
    inputs = make_inputs(spec)
    poisoned = inputs.poisoned()
    check(compiled[spec.name](*poisoned.arguments(spec.dtype), **poisoned.scales()), inputs)


@pytest.mark.parametrize("cut", CUTS)
def test_linear_configurations(compiled, cut):
    inputs = make_inputs(REAL[2])
    check(compiled[cut](*inputs.poisoned().arguments(REAL[2].dtype)), inputs)


@specs((*SMALL_KV, *REAL_KV))
def test_kv(compiled, spec):
    arguments = make_kv(spec)
    exact = solve_kv(*arguments)  # first: the caches are given away
    for cache, expected in zip(compiled[f"kv_{spec.name}"](*arguments), exact, strict=True):
        assert same(cache, expected)


def test_same_bits_twice(compiled):
    inputs = make_inputs(REAL[0])
    first, *others = [compiled[REAL[0].name](*inputs.arguments("float32")) for _ in range(5)]
    for other in others:
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)


def test_works_in_place(compiled):
    states, histories, *_ = make_inputs(REAL[0]).arguments("float32")
    caches = make_kv(REAL_KV[0])[0]
    updated = {REAL[0].name: (*states, *histories), f"kv_{REAL_KV[0].name}": caches}
    for name, arrays in updated.items():
        memory = compiled[name].memory_analysis()
        assert memory.alias_size_in_bytes >= sum(x.nbytes for x in arrays), name
        assert memory.temp_size_in_bytes < 1 << 16, name


def test_auto_takes_the_kernel():
    arguments = make_inputs(SMALL[0]).arguments("float32")
    assert "triton" in jax.jit(lambda *x: commit_linear(*x)).lower(*arguments).as_text()
    arguments = make_kv(SMALL_KV[0])
    assert "triton" in jax.jit(lambda *x: commit_kv(*x)).lower(*arguments).as_text()


def test_committing_drifts_no_more_than_stepping():
    """200 rounds of verify and commit against the plain float32 recurrence over the same tokens."""
    spec = Spec(name="", nodes=16, count=16, layers=1, channels=256, key_dim=128, value_dim=128)
    rng = np.random.default_rng(0)
    parents, path = np.arange(-1, 15, dtype=np.int32), np.arange(16, dtype=np.int32)
    verify = jax.jit(lambda *x: gdn_tree_verify(*x, parents))

    @jax.jit
    def step(state, history, k, u, log_decay, count):
        layer = ((state,), (history,), (k,), (u,), (log_decay,), (jnp.zeros((16, 256)),))
        return commit_linear(*layer, path, count, implementation="pallas")

    state = jnp.zeros((spec.value_heads, 128, 128))
    walked = exact = np.zeros(state.shape, np.float32)
    for _ in range(200):
        count = int(rng.integers(1, 17))
        k = rng.standard_normal((16, 1, 128))
        k = np.float32(k / np.linalg.norm(k, axis=-1, keepdims=True))
        v = rng.standard_normal((16, spec.value_heads, 128)).astype(np.float32)
        g = np.float32(-rng.exponential(0.1, (16, spec.value_heads)))
        beta = rng.uniform(0, 1, (16, spec.value_heads)).astype(np.float32)
        result = verify(k, k, v, g, beta, state)
        (state,), _ = step(state, jnp.zeros((3, 256)), k, result.u, result.log_decay, count)
        for i in range(count):
            token = (k[i, 0], v[i], g[i], beta[i])
            walked = _advance(walked, *token)
            exact = _advance(np.float64(exact), *map(np.float64, token))
    drift = error(walked, exact)
    print(f"after 200 rounds: committed {error(state, exact):.1e}, stepped {drift:.1e}")
    assert error(state, exact) <= max(drift, 2e-7)


def _advance(state, k, v, g, beta):
    state = np.exp(g)[:, None, None] * state
    u = beta[:, None] * (v - np.einsum("k,hkv->hv", k, state))
    return state + k[None, :, None] * u[:, None, :]


def test_layers_beyond_one_launch_are_each_their_own(compiled):
    """A mapping of layers to arguments that is off by one would pass with layers alike."""
    spec = REAL[1]
    inputs = make_inputs(spec)
    rolled = dataclasses.replace(
        inputs,
        **{
            name: getattr(inputs, name)[1:] + getattr(inputs, name)[:1]
            for name in ("states", "histories", "keys", "us", "log_decays", "inputs")
        },
    )
    one, other = (compiled[spec.name](*x.arguments(spec.dtype)) for x in (inputs, rolled))
    for x, y in zip(one, other, strict=True):
        for i in range(spec.layers):
            np.testing.assert_array_equal(x[i], y[i - 1])
