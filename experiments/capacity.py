"""Does the size of a Weaver limit it? A trained one and a larger one go on alike.

The larger Weaver starts as the same function: its new units and blocks add nothing yet. Both learn
along the same batches for the same time, so that only their size differs. `experiments.larger`
runs it as its step `capacity`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.recipes import Networks, Plan, compile_step, train, with_weaver
from tfm_jax.decoding.state import Trio
from tfm_jax.training.texts import write_continuations
from tfm_jax.training.weaver import initial_weaver

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Time to write texts to learn from, its compilation included, and to train each Weaver."""

    texts: float
    arm: float


def train_arms(
    networks: Networks,
    sizes: Mapping[str, Size],
    plan: Plan,
    seconds: Seconds,
    corpus: Path,
    out: Path,
) -> list[Arm]:
    """Trains a Weaver of each size from the first one.

    Args:
      networks: of the trio.
      sizes: by name.
      plan: its texts, optimiser, seed, and the first of its recipes.
      seconds: see there.
      corpus: packed, for the prompts of what is learned from.
      out: folder for `capacity.jsonl`.
    """
    starts = {name: enlarged(networks, size) for name, size in sizes.items()}
    recipe_name, recipe = next(iter(plan.recipes.items()))
    with concurrent.futures.ThreadPoolExecutor(len(starts)) as pool:
        steps = {name: pool.submit(compile_step, n, plan, recipe) for name, n in starts.items()}
        texts = write_continuations(
            networks.frozen.verifier,
            corpus,
            plan.texts,
            seed=plan.seed,
            seconds=seconds.texts,
        )
        batches = texts.usable(networks.config.depth).batches(recipe.rows, plan.seed)
        arms = []
        for name, start in starts.items():
            params, facts = train(
                name,
                start,
                plan,
                recipe,
                start.first,
                steps[name].result(),
                batches,
                first=0,
                seconds=seconds.arm,
                log=out / "capacity.jsonl",
            )
            facts |= dataclasses.asdict(sizes[name]) | {
                "recipe": recipe_name,
                "parameters": int(sum(np.size(value) for value in params.values())),
                "texts": len(texts.tokens),
            }
            arms.append(Arm(name=name, trio=with_weaver(start, params), facts=facts))
    return arms
