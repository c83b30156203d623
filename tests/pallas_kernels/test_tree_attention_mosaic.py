"""Tree attention on Mosaic GPU: interpreted against float64, and lowered for Hopper."""

import dataclasses
import functools
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower_for_hopper
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels.tree_attention import Gate, mosaic, pallas, tree_attention
from pallas_kernels.tree_attention.specs import (
    TILED,
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

_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
interpreted = pytest.mark.skipif(_CPUS < 2, reason="on one CPU the interpreter waits for itself")
# As many programs as give every split of the keys few blocks, and some none.
CONFIG = mosaic.Config(programs=4)


def attend(spec: Spec, *args, **kwargs) -> jax.Array:
    """Not under `jit`: there the interpreter waits for itself."""
    kwargs = {"scale": spec.size**-0.5, "config": CONFIG} | kwargs
    return mosaic.attend(*args, interpreter=InterpretGPUParams(), **kwargs)


def check(spec: Spec) -> None:
    inputs = make_inputs(spec).rounded()
    out = attend(spec, *inputs.poisoned().arguments(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert error(out, solve(inputs)) < TOLERANCE["bfloat16"]


def specs(cases: tuple[Spec, ...]):
    return pytest.mark.parametrize("spec", cases, ids=lambda spec: spec.name)


@interpreted
@specs(TILED[:2])
def test_values(spec) -> None:
    check(spec)


@interpreted
@pytest.mark.slow
@specs(TILED[2:])
def test_more_values(spec) -> None:
    check(spec)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
def test_any_number_of_stages(stages) -> None:
    """Blocks wait for their place in shared memory, however few or many places there are."""
    inputs = make_inputs(TILED[0]).rounded()
    args = inputs.poisoned().arguments(jnp.bfloat16)
    out = attend(TILED[0], *args, config=dataclasses.replace(CONFIG, programs=1, stages=stages))
    assert error(out, solve(inputs)) < TOLERANCE["bfloat16"]


@interpreted
def test_gate_and_lengths_out_of_range() -> None:
    spec = TILED[2]
    inputs, gate = make_inputs(spec).rounded(), make_gate(spec, jnp.bfloat16)
    *args, _ = inputs.arguments(jnp.bfloat16)
    out = attend(spec, *args, jnp.int32(2**30), gate=gate)
    assert error(out, solve_gated(solve(inputs), gate)) < TOLERANCE["bfloat16"]


@interpreted
@pytest.mark.slow
def test_a_key_without_a_number_spoils_only_rows_that_see_it() -> None:
    spec = Spec(name="apart", nodes=4, ratio=3, size=64, length=70, capacity=128)
    inputs = make_inputs(spec).rounded()
    inputs.visible[:] = np.eye(4, dtype=bool)
    exact = solve(inputs)
    inputs.own_keys[:, 1] = np.inf
    out = np.asarray(attend(spec, *inputs.arguments(jnp.bfloat16)), np.float64)
    assert not np.isfinite(out[1]).all()
    rest = [0, 2, 3]
    assert error(jnp.asarray(out[rest], jnp.bfloat16), exact[rest]) < TOLERANCE["bfloat16"]


LAYOUTS = (
    benchmark_spec(65, 8192),
    benchmark_spec(16, 32768),
    Spec(name="size_128", nodes=33, groups=2, ratio=4, size=128, length=1, capacity=4096),
    Spec(name="size_64", nodes=129, groups=8, ratio=2, size=64, length=1, capacity=4096),
)


@specs(LAYOUTS)
def test_lowers_for_hopper(spec) -> None:
    text = lower_for_hopper(
        functools.partial(mosaic.attend, scale=0.1), *shapes(spec, jnp.bfloat16)
    )
    assert "mosaic_gpu" in text
    assert "xla.gpu.triton" in text  # the parts are joined there


def test_gate_lowers_for_hopper() -> None:
    gate = Gate(logits=jax.ShapeDtypeStruct((65, 14336), jnp.bfloat16), first=256, step=512)
    call = lambda gate, *args: mosaic.attend(*args, scale=0.1, gate=gate)
    assert "65x14336xbf16" in lower_for_hopper(call, gate, *shapes(LAYOUTS[0], jnp.bfloat16))


@pytest.mark.parametrize(
    ("spec", "capability", "dtype", "window", "taken"),
    [
        (LAYOUTS[0], "9.0", jnp.bfloat16, None, "mosaic"),
        (LAYOUTS[1], "9.0", jnp.bfloat16, None, "mosaic"),
        (LAYOUTS[0], "8.0", jnp.bfloat16, None, "pallas"),
        (LAYOUTS[0], "10.0", jnp.bfloat16, None, "pallas"),
        (LAYOUTS[0], "9.0", jnp.float32, None, "pallas"),
        (LAYOUTS[0], "9.0", jnp.bfloat16, 2048, "pallas"),
        (benchmark_spec(65, 1024), "9.0", jnp.bfloat16, None, "pallas"),
        (benchmark_spec(9, 32768), "9.0", jnp.bfloat16, None, "pallas"),
        (benchmark_spec(1025, 8192), "9.0", jnp.bfloat16, None, "pallas"),
    ],
)
def test_is_taken_on_hopper_for_many_rows_over_a_long_cache(
    monkeypatch, spec, capability, dtype, window, taken
) -> None:
    device, called = SimpleNamespace(compute_capability=capability), []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    for module in (mosaic, pallas):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(
            module, "attend", lambda q, *_, name=name, **__: called.append(name) or q
        )
    call = functools.partial(tree_attention, window=window)
    jax.eval_shape(call, *shapes(spec, dtype))
    assert called == [taken]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 80}, "heads of 64, 128, 192 or 256 columns, got 80"),
        ({"size": 320}, "heads of 64, 128, 192 or 256 columns, got 320"),
        ({"capacity": 200}, "whole blocks of 64 rows, got 200"),
    ],
)
def test_refuses_shapes(change, message) -> None:
    spec = dataclasses.replace(TILED[0], length=3, **change)
    args = make_inputs(spec).arguments(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=message):
        mosaic.attend(*args, scale=1.0)


def test_refuses_float32_and_bad_cuts() -> None:
    with pytest.raises(NotImplementedError, match="takes bfloat16, got float32"):
        mosaic.attend(*make_inputs(TILED[0]).arguments(), scale=1.0)
    with pytest.raises(ValueError, match="programs and stages must be at least 1"):
        mosaic.Config(programs=0)
    with pytest.raises(ValueError, match="programs and stages must be at least 1"):
        mosaic.Config(stages=0)
    args = make_inputs(dataclasses.replace(TILED[0], size=256)).arguments(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"256 columns have room for 2 stages, got .*stages=3"):
        mosaic.attend(*args, scale=1.0, config=mosaic.Config(stages=3))


@pytest.mark.parametrize(("size", "most"), [(64, 11), (128, 5), (192, 3), (256, 2)])
def test_as_many_stages_as_fit_lower_for_hopper(size, most) -> None:
    spec = Spec(name="", nodes=65, ratio=2, size=size, length=1, capacity=4096)
    call = functools.partial(mosaic.attend, scale=0.1, config=mosaic.Config(stages=most))
    assert "mosaic_gpu" in lower_for_hopper(call, *shapes(spec, jnp.bfloat16))
