"""The compiled kernel on the cases of `specs.py`, at the head sizes of the checkpoints."""

import concurrent.futures
import dataclasses
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gdn_tree import (
    gdn_tree_commit_path,
    gdn_tree_verify,
    pallas,
    per_branch,
    tree_topology,
)
from pallas_kernels.gdn_tree.specs import REAL, SMALL, Inputs, Spec, make_inputs, solve

pytestmark = pytest.mark.gpu

GOLDEN = sorted((pathlib.Path(__file__).parents[1] / "fixtures" / "gdn_tree").glob("*.npz"))
TOLERANCE = 1e-5
BFLOAT16 = tuple(spec for spec in REAL if spec.nodes in (1, 17, 33, 65, 129))


def specs(cases: tuple[Spec, ...]):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


def verify(*args, **scales):
    return gdn_tree_verify(*args[:7], **scales, valid=args[7], implementation="pallas")


@pytest.fixture(scope="module")
def compiled():
    """`verify` compiled for the shapes of all cases side by side: compiling is most of the time."""
    shapes = {}
    for cases, dtype in (((*SMALL, *REAL), jnp.float32), (BFLOAT16, jnp.bfloat16)):
        for spec in cases:
            inputs = make_inputs(spec)
            args, scales = inputs.arguments(dtype), inputs.scales()
            shapes.setdefault(key(args, scales), (args, scales))
    for path in GOLDEN:
        args = golden_inputs(np.load(path)).arguments()
        shapes.setdefault(key(args), (args, {}))

    def compile_one(arguments):
        args, scales = arguments
        start = time.perf_counter()
        program = jax.jit(verify).lower(*args, **scales).compile()
        print(f"{args[2].shape} {args[0].dtype}: {time.perf_counter() - start:.1f} s")
        return program

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return dict(zip(shapes, pool.map(compile_one, shapes.values()), strict=True))


def key(args, scales=()):
    return (*((x.shape, str(x.dtype)) for x in args), *scales)


def golden_inputs(golden) -> Inputs:
    names = [field.name for field in dataclasses.fields(Inputs) if field.name in golden]
    inputs = Inputs(**{name: golden[name] for name in names})
    return inputs.padded(32 if len(inputs.valid) <= 32 else 128)  # few shapes to compile


