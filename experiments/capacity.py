"""Does the size of a Weaver limit it? A trained one and a larger one go on alike.

The larger Weaver starts as the same function: its new units and blocks add nothing yet. Both learn
along the same batches for as many steps, so that only their size differs. `experiments.larger` runs
it as its step `capacity`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.recipes import Learning, Networks, compile_step, train, with_weaver
from tfm_jax.decoding.state import Trio
from tfm_jax.training.trainer import Step
from tfm_jax.training.weaver import WeaverRecipe, initial_weaver

# Where a branch of a block is added to the residual stream.
_INTO_STREAM = ("o_proj.weight", "fc2.weight", "fc2.bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Of a Weaver: what can grow without a change of what it computes.

    Attributes:
      blocks: number of them.
      inner: units of their MLPs.
    """

    blocks: int
    inner: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A Weaver before training.

    Attributes:
      size: of it.
      networks: with it as the first Weaver.
      step: that trains it, compiled.
    """

    size: Size
    networks: Networks
    step: Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A Weaver after training: its trio, float32, and what the run was."""

    name: str
    trio: Trio
    facts: dict[str, Any]


def enlarged(networks: Networks, size: Size, seed: int = 0) -> Networks:
    """The networks with a first Weaver of another size that computes the same.

    Raises:
      ValueError: a smaller size, or a Weaver with gated MLPs.
    """
    config = networks.config
    if config.variant != "learned_gelu":
        raise ValueError(f"only Weavers of variant learned_gelu grow here, got {config.variant}")
    if size.blocks < config.num_layers or size.inner < config.mlp_dim:
        raise ValueError(f"{size} is smaller than {config.num_layers} of {config.mlp_dim}")
    config = dataclasses.replace(config, num_layers=size.blocks, mlp_dim=size.inner)
    params = {}
    for path, fresh in initial_weaver(config, seed=seed).items():
        old = networks.first.get(path)
        start = jnp.zeros_like(fresh) if path.endswith(_INTO_STREAM) else fresh
        corner = () if old is None else tuple(slice(n) for n in old.shape)
        params[path] = start if old is None else start.at[corner].set(old)
    return dataclasses.replace(networks, config=config, first=params)


def compile_arms(
    networks: Networks, sizes: Mapping[str, Size], learning: Learning, recipe: WeaverRecipe
) -> dict[str, Start]:
    """The first Weaver in each size by name, with the steps that train them.

    Args:
      networks: of the trio.
      sizes: by name.
      learning, recipe: how they will be trained.
    """

    def made(size: Size) -> Start:
        own = enlarged(networks, size)
        return Start(size=size, networks=own, step=compile_step(own, learning, recipe))

    with concurrent.futures.ThreadPoolExecutor(len(sizes)) as pool:
        return dict(zip(sizes, pool.map(made, sizes.values()), strict=True))


def train_arms(
    starts: Mapping[str, Start],
    learning: Learning,
    recipe: WeaverRecipe,
    batches: Callable[[int], Any],
    log: Path,
) -> list[Arm]:
    """Trains each Weaver for the optimiser's steps, one after the other.

    Args:
      starts: see `compile_arms`.
      learning, recipe: as they were compiled for.
      batches: see `Continuations.batches`.
      log: JSON-lines file to append metrics to.
    """
    arms = []
    for name, start in starts.items():
        params, facts = train(
            name,
            start.networks,
            learning,
            recipe,
            start.networks.first,
            start.step,
            batches,
            first=0,
            seconds=None,
            log=log,
        )
        facts |= dataclasses.asdict(start.size) | {
            "parameters": int(sum(np.size(value) for value in params.values())),
        }
        arms.append(Arm(name=name, trio=with_weaver(start.networks, params), facts=facts))
    return arms
