"""The compiled kernel on the cases of `specs.py`, at the head sizes of the checkpoints."""

import concurrent.futures
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gdn_tree import gdn_tree_verify, pallas, tree_topology
from pallas_kernels.gdn_tree.specs import REAL, SMALL, Inputs, Spec, make_inputs, solve

pytestmark = pytest.mark.gpu

GOLDEN = sorted((pathlib.Path(__file__).parents[1] / "fixtures" / "gdn_tree").glob("*.npz"))
TOLERANCE = 1e-5


def specs(cases: tuple[Spec, ...]):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


def verify(*args):
    return gdn_tree_verify(*args[:7], valid=args[7], implementation="pallas")


@pytest.fixture(scope="module")
def compiled():
    """`verify` compiled for the shapes of all cases side by side: compiling is most of the time."""
    shapes = {}
    for cases, dtype in (((*SMALL, *REAL), jnp.float32), (REAL, jnp.bfloat16)):
        for spec in cases:
            args = make_inputs(spec).arguments(dtype)
            shapes.setdefault(key(args), args)
    for path in GOLDEN:
        args = golden_inputs(np.load(path)).arguments()
        shapes.setdefault(key(args), args)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        programs = pool.map(lambda args: jax.jit(verify).lower(*args).compile(), shapes.values())
        return dict(zip(shapes, programs, strict=True))


def key(args):
    return tuple((x.shape, str(x.dtype)) for x in args)


def golden_inputs(golden) -> Inputs:
    inputs = Inputs(**{field.name: golden[field.name] for field in dataclasses.fields(Inputs)})
    return inputs.padded(32 if len(inputs.valid) <= 32 else 128)  # few shapes to compile


def run(compiled, inputs: Inputs, dtype=jnp.float32):
    args = inputs.arguments(dtype)
    return [np.asarray(x) for x in compiled[key(args)](*args)]


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


@specs(REAL)
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


@specs(REAL[3:6])
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


def test_schemes_hold_their_accuracy():
    """What the kernel's products are worth on real tensor cores, on the hardest tree."""
    spec = next(spec for spec in REAL if spec.name == "real_alike_64_depth_63")
    inputs = make_inputs(spec)
    *args, parents, valid = inputs.arguments()
    topology = tree_topology(parents, valid)
    expected = solve(inputs)
    config = pallas.default_config(spec.nodes, spec.key_dim, spec.value_dim)
    for scheme, tolerance in (("bf16x6", 1e-5), ("f16x3", 1e-5), ("bf16x3", 1e-3)):
        changed = dataclasses.replace(config, solve=scheme)
        result = jax.jit(lambda c=changed: pallas.verify(*args, topology, config=c))()
        assert error(np.asarray(result[0]), expected.out) < tolerance, scheme
        assert error(np.asarray(result[1]), expected.u) < tolerance, scheme