def run(compiled, inputs: Inputs, dtype=jnp.float32):
    args, scales = inputs.arguments(dtype), inputs.scales()
    return [np.asarray(x) for x in compiled[key(args, scales)](*args, **scales)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(compiled, path):
    golden = np.load(path)
    real = np.flatnonzero(golden["valid"])
    result = run(compiled, golden_inputs(golden))
    for actual, name in zip(result, ("out", "u", "log_decay"), strict=True):
        assert error(actual[real], golden[name][real]) < TOLERANCE, name


@specs((*SMALL, *REAL))
def test_float32_inputs(compiled, spec):
    inputs = make_inputs(spec)
    result = run(compiled, inputs.poisoned())
    check(result, inputs)


@specs(BFLOAT16)
def test_bfloat16_inputs(compiled, spec):
    inputs = make_inputs(spec).rounded()
    result = run(compiled, inputs.poisoned(), jnp.bfloat16)
    check(result, inputs)


def error(actual, exact: np.ndarray) -> float:
    """Relative error by norm, and of the worst element by the largest, whichever is more."""
    difference = np.abs(actual - exact)
    worst = difference.max() / max(np.abs(exact).max(), 1e-30)
    return max(worst, np.linalg.norm(difference) / max(np.linalg.norm(exact), 1e-30))


def check(result, inputs: Inputs) -> None:
    expected = solve(inputs)
    for actual, name in zip(result, ("out", "u", "log_decay"), strict=True):
        assert error(actual, getattr(expected, name)) < TOLERANCE, name


@specs(REAL[3:8])
def test_same_bits_twice(compiled, spec):
    inputs = make_inputs(spec)
    first = run(compiled, inputs)
    for _ in range(5):
        for x, y in zip(first, run(compiled, inputs), strict=True):
            np.testing.assert_array_equal(x, y)


def test_auto_takes_the_kernel():
    args = make_inputs(REAL[1]).arguments()
    text = jax.jit(lambda *a: gdn_tree_verify(*a[:7], valid=a[7])).lower(*args).as_text()
    assert "xla.gpu.triton" in text


def test_vmap(compiled):
    batch = [make_inputs(SMALL[3], seed).arguments() for seed in range(3)]
    stacked = [jnp.stack(x) for x in zip(*batch, strict=True)]
    result = jax.jit(jax.vmap(verify))(*stacked)
    for row, args in enumerate(batch):
        for x, y in zip(result, compiled[key(args)](*args), strict=True):
            np.testing.assert_array_equal(x[row], y)


@pytest.mark.parametrize("config", [(32, 4, 0), (16, 4, 4), (64, 4, 4)], ids=str)
def test_other_configurations(config):
    """What timings compare, on the hardest tree."""
    spec = next(spec for spec in REAL if spec.name == "real_alike_64_depth_63")
    inputs = make_inputs(spec)
    *args, parents, valid = inputs.arguments()
    tree = pallas.describe(tree_topology(parents, valid))
    block_v, num_warps, prepare_warps = config
    config = pallas.Config(block_v=block_v, num_warps=num_warps, prepare_warps=prepare_warps)
    result = jax.jit(lambda *args: pallas.verify(*args, config=config))(*args, tree)
    check([np.asarray(x) for x in result], inputs)


@specs([spec for spec in REAL if spec.name in ("real_1", "real_2", "real_64", "real_65")])
def test_per_branch_baseline(spec):
    inputs = make_inputs(spec)
    expected = solve(inputs)
    out, states = jax.jit(per_branch.verify)(*inputs.arguments()[:-1], **inputs.scales())
    assert error(np.asarray(out), expected.out) < TOLERANCE
    assert error(np.asarray(states), expected.states) < TOLERANCE


@pytest.mark.parametrize("decay", ["mild", "none"])
def test_committing_drifts_no_more_than_stepping(decay):
    """200 rounds of verify and commit against the plain float32 recurrence over the same tokens."""
    spec = Spec(
        name="",
        nodes=16,
        tree="spine",
        max_depth=7,
        key_heads=2,
        value_heads=4,
        key_dim=128,
        value_dim=128,
        decay=decay,
    )
    step = jax.jit(lambda s0, *x: pallas.verify(*x[:5], s0, pallas.describe(tree_topology(x[5]))))
    commit = jax.jit(gdn_tree_commit_path)
    rng = np.random.default_rng(0)
    state = jnp.zeros((4, 128, 128), jnp.float32)
    walked, exact = np.zeros(state.shape, np.float32), np.zeros(state.shape)
    for seed in range(200):
        inputs = make_inputs(spec, seed)
        path = ancestors_of(inputs.parents, int(rng.integers(16)))
        padded = np.pad(path, (0, 8 - len(path)))
        x = [jnp.asarray(getattr(inputs, n)) for n in ("q", "k", "v", "g", "beta", "parents")]
        _, u, log_decay = step(state, *x)
        state = commit(state, x[1], u, log_decay, jnp.asarray(padded), len(path))
        for i in path:
            k, v, g, beta = (getattr(inputs, n)[i] for n in ("k", "v", "g", "beta"))
            k = np.repeat(k, 2, axis=0)
            exact = advance(exact, *(np.float64(y) for y in (k, v, g, beta)))
            walked = advance(walked, k, v, g, beta)
    kept, stepped = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (state, walked))
    print(f"{decay}: committed {kept:.2e}, stepped {stepped:.2e}")
    assert kept <= stepped


def ancestors_of(parents: np.ndarray, node: int) -> np.ndarray:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return np.array(path[::-1], np.int32)


def advance(state, k, v, g, beta):
    state = np.exp(g)[:, None, None] * state
    u = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
    return state + k[:, :, None] * u[:, None, :]
