"""Every implementation of tree verification against golden files and a float64 recurrence."""

import dataclasses
import functools
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower_for_hopper

from pallas_kernels import choice
from pallas_kernels.gdn_tree import (
    TreeTopology,
    gdn_tree_commit,
    gdn_tree_commit_path,
    gdn_tree_verify,
    pallas,
    per_branch,
    tree_topology,
)
from pallas_kernels.gdn_tree.specs import REAL, SMALL, Inputs, Spec, make_inputs, solve

GOLDEN = sorted((pathlib.Path(__file__).parents[1] / "fixtures" / "gdn_tree").glob("*.npz"))
IMPLEMENTATIONS = ("reference", "xla", "pallas")
TOLERANCE = 2e-6
# Interpreted kernels are large programs: compile time is what these tests cost.
FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later releases have no such option
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
# Rows by number and size of key heads: where `SMALL` has the shape too, one program does for both.
GOLDEN_ROWS = {(2, 16): 130, (1, 32): 64, (1, 12): 17, (1, 128): 16}


def specs(cases: tuple[Spec, ...]):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@functools.cache
def compiled(implementation: str):
    """The implementation for the CPU, the kernel interpreted."""

    def call(*args, **scales):
        *args, parents, valid = args
        if implementation == "pallas":  # interpreted on any machine
            tree = pallas.describe(tree_topology(parents, valid))
            return pallas.verify(*args, tree, **scales, interpret=True)
        return gdn_tree_verify(*args, parents, **scales, valid=valid, implementation=implementation)

    return jax.jit(call, compiler_options=FAST_COMPILE)


def run(implementation: str, inputs: Inputs, dtype=jnp.float32) -> list[np.ndarray]:
    result = compiled(implementation)(*inputs.arguments(dtype), **inputs.scales())
    return [np.asarray(x) for x in result]


def error(actual, expected: np.ndarray) -> float:
    """Largest difference over the largest expected value, or over one if that is larger."""
    scale = max(1.0, np.abs(expected).max())
    return float(np.abs(np.asarray(actual, np.float64) - expected).max() / scale)


def check(result, inputs: Inputs, tolerance: float = TOLERANCE) -> None:
    expected = solve(inputs)
    for actual, name in zip(result, ("out", "u", "log_decay"), strict=True):
        assert error(actual, getattr(expected, name)) < tolerance, name


def golden_inputs(golden) -> Inputs:
    names = [field.name for field in dataclasses.fields(Inputs) if field.name in golden]
    inputs = Inputs(**{name: golden[name] for name in names})
    return inputs.padded(GOLDEN_ROWS[inputs.k.shape[1:]])


@jax.jit
def commit_both(s0, k, u, log_decay, parents, leaf, path, count):
    kept = (s0, k, u, log_decay)
    return gdn_tree_commit(*kept, parents, leaf), gdn_tree_commit_path(*kept, path, count)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_golden(implementation, path):
    golden = np.load(path)
    inputs = golden_inputs(golden)
    result = run(implementation, inputs)
    real = np.flatnonzero(golden["valid"])
    for actual, name in zip(result, ("out", "u", "log_decay"), strict=True):
        assert error(actual[real], golden[name][real]) < TOLERANCE, name
        assert np.all(actual[~inputs.valid] == 0), name
    accepted = np.full(130, 10**6, np.int32)
    count = len(golden["accepted_path"])
    accepted[:count] = golden["accepted_path"]
    kept = (inputs.s0, inputs.k, *result[1:])
    states = commit_both(*kept, inputs.parents, golden["accepted_leaf"], accepted, count)
    for state in states:
        assert error(state, golden["committed_state"]) < TOLERANCE


def test_two_golden_steps_chain():
    first, second = (np.load(path) for path in GOLDEN if "two_step" in path.stem)
    kept = [jnp.asarray(first[name]) for name in ("s0", "k", "u", "log_decay", "parents")]
    state = jax.jit(gdn_tree_commit)(*kept, first["accepted_leaf"])
    inputs = dataclasses.replace(golden_inputs(second), s0=np.asarray(state))
    rows = len(second["valid"])
    for actual, name in zip(run("xla", inputs), ("out", "u"), strict=False):
        assert error(actual[:rows], second[name]) < TOLERANCE, name


