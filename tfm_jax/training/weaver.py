"""Trains a Weaver on texts of its verifier (section 2 of arXiv 2607.06763; LK losses).

Frozen verifier and drafter run over each text. At random anchors the Weaver is fed the true path,
all depths in one pass, and learns the verifier's distribution after it, over the drafter's pool.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tfm_jax.config import WeaverConfig
from tfm_jax.decoding.state import Trio
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.layers import project
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.models.weaver import Weaver, pool_logits
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.dflash import Batch, accepted_length, draft_blocks, sample_anchors
from tfm_jax.training.losses import (
    drawing_noise,
    lk_loss,
    mean_over,
    pool_terms,
    tree_reach,
    without_padding,
)
from tfm_jax.training.parallel import Spread
from tfm_jax.training.report import Record
from tfm_jax.training.settings import check_count, check_number, check_share
from tfm_jax.training.trainer import (
    Loss,
    OptimiserConfig,
    Params,
    TrainState,
    fill,
    fit,
    flatten,
)

# Up to this many times the pool, scoring the whole vocabulary is cheaper than gathering rows.
_DENSE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeaverRecipe:
    """How a Weaver is trained.

    Attributes:
      rows: texts a step.
      anchors: paths a text.
      mode, eta, scale: of the LK loss, see `lk_weight`.
      nodes: rows count as far as a tree of so many nodes reaches, see `tree_reach`; 0 counts all
        rows alike.
      noise: share of the loss that is the cross-entropy of a tree's own scores: with the pools and
        the noise of a tree that knows what drew the text; without noise at temperature 0.
    """

    rows: int = 64
    anchors: int = 16
    mode: Literal["fixed", "position", "depth"] = "depth"
    eta: float = 3.0
    scale: float = 1.0
    nodes: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_count("rows", self.rows)
        check_count("anchors", self.anchors)
        check_count("nodes", self.nodes, least=0)
        check_share("noise", self.noise)
        if self.mode not in ("fixed", "position", "depth"):
            raise ValueError(f"mode must be fixed, position or depth, got {self.mode!r}")
        check_number("eta", self.eta)
        check_share("scale", self.scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PathScores:
    """Candidates along teacher-forced paths; entry d scores the token at depth d + 1.

    Attributes:
      ids: [..., D, P] int32.
      prior: [..., D, P] float32 drafter's logits, -inf outside the pool.
      logits: [..., D, P] float32 Weaver's logits, -inf outside the pool.
      target: [..., D, P] float32 log-probabilities that the verifier drew the text by: at
        temperature 1 its own over all tokens, at 0 the path's token alone. They sum to the mass of
        the candidates.
      label: [..., D] int32, the path's own next token.
      drawn: [..., D] float32 log-probability of that token as a tree scores it, -inf off its pool;
        where noise is shared, pools and scores are those under the noise that drew the token.
    """

    ids: jax.Array
    prior: jax.Array
    logits: jax.Array
    target: jax.Array
    label: jax.Array
    drawn: jax.Array


def train_weaver(
    config: WeaverConfig,
    verifier: Verifier,
    drafter: Drafter,
    texts: Continuations,
    optimiser: OptimiserConfig,
    recipe: WeaverRecipe,
    *,
    vocab_limit: int,
    start: dict[str, np.ndarray] | None = None,
    seed: int = 0,
    log: Path | None = None,
    log_every: int = 50,
    seconds: float | None = None,
    checkpoints: Checkpoints | None = None,
    on_record: Callable[[Record], None] | None = None,
    spread: Spread | None = None,
) -> TrainState:
    """Trains a Weaver; the state holds float32 parameters.

    Args:
      config: of the Weaver; its depth must not exceed the drafter's.
      verifier, drafter: frozen, in the dtype to compute in.
      texts: the verifier's own. Those without room for a path are left out and counted.
      optimiser: optimiser and number of steps.
      recipe: loss and batch.
      vocab_limit: ids from here on are padding, see `Model.vocab_limit`.
      start: parameters to start from, by dotted path; random ones if not given.
      seed: of the initial weights, the anchors and the order of the texts.
      log, log_every, seconds, checkpoints, on_record, spread: see `fit`.

    Raises:
      ValueError: no text has room for a path after its prompt, one holds padding or was drawn at
        another temperature than 0 or 1, or the depths do not fit.
    """
    if config.depth > drafter.config.depth:
        raise ValueError(
            f"the Weaver scores {config.depth} depths, the drafter drafts {drafter.config.depth}"
        )
    texts.check(vocab_limit)
    usable, facts = texts.counted(config.depth, "weaver")
    rows = usable.batches(recipe.rows, seed)
    spread = spread or Spread()
    frozen = spread.copy(Trio(verifier=verifier, drafter=drafter))
    return fit(
        initial_weaver(config, start, seed),
        weaver_objective(config, recipe, vocab_limit=vocab_limit),
        lambda step: (frozen, spread.split(rows(step))),
        optimiser,
        seed=seed,
        log=log,
        log_every=log_every,
        title="weaver",
        seconds=seconds,
        dtype=verifier.dtype,
        tokens=recipe.rows * texts.tokens.shape[1],
        facts=facts,
        checkpoints=checkpoints,
        on_record=on_record,
        spread=spread,
    )


def initial_weaver(
    config: WeaverConfig, start: Mapping[str, np.ndarray] | None = None, seed: int = 0
) -> Params:
    """Parameters before training: those given, else random ones that score as the drafter does.

    Raises:
      ValueError: the parameters given are not those of the configuration.
    """
    params = flatten(Weaver(config, rngs=nnx.Rngs(seed)))
    if start is None:
        return params
    if {k: v.shape for k, v in start.items()} != {k: v.shape for k, v in params.items()}:
        raise ValueError("the parameters to start from do not fit the configuration")
    return {path: jnp.asarray(start[path], jnp.float32) for path in params}


def weaver_objective(config: WeaverConfig, recipe: WeaverRecipe, *, vocab_limit: int) -> Loss:
    """`weaver_loss` as a function of parameters, (networks, texts) and key."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Weaver(config, rngs=nnx.Rngs(0))))

    def loss(params: Params, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        frozen, texts = batch
        trio = dataclasses.replace(frozen, weaver=fill(graph, params))
        return weaver_loss(trio, texts, key, recipe, vocab_limit=vocab_limit)

    return loss


def weaver_loss(
    trio: Trio, texts: Batch, key: jax.Array, recipe: WeaverRecipe, *, vocab_limit: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of a batch of texts and its metrics, those of the plain marginals beside them.

    Args:
      trio: verifier and drafter are frozen.
      texts: see `Continuations.batches`.
      key: of the anchors.
      recipe: loss and number of anchors.
      vocab_limit: static; ids from here on are padding.
    """

    def one(
        tokens: jax.Array, first: jax.Array, temperature: jax.Array, key: jax.Array
    ) -> tuple[PathScores, jax.Array]:
        anchors, keep = sample_anchors(key, first, tokens.shape[0] - trio.depth, recipe.anchors)
        scores = path_scores(
            trio,
            tokens,
            anchors,
            keep,
            temperature,
            vocab_limit=vocab_limit,
            noise_key=jax.random.fold_in(key, 0) if recipe.noise else None,
        )
        return scores, keep

    keys = jax.random.split(key, texts["tokens"].shape[0])
    scores, keep = jax.vmap(one)(texts["tokens"], texts["first"], texts["temperature"], keys)
    valid = jnp.broadcast_to(keep[..., None], scores.label.shape)
    terms = pool_terms(scores.logits, scores.target, valid)
    reach = tree_reach(scores.drawn, recipe.nodes) if recipe.nodes else None
    value = lk_loss(
        terms,
        mode=recipe.mode,
        eta=recipe.eta,
        scale=recipe.scale,
        reach=reach,
        drawn=scores.drawn if recipe.noise else None,
        share=recipe.noise,
    )
    prior = pool_terms(scores.prior, scores.target, valid)
    in_pool = (scores.ids == scores.label[..., None]) & (scores.prior != -jnp.inf)
    greedy = (texts["temperature"] == 0)[:, None]
    metrics = {
        "pool_recall": mean_over(in_pool.any(axis=-1).astype(jnp.float32), valid),
        "pool_mass": mean_over(terms.pool_mass, valid),
        "kl": mean_over(terms.kl, valid),
        "tv": _by_depth(terms.tv, valid),
        "tv_marginals": _by_depth(prior.tv, valid),
        "idle_rows": jnp.sum(~keep.any(axis=-1)),
    }
    for name, logits, at in (("", scores.logits, terms), ("_marginals", scores.prior, prior)):
        best = jnp.take_along_axis(scores.ids, jnp.argmax(logits, -1)[..., None], -1)[..., 0]
        hits = (best == scores.label) & valid
        metrics[f"length_greedy{name}"] = accepted_length(hits, keep & greedy)
        metrics[f"length_sampled{name}"] = accepted_length(at.alpha, keep & ~greedy)
    return value, metrics


def path_scores(
    trio: Trio,
    tokens: jax.Array,
    anchors: jax.Array,
    keep: jax.Array,
    temperature: jax.Array,
    *,
    vocab_limit: int,
    noise_key: jax.Array | None = None,
) -> PathScores:
    """Scores along the true path after each of N anchors of one text.

    The Weaver sees what it sees in decoding: the verifier's state that predicted the anchor, the
    drafter's states of the block, and the path's tokens.

    Args:
      trio: the networks; gradients reach the Weaver, and the states that the drafter gives it.
      tokens: [T] int32.
      anchors, keep: [N], from `sample_anchors`.
      temperature: float32 scalar that the text was drawn at, 0 or 1.
      vocab_limit: static; ids from here on are padding and no candidates.
      noise_key: of the noise that drew the path, known to the tree; not shared without a key. At
        temperature 0 there is none.
    """
    verifier, drafter, weaver = trio.verifier, trio.drafter, trio.weaver
    assert drafter is not None
    assert weaver is not None
    depth = trio.depth
    hidden = verifier.forward(tokens, trio.taps)
    drafted = draft_blocks(verifier, drafter, tokens, hidden.features, anchors, keep)
    drafted = drafted[:, 1 : depth + 1]  # [N, D, H]
    path = anchors[:, None] + jnp.arange(depth)  # [N, D]
    query = jax.vmap(weaver.chain)(
        hidden.final[anchors - 1], drafted, verifier.embed_tokens(tokens[path])
    )
    label = tokens[path + 1]
    prior = project(drafted, verifier.output_rows, out_dtype=jnp.float32)  # [N, D, V]
    prior = jax.lax.stop_gradient(without_padding(prior, vocab_limit))
    target = without_padding(verifier.logits(hidden.final), vocab_limit)
    target = jax.nn.log_softmax(target, axis=-1)[path]  # [N, D, V]
    own = label[..., None] == jnp.arange(prior.shape[-1])
    target = jnp.where(temperature > 0, target, jnp.where(own, 0.0, -jnp.inf))

    score = functools.partial(_score, verifier.output_rows, query, prior)
    size = min(weaver.config.candidate_pool_size, prior.shape[-1])
    plain = score(prior, size)
    seen, noise = plain, None
    if noise_key is not None:
        noise = drawing_noise(noise_key, target, own)
        seen = score(prior + noise, size)
    return PathScores(
        ids=plain.ids,
        prior=plain.of(prior),
        logits=plain.logits,
        target=plain.at(target),
        label=label,
        drawn=_chosen_log_prob(seen, label, noise),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pool:
    """Candidates and Weaver's logits for them, [..., P]; -inf outside the pool.

    A small vocabulary is scored whole, of a large one only the pool's rows are gathered: with
    `gathered`, the P candidates are the pool.
    """

    ids: jax.Array
    logits: jax.Array
    gathered: bool

    def at(self, values: jax.Array) -> jax.Array:
        """Values [..., V] of the candidates."""
        return jnp.take_along_axis(values, self.ids, axis=-1) if self.gathered else values

    def of(self, logits: jax.Array) -> jax.Array:
        """Logits [..., V] of the candidates, -inf outside the pool."""
        return jnp.where(self.logits == -jnp.inf, -jnp.inf, self.at(logits))


def _score(
    rows: jax.Array, query: jax.Array, prior: jax.Array, ranking: jax.Array, size: int
) -> _Pool:
    """Weaver's logits for the `size` candidates that rank highest.

    Args:
      rows: [V, H] verifier's output matrix.
      query: [N, D, H] Weaver's.
      prior, ranking: [N, D, V] float32.
      size: static.
    """
    if rows.shape[0] > _DENSE * size:
        _, ids = jax.lax.top_k(ranking, size)
        own = jnp.take_along_axis(prior, ids, axis=-1)
        return _Pool(ids=ids, logits=jax.vmap(pool_logits)(query, own, rows[ids]), gathered=True)
    ids = jnp.broadcast_to(jnp.arange(rows.shape[0]), prior.shape)
    residual = project(query.astype(rows.dtype), rows, out_dtype=jnp.float32)
    inside = ranking >= kth_largest(ranking, size)[..., None]
    return _Pool(ids=ids, logits=jnp.where(inside, prior + residual, -jnp.inf), gathered=False)


def _chosen_log_prob(pool: _Pool, label: jax.Array, noise: jax.Array | None) -> jax.Array:
    """Log-probability [..., D] of each label among the candidates; -inf where it is none.

    Args:
      pool: [..., D, P] candidates.
      label: [..., D] int32.
      noise: [..., D, V] that is added to their logits, if any.
    """
    scores = pool.logits if noise is None else pool.logits + pool.at(noise)
    own = (pool.ids == label[..., None]) & (scores != -jnp.inf)
    chosen = jnp.sum(jnp.where(own, scores, 0.0), axis=-1)
    normaliser = jax.nn.logsumexp(scores, axis=-1)
    return jnp.where(own.any(axis=-1), chosen - normaliser, -jnp.inf)


def kth_largest(values: jax.Array, k: int) -> jax.Array:
    """The k-th largest entry of each row of float32 [..., V]: [...], without a sort.

    Floats in the order of their bits: the answer is found bit by bit, by counting.
    """
    if not 1 <= k <= values.shape[-1]:
        raise ValueError(f"k must lie in 1..{values.shape[-1]}, got {k}")
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order = jnp.where(bits & sign, ~bits, bits | sign)

    def next_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (sign >> i.astype(jnp.uint32))
        enough = jnp.sum(order >= trial[..., None], axis=-1) >= k
        return jnp.where(enough, trial, found)

    found = jax.lax.fori_loop(0, 32, next_bit, jnp.zeros(values.shape[:-1], jnp.uint32))
    bits = jnp.where(found & sign, found ^ sign, ~found)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _by_depth(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Mean over the valid rows for each depth, [D]."""
    axes = tuple(range(values.ndim - 1))
    total = jnp.sum(jnp.where(valid, values, 0.0), axis=axes)
    return total / jnp.maximum(jnp.sum(valid, axis=axes), 1)
