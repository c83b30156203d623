"""Modules made from parameters, and parameters taken from modules; no random weights between."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tfm_jax.checkpoints.errors import refuse
from tfm_jax.config import DrafterConfig, VerifierConfig, WeaverConfig
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.models.weaver import Weaver

Placement = jax.Device | jax.sharding.Sharding | None
Params = Mapping[str, np.ndarray] | Mapping[str, jax.Array]


def build_verifier(config: VerifierConfig, params: Params, *, device: Placement = None) -> Verifier:
    """The verifier with exactly these parameters, placed one tensor at a time on `device`.

    Args:
      config: sizes.
      params: arrays by dotted path, as `read_trio` gives them.
      device: a device or sharding for all tensors; the default device if not given. Arrays of
        JAX are taken as they are.

    Raises:
      CheckpointError: a parameter is missing, unknown or of another shape.
    """
    return fill(_outline(Verifier, config), params, device=device)


def build_drafter(config: DrafterConfig, params: Params, *, device: Placement = None) -> Drafter:
    """The drafter with exactly these parameters; see `build_verifier`."""
    return fill(_outline(Drafter, config), params, device=device)


def build_weaver(config: WeaverConfig, params: Params, *, device: Placement = None) -> Weaver:
    """The Weaver with exactly these parameters; see `build_verifier`."""
    return fill(_outline(Weaver, config), params, device=device)


def parameter_shapes(
    config: VerifierConfig | DrafterConfig | WeaverConfig,
) -> dict[str, tuple[int, ...]]:
    """Shapes by dotted path of the module that `config` describes; nothing is allocated."""
    kind = {VerifierConfig: Verifier, DrafterConfig: Drafter, WeaverConfig: Weaver}[type(config)]
    return _shapes(_outline(kind, config))


def module_params(module: nnx.Module) -> dict[str, np.ndarray]:
    """The module's parameters on the host, by dotted path."""
    return {path: np.asarray(leaf) for path, leaf in _leaves(module).items()}


def fill(outline: nnx.Module, params: Params, *, device: Placement = None) -> Any:
    """A module like `outline`, whose arrays may be mere shapes, with exactly these parameters.

    Arguments and errors as for `build_verifier`.
    """
    graph, state = nnx.split(outline)
    shapes = _shapes(outline)
    problems = [f"{path} is missing" for path in shapes if path not in params]
    problems += [f"no place for {path}" for path in params if path not in shapes]
    problems += [
        f"{path} is {list(params[path].shape)}, expected {list(shape)}"
        for path, shape in shapes.items()
        if path in params and params[path].shape != shape
    ]
    refuse(f"parameters of {type(outline).__name__}", problems)
    leaves = []
    for path, variable in nnx.to_flat_state(state):
        array = params[_dotted(path)]
        if not isinstance(array, jax.Array):
            # A CPU device takes aligned host memory as it is: without a copy the module would
            # change with the array, or with the file that the array is mapped from.
            array = jax.device_put(np.array(array), device)
        leaves.append((path, variable.replace(array)))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


@functools.cache
def _outline(kind: Callable[..., nnx.Module], config: Any) -> nnx.Module:
    """The module with shapes in place of arrays; shared, so never written to."""
    return nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), dtype=jnp.float32))


def _shapes(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in _leaves(module).items()}


def _leaves(module: nnx.Module) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(module))
    return {_dotted(path): variable.get_value() for path, variable in flat}


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)
