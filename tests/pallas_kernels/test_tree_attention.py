"""Every implementation of tree attention against float64, on lengths and scores that hurt."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower_for_hopper

from pallas_kernels import choice
from pallas_kernels.tree_attention import Gate, pallas, tree_attention, xla
from pallas_kernels.tree_attention.specs import (
    REAL,
    SMALL,
    TOLERANCE,
    Spec,
    benchmark_spec,
    error,
    make_gate,
    make_inputs,
    shapes,
    solve,
    solve_gated,
)

# Interpreted kernels are large programs: compile time is what these tests cost.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
BEHIND = pallas.Config(block_q=16, block_k=16, block_d=16, programs=14)
AHEAD = dataclasses.replace(BEHIND, ahead=True)


def specs(cases):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@functools.cache
def compiled(name: str, size: int, window: int | None = None):
    """The implementation for the CPU, the kernel interpreted."""
    scale = size**-0.5
    functions = {
        "pallas": functools.partial(pallas.attend, scale=scale, interpret=True),
        "behind": functools.partial(pallas.attend, scale=scale, interpret=True, config=BEHIND),
        "ahead": functools.partial(pallas.attend, scale=scale, interpret=True, config=AHEAD),
        "blocks": functools.partial(xla.attend, scale=scale, block=32),
        "xla": functools.partial(tree_attention, implementation="xla"),
        "reference": functools.partial(tree_attention, implementation="reference"),
    }
    call = functools.partial(functions[name], window=window)
    return jax.jit(call, compiler_options=FAST_COMPILE)


def run(name: str, spec: Spec, dtype=jnp.float32) -> tuple[jax.Array, np.ndarray]:
    inputs = make_inputs(spec)
    if dtype == jnp.bfloat16:
        inputs = inputs.rounded()
    out = compiled(name, spec.size, spec.window)(*inputs.poisoned().arguments(dtype))
    assert out.dtype == dtype
    return out, solve(inputs)


SHARED = [spec for spec in SMALL if spec.capacity == 160]


@specs(SHARED)
@pytest.mark.parametrize("name", ["pallas", "blocks", "reference"])
def test_float32(name, spec):
    assert error(*run(name, spec)) < TOLERANCE["float32"]


@specs(SHARED)
@pytest.mark.parametrize("name", ["behind", "ahead", "xla"])
def test_bfloat16(name, spec):
    assert error(*run(name, spec, jnp.bfloat16)) < TOLERANCE["bfloat16"]


@specs([spec for spec in SMALL if spec not in SHARED])
@pytest.mark.parametrize("name", ["pallas", "xla"])
def test_other_shapes(name, spec):
    assert error(*run(name, spec, jnp.bfloat16)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("pallas", jnp.float32),
        ("behind", jnp.bfloat16),
        ("ahead", jnp.bfloat16),
        ("blocks", jnp.float32),
    ],
)
def test_edges(name, dtype):
    """Rows that see nothing are zero, and a length out of range reads nothing outside the cache."""
    spec = SMALL[0]
    *args, _ = make_inputs(spec).rounded().arguments(dtype)
    call = compiled(name, spec.size)
    empty = np.asarray(call(*args, jnp.int32(0)), np.float32)
    assert np.all(empty[-spec.blind :] == 0)
    assert np.all(np.any(empty[: -spec.blind] != 0, axis=(1, 2)))
    np.testing.assert_array_equal(np.float32(call(*args, jnp.int32(-3))), empty)
    whole = call(*args, jnp.int32(spec.capacity))
    np.testing.assert_array_equal(call(*args, jnp.int32(2**30)), whole)


@pytest.mark.parametrize("name", ["pallas", "blocks", "reference"])
def test_a_window_over_the_whole_cache_changes_nothing(name):
    """Not even by a bit: the kernel's cut is the same."""
    spec = SMALL[3]
    args = make_inputs(spec).poisoned().arguments()
    wide = compiled(name, spec.size, spec.length + spec.nodes)(*args)
    np.testing.assert_array_equal(wide, compiled(name, spec.size)(*args))


def mixed_parts(spec: Spec, dtype, window: int | None = None) -> tuple[int, ...]:
    """Splits, key heads and rows of what the first launch leaves."""
    call = functools.partial(pallas.attend, scale=1.0, window=window)
    jaxpr = jax.make_jaxpr(call)(*shapes(spec, dtype))
    made = (x.aval.shape for equation in jaxpr.eqns for x in equation.outvars)
    (mix,) = (shape for shape in made if len(shape) == 4)
    return mix[:3]


