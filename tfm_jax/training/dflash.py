"""Trains a DFlash drafter on texts of its verifier (arXiv 2602.06036), many blocks a text.

The frozen verifier runs over each text and gives features, and the distribution that each token
was drawn from. A block predicts the tokens after its anchor without knowing them, so over many
texts its best answer is their marginal given the text before the anchor. Two unbiased targets for
that: the drawn tokens themselves, or the distributions along the drawn path, whose average is the
same marginal at lower variance (`distil`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from tfm_jax.config import DrafterConfig
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.layers import EXACT, project
from tfm_jax.models.qwen36 import Hidden, Verifier
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.losses import decayed_cross_entropy, dpace_cross_entropy, without_padding
from tfm_jax.training.parallel import Spread
from tfm_jax.training.report import Record
from tfm_jax.training.settings import check_count
from tfm_jax.training.trainer import (
    Loss,
    OptimiserConfig,
    Params,
    TrainState,
    fill,
    fit,
    flatten,
)

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
    """How a drafter is trained.

    Attributes:
      rows: texts a step.
      anchors: blocks a text.
      loss: `decayed` weighs an offset less the further it lies, `dpace` by what it adds to the
        expected accepted length.
      gamma: of the decay.
      distil: follow the verifier's distributions and not the drawn tokens alone.
    """

    rows: int = 64
    anchors: int = 64
    loss: Literal["decayed", "dpace"] = "decayed"
    gamma: float = 7.0
    distil: bool = True

    def __post_init__(self) -> None:
        check_count("rows", self.rows)
        check_count("anchors", self.anchors)
        if not (isinstance(self.gamma, int | float) and self.gamma > 0):
            raise ValueError(f"gamma must be positive, got {self.gamma!r}")
        if not isinstance(self.distil, bool):
            raise ValueError(f"distil must be true or false, got {self.distil!r}")
        if self.loss not in ("decayed", "dpace"):
            raise ValueError(f"loss must be decayed or dpace, got {self.loss!r}")
        if self.loss == "dpace" and self.distil:
            raise ValueError("dpace weighs by the probability of drawn tokens: set distil = False")


def train_drafter(
    config: DrafterConfig,
    verifier: Verifier,
    texts: Continuations,
    optimiser: OptimiserConfig,
    recipe: DrafterRecipe,
    *,
    vocab_limit: int,
    seed: int = 0,
    log: Path | None = None,
    log_every: int = 50,
    seconds: float | None = None,
    checkpoints: Checkpoints | None = None,
    on_record: Callable[[Record], None] | None = None,
    spread: Spread | None = None,
) -> TrainState:
    """Trains a new drafter; the state holds float32 parameters.

    Args:
      config: of the drafter.
      verifier: frozen, in the dtype to compute in.
      texts: the verifier's own. Those without room for a block are left out and counted.
      optimiser: optimiser and number of steps.
      recipe: loss and batch.
      vocab_limit: ids from here on are padding, see `Model.vocab_limit`.
      seed: of the initial weights, the anchors and the order of the texts.
      log, log_every, seconds, checkpoints, on_record, spread: see `fit`.

    Raises:
      ValueError: no text has room for a block after its prompt, or one holds padding or was drawn
        at another temperature than 0 or 1.
    """
    texts.check(vocab_limit)
    usable, facts = texts.counted(config.depth, "dflash")
    rows = usable.batches(recipe.rows, seed)
    spread = spread or Spread()
    verifier = spread.copy(verifier)
    return fit(
        initial_drafter(config, seed),
        drafter_objective(config, recipe, vocab_limit=vocab_limit),
        lambda step: (verifier, spread.split(rows(step))),
        optimiser,
        seed=seed,
        log=log,
        log_every=log_every,
        title="dflash",
        seconds=seconds,
        dtype=verifier.dtype,
        tokens=recipe.rows * texts.tokens.shape[1],
        facts=facts,
        checkpoints=checkpoints,
        on_record=on_record,
        spread=spread,
    )


def initial_drafter(config: DrafterConfig, seed: int = 0) -> Params:
    """Random parameters before training."""
    return flatten(Drafter(config, rngs=nnx.Rngs(seed)))


def drafter_objective(config: DrafterConfig, recipe: DrafterRecipe, *, vocab_limit: int) -> Loss:
    """`drafter_loss` as a function of parameters, (verifier, texts) and key."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))

    def loss(params: Params, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        verifier, texts = batch
        drafter = fill(graph, params)
        return drafter_loss(verifier, drafter, texts, key, recipe, vocab_limit=vocab_limit)

    return loss


def drafter_loss(
    verifier: Verifier,
    drafter: Drafter,
    texts: Batch,
    key: jax.Array,
    recipe: DrafterRecipe,
    *,
    vocab_limit: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of a batch of texts and its metrics.

    Args:
      verifier: frozen.
      drafter: in the dtype to compute in.
      texts: see `Continuations.batches`.
      key: of the anchors.
      recipe: loss and number of anchors.
      vocab_limit: static; ids from here on are padding.
    """
    depth = drafter.config.depth

    def one(
        tokens: jax.Array, first: jax.Array, temperature: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, ...]:
        hidden = verifier.forward(tokens, drafter.config.target_layer_ids)
        anchors, keep = sample_anchors(key, first, tokens.shape[0] - depth, recipe.anchors)
        drafted = draft_blocks(verifier, drafter, tokens, hidden.features, anchors, keep)[:, 1:]
        logits = project(drafted, verifier.output_rows, out_dtype=jnp.float32)  # [N, D, V]
        logits = without_padding(logits, vocab_limit)
        at = anchors[:, None] + jnp.arange(1, depth + 1)  # [N, D]
        target = target_rows(
            verifier, hidden, tokens, temperature, recipe.distil, vocab_limit=vocab_limit
        )
        chosen = jnp.sum(drafted.astype(jnp.float32) * target[at], axis=-1)
        log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
        valid = jnp.broadcast_to(keep[:, None], log_probs.shape)
        return log_probs, valid, (jnp.argmax(logits, axis=-1) == tokens[at]) & valid

    texts_keys = jax.random.split(key, texts["tokens"].shape[0])
    log_probs, valid, hits = jax.vmap(one)(
        texts["tokens"], texts["first"], texts["temperature"], texts_keys
    )
    # Offset 0 is the anchor, which never counts.
    padded, counted = (jnp.pad(x, ((0, 0), (0, 0), (1, 0))) for x in (log_probs, valid))
    if recipe.loss == "decayed":
        value = decayed_cross_entropy(padded, counted, gamma=recipe.gamma)
    else:
        value = dpace_cross_entropy(padded, counted, batch_size=texts["tokens"].shape[0])
    blocks = jnp.maximum(jnp.sum(valid[..., 0]), 1)
    greedy = (texts["temperature"] == 0)[:, None]
    return value, {
        "accuracy": jnp.sum(hits, axis=(0, 1)) / blocks,
        "cross_entropy": -jnp.sum(log_probs * valid, axis=(0, 1)) / blocks,
        "length_greedy": accepted_length(hits, valid[..., 0] & greedy),
        "length_sampled": accepted_length(hits, valid[..., 0] & ~greedy),
        "idle_rows": jnp.sum(~valid[..., 0].any(axis=-1)),
    }


def sample_anchors(
    key: jax.Array, first: jax.Array, end: int, count: int
) -> tuple[jax.Array, jax.Array]:
    """Up to `count` distinct positions in first .. end - 1, sorted, and which of them are real.

    Args:
      key: of the draw.
      first: int32 scalar, at least 1: an anchor needs a state that predicted it.
      end: static; position end - 1 is the last with a whole block after it.
      count: static.

    Returns:
      anchors [count] int32 and keep [count] bool; positions that are not kept are `first`.
    """
    positions = jnp.arange(end)
    noise = jnp.where(positions >= first, jax.random.uniform(key, (end,)), -1.0)
    top, chosen = jax.lax.top_k(noise, min(count, end))
    chosen = jnp.sort(jnp.where(top >= 0, chosen, end))
    chosen = jnp.pad(chosen, (0, count - chosen.size), constant_values=end)
    keep = chosen < end
    return jnp.where(keep, chosen, first).astype(jnp.int32), keep


def draft_blocks(
    verifier: Verifier,
    drafter: Drafter,
    tokens: jax.Array,
    features: jax.Array,
    anchors: jax.Array,
    keep: jax.Array,
) -> jax.Array:
    """Drafter's hidden states [N, B, H] of one text's blocks, as decoding would compute them.

    Args:
      verifier: lends its embedding.
      drafter: the drafter.
      tokens: [T] int32.
      features: [T, F * H], from `Verifier.forward`.
      anchors, keep: [N], from `sample_anchors`.
    """
    config = drafter.config
    blocks = jnp.full((anchors.shape[0], config.block_size), config.mask_token_id, jnp.int32)
    blocks = blocks.at[:, 0].set(tokens[anchors])
    return drafter.blocks(features, verifier.embed_tokens(blocks), anchors, keep)


def target_rows(
    verifier: Verifier,
    hidden: Hidden,
    tokens: jax.Array,
    temperature: jax.Array,
    distil: bool,
    *,
    vocab_limit: int,
) -> jax.Array:
    """What stands for each label's row of the output matrix, float32 [T, H].

    Cross-entropy with a distribution p is `logsumexp(z) - sum_v p_v z_v` for logits z = W h, and
    that sum is `(sum_v p_v W_v) . h`: soft labels cost no more than hard ones. Row i is the mean
    of W under the distribution that token i was drawn from; at temperature 0, or without
    `distil`, it is the token's own row.
    """
    weights = verifier.output_rows
    drawn = weights[tokens].astype(jnp.float32)
    if not distil:
        return drawn
    logits = without_padding(verifier.logits(hidden.final), vocab_limit)
    probabilities = jax.nn.softmax(logits, axis=-1).astype(weights.dtype)
    mean = jax.lax.dot_general(
        probabilities,
        weights,
        (((1,), (0,)), ((), ())),
        precision=EXACT if weights.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    # The state of row i predicts token i + 1.
    mean = jnp.roll(mean, 1, axis=0)
    return jnp.where(temperature > 0, mean, drawn)


def accepted_length(hits: jax.Array, counted: jax.Array) -> jax.Array:
    """Mean accepted length, bonus included, of chains [..., D] that hold up to the first miss.

    Args:
      hits: [..., D], per depth whether it is accepted, or how probably.
      counted: [...] bool, chains that count; without any the mean is 0.
    """
    lengths = 1.0 + jnp.sum(jnp.cumprod(hits.astype(jnp.float32), axis=-1), axis=-1)
    return jnp.sum(jnp.where(counted, lengths, 0.0)) / jnp.maximum(jnp.sum(counted), 1)