@specs(SMALL)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_recurrence(implementation, spec):
    inputs = make_inputs(spec)
    check(run(implementation, inputs.poisoned()), inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs_cost_no_accuracy(implementation):
    spec = Spec(name="", nodes=17, key_heads=1, value_heads=3, key_dim=32, padding=2, raw=True)
    inputs = make_inputs(spec).rounded()
    result = run(implementation, inputs.poisoned(), jnp.bfloat16)
    check(result, inputs)
    assert all(x.dtype == np.float32 for x in result)


def test_unit_vectors_of_bfloat16_would_cost_accuracy():
    """Why raw vectors come with scales."""
    inputs = make_inputs(SMALL[2])
    u = run("xla", inputs.rounded())[1]
    assert error(u, solve(inputs).u) > 1e-4


@pytest.mark.parametrize("size", [0, 8, 24])
def test_kernel_configuration_refuses_sizes(size):
    with pytest.raises(ValueError, match=f"block_v must be a power of two >= 16, got {size}"):
        pallas.Config(block_v=size)


def test_one_launch_refuses_several_row_blocks():
    *args, parents, valid = make_inputs(Spec(name="", nodes=66)).arguments()
    describe = lambda *tree: pallas.describe(tree_topology(*tree))
    tree = jax.eval_shape(describe, parents, valid)
    with pytest.raises(ValueError, match="one launch takes 64 rows at most, got 66"):
        jax.eval_shape(
            functools.partial(pallas.verify, config=pallas.Config(block_v=16)), *args, tree
        )


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (1, (1, 0, 16, 16)),
        (2, (0, 1, 16, 16)),
        (17, (1, 1, 16, 16)),
        (18, (0, 1, 32, 32)),
        (64, (0, 1, 64, 64)),
        (65, (1, 1, 64, 64)),
        (80, (0, 2, 64, 16)),
        (129, (1, 2, 64, 64)),
        (200, (0, 4, 64, 16)),
        (256, (0, 4, 64, 64)),
    ],
)
def test_cut(nodes, expected):
    assert pallas.cut(nodes) == expected


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20])
def test_values_of_any_size(scale):
    inputs = make_inputs(Spec(name="", nodes=15))
    inputs = dataclasses.replace(inputs, v=inputs.v * np.float32(scale), s0=inputs.s0 * scale)
    inputs = dataclasses.replace(inputs, s0=inputs.s0.astype(np.float32))
    result = run("pallas", inputs)
    expected = solve(inputs)
    for actual, exact in zip(result, (expected.out, expected.u), strict=False):
        assert error(actual / scale, exact / scale) < TOLERANCE


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_vmap(implementation):
    spec = Spec(name="", nodes=7, padding=2, raw=True)
    batch = [make_inputs(spec, seed) for seed in range(3)]
    arguments = ((*x.arguments(), *x.scales().values()) for x in batch)
    stacked = [jnp.stack(x) for x in zip(*arguments, strict=True)]

    def call(*args):
        *args, valid, q_scale, k_scale = args
        rest = {"q_scale": q_scale, "k_scale": k_scale, "valid": valid}
        return gdn_tree_verify(*args, **rest, implementation=implementation)

    if implementation == "pallas" and jax.default_backend() != "cpu":
        pytest.skip("interpreted on a CPU only")
    result = jax.jit(jax.vmap(call), compiler_options=FAST_COMPILE)(*stacked)
    for row, inputs in enumerate(batch):
        check([x[row] for x in result], inputs)


def test_shared_topology_changes_nothing():
    *args, parents, valid = make_inputs(Spec(name="", nodes=7, padding=2)).arguments()

    @jax.jit
    def both(args, parents, valid):
        alone = gdn_tree_verify(*args, parents, valid=valid)
        topology = tree_topology(parents, valid)
        return alone, gdn_tree_verify(*args, parents, topology=topology)

    for x, y in zip(*both(args, parents, valid), strict=True):
        np.testing.assert_array_equal(x, y)