def test_a_window_bounds_the_splits():
    """Whatever the capacity, no more programs run than the window's keys give work."""
    spec = dataclasses.replace(SMALL[0], capacity=4096, length=4000)
    # 39 positions touch three blocks of 32 at most; one more of own keys.
    assert mixed_parts(spec, jnp.float32, window=40)[0] == 4


def test_scale():
    spec = SMALL[3]
    q, *rest = make_inputs(spec).arguments()
    call = functools.partial(tree_attention, scale=0.5 * spec.size**-0.5, implementation="xla")
    out = jax.jit(call, compiler_options=FAST_COMPILE)(q, *rest)
    expected = compiled("reference", spec.size)(q * 0.5, *rest)
    np.testing.assert_allclose(out, expected, atol=1e-5)


GATED = [spec for spec in SMALL if spec.name in ("length_97", "one_row")]


@specs(GATED)
@pytest.mark.parametrize("name", ["pallas", "blocks", "reference"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gate(name, spec, dtype):
    """The same launch multiplies by the gate, read from a wide array full of NaN."""
    inputs, gate = make_inputs(spec).rounded(), make_gate(spec, dtype)
    out = compiled(name, spec.size)(*inputs.poisoned().arguments(dtype), gate=gate)
    assert out.dtype == dtype
    exact = solve_gated(solve(inputs), gate)
    assert error(out, exact) < TOLERANCE[jnp.dtype(dtype).name]


def test_gate_at_the_end_of_its_array():
    """Logits of the last head may be the last columns."""
    spec = GATED[1]
    inputs, gate = make_inputs(spec), make_gate(spec)
    tight = dataclasses.replace(gate, logits=gate.logits[:, : -spec.size])
    for name in ("pallas", "blocks"):
        call = functools.partial(compiled(name, spec.size), *inputs.arguments())
        np.testing.assert_array_equal(call(gate=tight), call(gate=gate))


@pytest.mark.parametrize("rows", [6, 32, 33, 390])
def test_default_multiplies_ahead_in_bfloat16_with_many_rows(rows):
    assert pallas.default_config(rows, 256, jnp.dtype(jnp.bfloat16)).ahead == (rows > 32)
    assert not pallas.default_config(rows, 256, jnp.dtype(jnp.float32)).ahead


def test_programs_and_splits_follow_rows_and_capacity():
    parts = lambda nodes, capacity: mixed_parts(benchmark_spec(nodes, capacity), jnp.bfloat16)
    assert parts(65, 131072) == (8, 4, 512)  # 4 blocks of 4 heads: 128 programs
    assert parts(65, 64)[0] == 4  # blocks of 64 keys: 2 of the cache, 2 of the tree
    assert parts(257, 131072) == (2, 4, 1664)
    assert parts(1025, 131072)[0] == 1


def test_scores_never_lie_in_device_memory():
    """What the first launch leaves, and what XLA allocates, is small against all scores."""
    spec = benchmark_spec(65, 131072)
    args = shapes(spec, jnp.float32)
    jaxpr = jax.make_jaxpr(functools.partial(pallas.attend, scale=1.0))(*args)
    largest = max(x.aval.size for equation in jaxpr.eqns for x in equation.outvars)
    scores = spec.nodes * spec.groups * spec.ratio * spec.capacity
    assert largest < scores / 40
    call = jax.jit(functools.partial(xla.attend, scale=1.0), compiler_options=FAST_COMPILE)
    used = call.lower(*args).compile().memory_analysis()
    assert used.temp_size_in_bytes < 4 * scores / 5


@specs(
    [spec for spec in REAL if spec.name in ("decode", "tree_65", "size_24_ratio_3", "window_1000")]
)
def test_lowers_for_hopper(spec):
    call = functools.partial(pallas.attend, scale=0.1, window=spec.window)
    for dtype in (jnp.bfloat16, jnp.float32) if spec.nodes == 65 else (jnp.bfloat16,):
        assert "xla.gpu.triton" in lower_for_hopper(call, *shapes(spec, dtype)), dtype


def test_gate_lowers_for_hopper():
    spec = benchmark_spec(65, 1024)
    gate = Gate(logits=jax.ShapeDtypeStruct((65, 14336), jnp.bfloat16), first=256, step=512)
    call = lambda gate, *args: pallas.attend(*args, scale=0.1, gate=gate)
    text = lower_for_hopper(call, gate, *shapes(spec, jnp.bfloat16))
    assert "65x14336xbf16" in text


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("ahead", [False, True])
def test_both_orders_lower_for_hopper(ahead, window):
    config = pallas.Config(block_q=128, block_k=32, block_d=256, num_warps=8, ahead=ahead)
    call = functools.partial(pallas.attend, scale=0.1, window=window, config=config)
    for dtype in (jnp.bfloat16, jnp.float32):
        text = lower_for_hopper(call, *shapes(benchmark_spec(65, 8192), dtype))
        assert "xla.gpu.triton" in text
        assert ("ex2.approx.ftz" in text) == (ahead and dtype == jnp.bfloat16)  # packed weights


def test_unsupported_device_falls_back_once_or_refuses(monkeypatch):
    args = make_inputs(SMALL[2]).arguments()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(pallas, "attend", None)
    choice._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="tree_attention falls back to XLA.*platform 'tpu'"):
        result = jax.eval_shape(tree_attention, *args)
    assert result.shape == args[0].shape
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(lambda *x: tree_attention(*x), *args)
    with pytest.raises(NotImplementedError, match="platform 'tpu'"):
        tree_attention(*args, implementation="pallas")


def test_large_heads_are_refused():
    args = make_inputs(Spec(name="", nodes=1, size=264, length=3, capacity=4)).arguments()
    with pytest.raises(NotImplementedError, match="at most 256 columns are supported, got 264"):
        tree_attention(*args, implementation="pallas")
    assert jax.eval_shape(tree_attention, *args).shape == (1, 2, 264)


def gate_of(logits=None, first: int = 0, step: int = 16) -> Gate:
    return Gate(
        logits=np.zeros((4, 64), np.float32) if logits is None else logits, first=first, step=step
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"programs": 0}, "programs and num_stages must be at least 1"),
        ({"num_stages": 0}, "programs and num_stages must be at least 1"),
        ({"num_warps": -3}, "num_warps must be a power of two, got -3"),
        ({"block_d": 8}, "block_d must be a power of two >= 16, got 8"),
        ({"block_k": 24}, "block_k must be a power of two >= 16, got 24"),
        ({"block_q": 0}, "block_q must be a power of two >= 16, got 0"),
    ],
)
def test_configuration_refuses_sizes(change, message):
    sizes = {"block_q": 16, "block_k": 16, "block_d": 16}
    with pytest.raises(ValueError, match=message):
        pallas.Config(**{**sizes, **change})


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"q": np.zeros((4, 4, 16), np.float16)}, TypeError, "q must be float32 or bfloat16"),
        ({"values": [1.0]}, TypeError, "values must be an array, got list"),
        ({"keys": np.zeros((2, 8, 16), jnp.bfloat16)}, TypeError, "keys must be float32 as q"),
        ({"visible": np.ones((4, 4), np.int8)}, TypeError, "visible must be bool, got int8"),
        ({"visible": np.ones((4, 3), bool)}, ValueError, r"visible must be \(4, 4\)"),
        ({"keys": np.zeros((2, 0, 16), np.float32)}, ValueError, "three axes, none empty"),
        ({"keys": np.zeros((3, 8, 16), np.float32)}, ValueError, "4 query heads cannot share 3"),
        ({"values": np.zeros((2, 9, 16), np.float32)}, ValueError, r"values must be \(2, 8, 16\)"),
        ({"own_keys": np.zeros((2, 5, 16), np.float32)}, ValueError, "own_keys must be"),
        ({"length": 9}, ValueError, r"length must lie in 0\.\.8, got 9"),
        ({"length": np.zeros(2, np.int32)}, ValueError, "length must be an integer scalar"),
        ({"length": 1.5}, ValueError, "length must be an integer scalar"),
        ({"scale": 0.0}, ValueError, "scale must be positive, got 0"),
        ({"window": 0}, ValueError, "window must be a positive integer, got 0"),
        ({"window": 2.5}, ValueError, "window must be a positive integer, got 2.5"),
        ({"gate": gate_of(np.zeros((4, 64), np.float16))}, TypeError, "gate logits must be float"),
        (
            {"gate": gate_of(first=-1)},
            ValueError,
            "gate must have first >= 0 and step >= 16, got -1",
        ),
        ({"gate": gate_of(step=15)}, ValueError, "first >= 0 and step >= 16, got 0 and 15"),
        ({"gate": gate_of(first=1)}, ValueError, r"must be \[4, 65 or more\] for 4 heads of 16"),
        ({"gate": gate_of(np.zeros((3, 64), np.float32))}, ValueError, r"got \(3, 64\)"),
        ({"implementation": "triton"}, ValueError, "implementation must be one of auto, pallas"),
    ],
)
def test_refuses_bad_arguments(change, kind, message):
    inputs = make_inputs(Spec(name="", nodes=4, groups=2, length=5, capacity=8))
    good = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    with pytest.raises(kind, match=message):
        tree_attention(**{**good, **change})
