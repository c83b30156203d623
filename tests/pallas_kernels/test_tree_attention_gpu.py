"""The compiled kernel on the cases of `specs.py`, at the head layouts of the checkpoints."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import hopper as rules
from pallas_kernels.tree_attention import mosaic, pallas, tree_attention
from pallas_kernels.tree_attention.specs import (
    REAL,
    SMALL,
    TILED,
    TOLERANCE,
    Spec,
    error,
    make_gate,
    make_inputs,
    solve,
    solve_gated,
)

pytestmark = pytest.mark.gpu

GATED = ("length_97", "one_row", "decode", "tree_65", "size_24_ratio_3")
DTYPES = (jnp.float32, jnp.bfloat16)


def specs(cases: tuple[Spec, ...]):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


attend = functools.partial(tree_attention, implementation="pallas")


@functools.cache
def problem(spec: Spec):
    """Inputs that bfloat16 holds, so that both types share the exact result."""
    inputs = make_inputs(spec).rounded()
    return inputs, solve(inputs)


@pytest.fixture(scope="module")
def compiled():
    """`attend` compiled for the shapes of all cases side by side: compiling is most of the time."""
    shapes = {}
    for spec in (*SMALL, *REAL):
        for dtype in DTYPES:
            args = problem(spec)[0].arguments(dtype)
            kept = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
            shapes.setdefault(key(spec, args), (spec.window, kept))

    def compile_one(problem):
        window, args = problem
        return jax.jit(functools.partial(attend, window=window)).lower(*args).compile()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return dict(zip(shapes, pool.map(compile_one, shapes.values()), strict=True))


def key(spec, args):
    return spec.window, *((x.shape, str(x.dtype)) for x in args)


@specs((*SMALL, *REAL))
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(compiled, spec, dtype):
    inputs, exact = problem(spec)
    args = inputs.poisoned().arguments(dtype)
    out = compiled[key(spec, args)](*args)
    assert out.dtype == dtype
    assert error(out, exact) < TOLERANCE[jnp.dtype(dtype).name]


@specs((REAL[0], REAL[5], REAL[-3]))
def test_same_bits_twice(compiled, spec):
    args = problem(spec)[0].arguments(jnp.bfloat16)
    first = compiled[key(spec, args)](*args)
    for _ in range(5):
        np.testing.assert_array_equal(first, compiled[key(spec, args)](*args))


@specs(tuple(spec for spec in (*SMALL, *REAL) if spec.name in GATED))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(spec, dtype):
    inputs, exact = problem(spec)
    gate = make_gate(spec, dtype)
    out = jax.jit(attend)(*inputs.poisoned().arguments(dtype), gate=gate)
    assert error(out, solve_gated(exact, gate)) < TOLERANCE[jnp.dtype(dtype).name]


def test_not_ahead():
    inputs, exact = problem(REAL[5])
    config = pallas.Config(block_q=128, block_k=32, block_d=256, num_warps=8, num_stages=4)
    call = functools.partial(pallas.attend, scale=REAL[5].size ** -0.5, config=config)
    out = jax.jit(call)(*inputs.poisoned().arguments(jnp.bfloat16))
    assert error(out, exact) < TOLERANCE["bfloat16"]


def tiled(spec: Spec) -> bool:
    return not rules.refusal(spec.size, spec.capacity, jnp.bfloat16, spec.window)


def mosaic_attend(spec: Spec, **kwargs):
    return jax.jit(functools.partial(mosaic.attend, scale=spec.size**-0.5, **kwargs))


@pytest.fixture
def hopper():
    if jax.local_devices()[0].compute_capability != rules.CAPABILITY:
        pytest.skip("needs a Hopper GPU")


@specs(tuple(spec for spec in (*TILED, *REAL) if tiled(spec)))
def test_mosaic(hopper, spec):
    inputs, exact = problem(spec)
    call, args = mosaic_attend(spec), inputs.poisoned().arguments(jnp.bfloat16)
    out = call(*args)
    assert error(out, exact) < TOLERANCE["bfloat16"]
    np.testing.assert_array_equal(out, call(*args))


@specs(TILED[:2])
def test_mosaic_in_other_cuts(hopper, spec):
    inputs, exact = problem(spec)
    args = inputs.poisoned().arguments(jnp.bfloat16)
    for config in (mosaic.Config(programs=1, stages=1), mosaic.Config(programs=3, stages=3)):
        out = mosaic_attend(spec, config=config)(*args)
        assert error(out, exact) < TOLERANCE["bfloat16"]


def test_mosaic_of_many_at_once(hopper):
    args = problem(TILED[0])[0].poisoned().arguments(jnp.bfloat16)
    call = mosaic_attend(TILED[0])
    other = (args[0][:, ::-1], *args[1:])
    both = jax.vmap(call)(*(jnp.stack(pair) for pair in zip(args, other, strict=True)))
    for out, alone in zip(both, (call(*args), call(*other)), strict=True):
        np.testing.assert_array_equal(out, alone)


def test_auto_takes_the_kernels(hopper):
    for spec, name in ((REAL[0], "xla.gpu.triton"), (REAL[5], "mosaic_gpu")):
        args = problem(spec)[0].arguments(jnp.bfloat16)
        assert name in jax.jit(lambda *a: tree_attention(*a)).lower(*args).as_text()


def test_xla_fallback(compiled):
    inputs, exact = problem(REAL[5])
    call = functools.partial(tree_attention, implementation="xla")
    for dtype in DTYPES:
        out = jax.jit(call)(*inputs.poisoned().arguments(dtype))
        assert error(out, exact) < TOLERANCE[jnp.dtype(dtype).name]