def test_topology_of_scattered_padding():
    inputs = make_inputs(Spec(name="", nodes=41, padding=13))
    topology = jax.jit(tree_topology)(inputs.parents, inputs.valid)
    expected = np.zeros((41, 41), bool)
    for i in np.flatnonzero(inputs.valid):
        j = i
        while j >= 0:
            expected[i, j] = True
            j = inputs.parents[j]
    np.testing.assert_array_equal(topology.ancestors, expected)
    np.testing.assert_array_equal(topology.depth, expected.sum(1) - 1)
    np.testing.assert_array_equal(topology.valid, inputs.valid)


def test_xla_gradients_match_the_recurrence():
    spec = Spec(name="", nodes=7, key_dim=5, value_dim=9, decay="mixed", raw=True)
    inputs = make_inputs(spec)
    *args, parents, _ = inputs.arguments()
    args += inputs.scales().values()
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(args[2].shape), jnp.float32)

    def loss(implementation, *args):
        *args, q_scale, k_scale = args
        result = gdn_tree_verify(
            *args, parents, q_scale=q_scale, k_scale=k_scale, implementation=implementation
        )
        return jnp.sum(weights * (result.out + result.u)) + jnp.sum(result.log_decay)

    gradient = jax.jit(
        jax.grad(loss, argnums=range(1, 9)), static_argnums=0, compiler_options=FAST_COMPILE
    )
    for x, y in zip(gradient("xla", *args), gradient("reference", *args), strict=True):
        assert error(x, np.asarray(y)) < 1e-5


def test_commit_ignores_what_is_off_the_path():
    inputs = make_inputs(Spec(name="", nodes=14, padding=3, value_heads=3, raw=True))
    expected = solve(inputs)

    @jax.jit
    def commit(s0, k, u, log_decay, k_scale, parents, node, path, count):
        kept = (s0, k, u, log_decay)
        return (
            gdn_tree_commit(*kept, parents, node, k_scale=k_scale),
            gdn_tree_commit_path(*kept, path, count, k_scale=k_scale),
        )

    for node in np.flatnonzero(inputs.valid):
        path = [node]
        while inputs.parents[path[-1]] >= 0:
            path.append(inputs.parents[path[-1]])
        off = np.setdiff1d(np.arange(14), path)
        kept = (inputs.k, expected.u, expected.log_decay, inputs.k_scale)
        kept = [np.array(x, np.float32) for x in kept]
        for x in kept:
            x[off] = np.nan
        rows = np.full(14, 10**6, np.int32)
        rows[: len(path)] = path[::-1]
        for state in commit(inputs.s0, *kept, inputs.parents, node, rows, len(path)):
            assert error(state, expected.states[node]) < TOLERANCE


def test_committing_drifts_no_more_than_stepping():
    """200 rounds of verify and commit against the plain float32 recurrence over the same tokens."""
    spec = Spec(name="", nodes=8, tree="chain", value_heads=1, key_dim=32, value_dim=32)
    step = jax.jit(lambda s0, *x: gdn_tree_verify(*x[:5], s0, x[5]))
    commit = jax.jit(gdn_tree_commit_path)
    rng = np.random.default_rng(0)
    state = walked = exact = np.zeros((1, 32, 32))
    for seed in range(200):
        inputs = make_inputs(spec, seed)
        count = int(rng.integers(1, 9))
        x = [jnp.asarray(getattr(inputs, n)) for n in ("q", "k", "v", "g", "beta", "parents")]
        result = step(jnp.float32(state), *x)
        path = np.arange(8, dtype=np.int32)
        state = commit(jnp.float32(state), x[1], result.u, result.log_decay, path, count)
        for i in range(count):
            k, v, g, beta = (getattr(inputs, n)[i, 0] for n in ("k", "v", "g", "beta"))
            exact = _advance(exact, *(np.float64(y) for y in (k, v, g, beta)))
            walked = _advance(np.float32(walked), k, v, g, beta)
    assert error(state, exact) <= error(walked, exact)


