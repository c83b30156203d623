"""Trains a drafter and its Weaver together, each by its own loss.

A drafter trained alone keeps in its states what its marginals need. Here the Weaver's loss reaches
those states too, so that they also carry what tells one continuation from another. The marginals
still follow the drafter's loss alone: no gradient reaches them from the Weaver's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from tfm_jax.config import ConfigError, DrafterConfig, WeaverConfig, as_object, made
from tfm_jax.decoding.state import Trio
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.models.weaver import Weaver
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.dflash import DrafterRecipe, drafter_loss
from tfm_jax.training.parallel import Spread
from tfm_jax.training.report import Record
from tfm_jax.training.settings import check_number
from tfm_jax.training.trainer import Loss, OptimiserConfig, Params, TrainState, fill, fit
from tfm_jax.training.weaver import WeaverRecipe, weaver_loss

_NETWORKS = ("drafter", "weaver")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairRecipe:
    """How drafter and Weaver are trained together.

    Attributes:
      drafter, weaver: the losses, of the same rows.
      weight: of the Weaver's loss. The optimiser is blind to the scale of a gradient, so this
        matters for the drafter alone; at 4 both losses pull at the pocket trio's drafter alike.
    """

    drafter: DrafterRecipe
    weaver: WeaverRecipe
    weight: float = 4.0

    def __post_init__(self) -> None:
        if self.drafter.rows != self.weaver.rows:
            raise ValueError(
                "drafter and weaver learn from the same rows, got "
                f"{self.drafter.rows} and {self.weaver.rows}"
            )
        check_number("weight", self.weight)

    @property
    def rows(self) -> int:
        """Texts a step."""
        return self.drafter.rows


def pair_recipe(entries: Mapping[str, Any], where: str) -> PairRecipe:
    """A recipe from `drafter`, `weaver`, `weight`, and the `rows` that both have.

    Raises:
      ConfigError: an entry that is not known, missing or out of range; `where` names them.
    """
    known = {"rows", "drafter", "weaver", "weight"}
    if unknown := sorted(set(entries) - known):
        raise ConfigError(f"{where} has unknown entries: {', '.join(unknown)}")
    kinds = {"drafter": DrafterRecipe, "weaver": WeaverRecipe}
    rows = {"rows": entries["rows"]} if "rows" in entries else {}
    losses = {}
    for name, kind in kinds.items():
        own = as_object(entries.get(name, {}), f"{where}.{name}")
        losses[name] = made(kind, {**rows, **own}, f"{where}.{name}")
    weight = {"weight": entries["weight"]} if "weight" in entries else {}
    return made(PairRecipe, {**losses, **weight}, where)


def joined(drafter: Mapping[str, Any], weaver: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of both networks in one dictionary, by dotted path."""
    both = zip(_NETWORKS, (drafter, weaver), strict=True)
    return {f"{name}.{path}": value for name, own in both for path, value in own.items()}


def parted(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of the drafter and of the Weaver: the inverse of `joined`."""
    drafter, weaver = (
        {path.removeprefix(f"{name}."): v for path, v in params.items() if path.startswith(name)}
        for name in _NETWORKS
    )
    return drafter, weaver


def train_pair(
    drafter: DrafterConfig,
    weaver: WeaverConfig,
    verifier: Verifier,
    texts: Continuations,
    optimiser: OptimiserConfig,
    recipe: PairRecipe,
    *,
    start: Params,
    vocab_limit: int,
    seed: int = 0,
    log: Path | None = None,
    log_every: int = 50,
    seconds: float | None = None,
    checkpoints: Checkpoints | None = None,
    on_record: Callable[[Record], None] | None = None,
    spread: Spread | None = None,
) -> TrainState:
    """Trains both networks; the state holds float32 parameters as `joined` makes them.

    Args:
      drafter, weaver: configurations; the Weaver's depth must not exceed the drafter's.
      verifier: frozen, in the dtype to compute in.
      texts: the verifier's own. Those without room for a block are left out and counted.
      optimiser: optimiser and number of steps.
      recipe: losses and batch.
      start: parameters to start from, see `joined`.
      vocab_limit: ids from here on are padding, see `Model.vocab_limit`.
      seed: of the anchors and the order of the texts.
      log, log_every, seconds, checkpoints, on_record, spread: see `fit`.

    Raises:
      ValueError: no text has room for a block after its prompt, one holds padding or was drawn at
        another temperature than 0 or 1, or the depths do not fit.
    """
    if weaver.depth > drafter.depth:
        raise ValueError(
            f"the Weaver scores {weaver.depth} depths, the drafter drafts {drafter.depth}"
        )
    texts.check(vocab_limit)
    usable, facts = texts.counted(drafter.depth, "pair")
    rows = usable.batches(recipe.rows, seed)
    spread = spread or Spread()
    frozen = spread.copy(verifier)
    return fit(
        start,
        pair_objective(drafter, weaver, recipe, vocab_limit=vocab_limit),
        lambda step: (frozen, spread.split(rows(step))),
        optimiser,
        seed=seed,
        log=log,
        log_every=log_every,
        title="pair",
        seconds=seconds,
        dtype=verifier.dtype,
        tokens=recipe.rows * texts.tokens.shape[1],
        facts=facts,
        checkpoints=checkpoints,
        on_record=on_record,
        spread=spread,
    )


def pair_objective(
    drafter: DrafterConfig, weaver: WeaverConfig, recipe: PairRecipe, *, vocab_limit: int
) -> Loss:
    """Both losses as a function of parameters, (verifier, texts) and key."""
    drafters, _ = nnx.split(nnx.eval_shape(lambda: Drafter(drafter, rngs=nnx.Rngs(0))))
    weavers, _ = nnx.split(nnx.eval_shape(lambda: Weaver(weaver, rngs=nnx.Rngs(0))))

    def loss(params: Params, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        verifier, texts = batch
        own, weavers_own = parted(params)
        network = fill(drafters, own)
        trio = Trio(verifier=verifier, drafter=network, weaver=fill(weavers, weavers_own))
        first, second = jax.random.split(key)
        marginal, of_drafter = drafter_loss(
            verifier, network, texts, first, recipe.drafter, vocab_limit=vocab_limit
        )
        conditional, of_weaver = weaver_loss(
            trio, texts, second, recipe.weaver, vocab_limit=vocab_limit
        )
        losses = {"loss_drafter": marginal, "loss_weaver": conditional}
        metrics = losses | {"cross_entropy": of_drafter["cross_entropy"]} | of_weaver
        return marginal + recipe.weight * conditional, metrics

    return loss