def _advance(state, k, v, g, beta):
    state = np.exp(g) * state
    return state + np.multiply.outer(k, beta * (v - k @ state[0]))


def test_per_branch_baseline():
    inputs = make_inputs(Spec(name="", nodes=19, key_heads=2, key_dim=12, value_dim=20, raw=True))
    *args, _ = inputs.arguments()
    call = functools.partial(per_branch.verify, block_v=16, interpret=True)
    call = jax.jit(call, compiler_options=FAST_COMPILE)
    out, states = call(*args, **inputs.scales())
    expected = solve(inputs)
    assert error(out, expected.out) < TOLERANCE
    assert error(states, expected.states) < TOLERANCE


def test_auto_takes_xla_on_a_cpu(monkeypatch):
    *args, parents, _ = make_inputs(Spec(name="", nodes=3)).arguments()
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(pallas, "verify", None)
    assert jax.eval_shape(gdn_tree_verify, *args, parents).out.shape == (3, 2, 16)


def test_unsupported_platform_falls_back_once_or_refuses(monkeypatch):
    *args, parents, _ = make_inputs(Spec(name="", nodes=3)).arguments()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    choice._warn_once.cache_clear()

    def program():
        return str(jax.make_jaxpr(lambda *args: gdn_tree_verify(*args))(*args, parents))

    with pytest.warns(UserWarning, match="falls back to XLA.*platform 'tpu'"):
        first = program()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert program() == first
    assert "pallas_call" not in first
    with pytest.raises(NotImplementedError, match="platform 'tpu'"):
        gdn_tree_verify(*args, parents, implementation="pallas")


def test_too_many_nodes():
    *args, parents, _ = make_inputs(Spec(name="", nodes=257, tree="star")).arguments()
    with pytest.raises(NotImplementedError, match="at most 256 nodes are supported, got 257"):
        gdn_tree_verify(*args, parents, implementation="pallas")
    call = functools.partial(gdn_tree_verify, implementation="xla")
    assert jax.eval_shape(call, *args, parents).out.shape == (257, 2, 16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.zeros((4, 2, 16), np.float16)}, TypeError, "q must be float32 or bfloat16"),
        ({"g": np.zeros((4, 4), np.int32)}, TypeError, "g must be float32, got int32"),
        ({"parents": np.zeros(4, np.float32)}, TypeError, "parents must be int32"),
        ({"v": np.zeros((4, 3, 16), np.float32)}, ValueError, "3 value heads cannot share 2"),
        ({"q_scale": np.zeros((4, 2))}, TypeError, "q_scale must be float32, got float64"),
        ({"k_scale": np.zeros((4, 4), np.float32)}, ValueError, r"k_scale must be \(4, 2\)"),
        ({"beta": np.zeros((4, 2), np.float32)}, ValueError, r"beta must be \(4, 4\)"),
        ({"s0": np.zeros((4, 16, 8), np.float32)}, ValueError, r"s0 must be \(4, 16, 16\)"),
        ({"k": np.zeros((4, 16), np.float32)}, ValueError, "k must have three axes"),
        ({"implementation": "triton"}, ValueError, "implementation must be one of auto, pallas"),
        ({"valid": np.ones(3, bool)}, ValueError, r"valid must have the shape of parents \(4,\)"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    inputs = make_inputs(Spec(name="", nodes=4, key_heads=2, value_heads=4))
    names = ("q", "k", "v", "g", "beta", "s0", "parents")
    good = {name: getattr(inputs, name) for name in names}
    with pytest.raises(error, match=message):
        gdn_tree_verify(**{**good, **change})


def test_refuses_several_roots():
    inputs = make_inputs(Spec(name="", nodes=4))
    topology = TreeTopology(ancestors=np.eye(4, dtype=bool), depth=np.array([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="a tree has one root, got rows 0 and 3"):
        gdn_tree_verify(*inputs.arguments()[:7], topology=topology)


def test_refuses_valid_beside_topology():
    inputs = make_inputs(Spec(name="", nodes=4))
    topology = TreeTopology(ancestors=np.eye(4, dtype=bool), depth=np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="give one of the two"):
        gdn_tree_verify(*inputs.arguments()[:7], valid=inputs.valid, topology=topology)


LOWERED = (*SMALL[:4:3], SMALL[5], REAL[0], next(s for s in REAL if s.nodes == 129))


@specs(LOWERED)
def test_lowers_for_hopper(spec):
    dtype = jnp.float32 if spec in SMALL else jnp.bfloat16
    inputs = make_inputs(spec)
    *args, parents, valid = inputs.arguments(dtype)
    describe = lambda *tree: pallas.describe(tree_topology(*tree))
    tree = jax.eval_shape(describe, parents, valid)
    call = lambda scales, *args: pallas.verify(*args, **scales)
    assert "xla.gpu.triton" in lower_for_hopper(call, inputs.scales(), *args, tree)


def test_baseline_lowers_for_hopper():
    inputs = make_inputs(REAL[2])
    *args, _ = inputs.arguments(jnp.bfloat16)
    call = lambda scales, *args: per_branch.verify(*args, **scales)
    assert "xla.gpu.triton" in lower_for_hopper(call, inputs.scales(), *args)


@pytest.mark.parametrize(
    ("parents", "valid", "message"),
    [
        ([-1, 2, 0, 1], None, r"parents\[1\] = 2"),
        ([-1, 1, 0, 0], None, r"parents\[1\] = 1"),
        ([0, 0, 1, 2], None, r"parents\[0\] = 0"),
        ([-1, 0, 99, 1], None, r"parents\[2\] = 99"),
        ([-1, 0, 1, 2], [True, True, False, True], "parent of node 3 is row 2, which is padding"),
    ],
)
def test_what_is_no_tree_is_refused(parents, valid, message):
    valid = None if valid is None else jnp.asarray(valid)
    with pytest.raises(ValueError, match=message):
        tree_topology(jnp.asarray(parents, jnp.int32), valid)


def test_a_decay_of_minus_infinity_forgets_everything():
    inputs = make_inputs(Spec(name="forget", nodes=15, tree="spine", max_depth=8))
    inputs.g[4] = -np.inf
    expected = run("reference", inputs)
    for implementation in ("xla", "pallas"):
        for actual, exact in zip(run(implementation, inputs)[:2], expected, strict=False):
            np.testing.assert_allclose(actual, exact, atol=2e-6)


def test_commit_refuses_what_is_no_row():
    s0, k, u = jnp.zeros((2, 4, 3)), jnp.zeros((5, 1, 4)), jnp.zeros((5, 2, 3))
    decay, parents = jnp.zeros((5, 2)), jnp.asarray([-1, 0, 1, 2, 3], jnp.int32)
    with pytest.raises(ValueError, match=r"node must lie in 0\.\.4, got 99"):
        gdn_tree_commit(s0, k, u, decay, parents, 99)
    with pytest.raises(ValueError, match=r"count must lie in 1\.\.5, got 0"):
        gdn_tree_commit_path(s0, k, u, decay, jnp.arange(5), 0)
    with pytest.raises(ValueError, match=r"path must hold rows 0\.\.4 up to count"):
        gdn_tree_commit_path(s0, k, u, decay, np.asarray([0, 77]), 2)
    with pytest.raises(ValueError, match="path must be integers"):
        gdn_tree_commit_path(s0, k, u, decay, jnp.zeros(2), 1)
    with pytest.raises(ValueError, match="node must be an integer scalar"):
        gdn_tree_commit(s0, k, u, decay, parents, 1.0)
    with pytest.raises(TypeError, match="k must be float32 or bfloat16"):
        gdn_tree_commit(s0, k.astype(jnp.int32), u, decay, parents, 1)
    with pytest.raises(ValueError, match=r"k_scale must be \(5, 1\)"):
        gdn_tree_commit(s0, k, u, decay, parents, 1, k_scale=jnp.zeros((5, 2)))
    with pytest.raises(TypeError, match="s0 must be float32"):
        gdn_tree_commit(s0.astype(jnp.bfloat16), k, u, decay, parents, 1)
