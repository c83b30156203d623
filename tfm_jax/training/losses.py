"""Training losses of the drafter and of the Weaver; rows that do not count never give NaN.

Drafter: cross-entropy that decays with the offset (DFlash, arXiv 2602.06036, equation 4) or is
weighted by the expected accepted length (D-PACE). Weaver: LK losses (arXiv 2602.23881), which mix
KL(p || q) with the total variation, one minus the acceptance probability sum_v min(p_v, q_v).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from tfm_jax.decoding.sampling import hide_padding
from tfm_jax.models.layers import MASKED


def without_padding(logits: jax.Array, vocab_limit: int) -> jax.Array:
    """Logits [..., V] with -inf from id `vocab_limit` on, as decoding hides what is no token."""
    if vocab_limit == logits.shape[-1]:
        return logits  # nothing to hide, and no operation that could move a bit
    return hide_padding(logits, jnp.int32(vocab_limit))


def decayed_cross_entropy(log_probs: jax.Array, valid: jax.Array, *, gamma: float) -> jax.Array:
    """Weighted mean of `-log_probs` with weight exp(-(j - 1) / gamma) at offset j; 0 if no row.

    Args:
      log_probs: [..., B], log-probability of the label at offset j from the anchor; offset 0 is
        the anchor itself and never counts.
      valid: [..., B] bool.
      gamma: 7 for blocks of 16, 5 for 10, 4 for 8; infinity weights all offsets alike.
    """
    if not gamma > 0:
        raise ValueError(f"gamma must be positive, got {gamma}")
    offsets = jnp.arange(log_probs.shape[-1])
    weights = jnp.exp(-(offsets - 1).astype(jnp.float32) / gamma)
    weights = jnp.where(valid & (offsets > 0), weights, 0.0)
    loss = -jnp.sum(weights * jnp.where(weights > 0, log_probs, 0.0))
    total = jnp.sum(weights)
    return loss / jnp.where(total > 0, total, 1.0)


def dpace_cross_entropy(
    log_probs: jax.Array, valid: jax.Array, *, batch_size: int, alpha: float = 0.5
) -> jax.Array:
    """Sum of `-log_probs` weighted by what an offset adds to the accepted length, per sequence.

    With p_j the label's probability (no gradient), s_j = (1 - alpha) p_j + alpha and
    c_j = s_1 ... s_j, offset j weighs c_j + c_(j+1) + ... over the offsets that count.

    Args:
      log_probs: [..., B], as for `decayed_cross_entropy`.
      valid: [..., B] bool.
      batch_size: sequences that the blocks come from.
      alpha: 1 weighs an offset by the number of offsets from it on, 0 trusts p_j alone.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    counted = valid & (jnp.arange(log_probs.shape[-1]) > 0)
    log_probs = jnp.where(counted, log_probs, 0.0)
    probs = jnp.exp(jax.lax.stop_gradient(log_probs))
    # An offset that does not count has probability 1 here, so the length passes through it.
    smoothed = (1 - alpha) * probs + alpha
    reached = jnp.where(counted, jnp.cumprod(smoothed, axis=-1), 0.0)
    weights = jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)
    return -jnp.sum(weights * log_probs) / batch_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolTerms:
    """How the Weaver's conditional q over a pool compares with the verifier's p, for each row.

    Attributes:
      kl: [..., K] float32, KL of q from p renormalised over the pool.
      alpha: [..., K] float32, acceptance probability: sum over the pool of min(p, q).
      pool_mass: [..., K] float32, p's mass in the pool; alpha cannot exceed it.
      valid: [..., K] bool; a row that does not count has zeros above.
    """

    kl: jax.Array
    alpha: jax.Array
    pool_mass: jax.Array
    valid: jax.Array

    @property
    def tv(self) -> jax.Array:
        """Total variation, the mass that the pool misses included."""
        return jnp.where(self.valid, 1.0 - self.alpha, 0.0)


def pool_log_probs(target_logits: jax.Array, pool_ids: jax.Array) -> jax.Array:
    """The verifier's log-probabilities of the candidates, float32 [..., P]; -inf at ids < 0.

    They are normalised over the vocabulary, so they sum to the pool's mass.

    Args:
      target_logits: [..., V].
      pool_ids: [..., P] int32.
    """
    logits = target_logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, jnp.maximum(pool_ids, 0), axis=-1)
    log_probs = chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.where(pool_ids >= 0, log_probs, -jnp.inf)


def pool_terms(draft_logits: jax.Array, target_log_probs: jax.Array, valid: jax.Array) -> PoolTerms:
    """Terms of the Weaver's losses; no gradient reaches the target.

    A candidate with a draft logit of -inf is padding and left out of both distributions.

    Args:
      draft_logits: [..., K, P] float32, from `pool_logits`.
      target_log_probs: [..., K, P] float32, from `pool_log_probs`.
      valid: [..., K] bool.
    """
    target = jax.lax.stop_gradient(target_log_probs)
    offered = valid[..., None] & (draft_logits != -jnp.inf)
    log_q = jax.nn.log_softmax(jnp.where(offered, draft_logits, MASKED), axis=-1)
    weighed = offered & (target != -jnp.inf)
    log_p = jnp.where(weighed, target, MASKED)
    p = jnp.where(weighed, jnp.exp(log_p), 0.0)
    inside = jnp.where(weighed, jax.nn.log_softmax(log_p, axis=-1), 0.0)
    gap = inside - jnp.where(weighed, log_q, 0.0)
    return PoolTerms(
        kl=jnp.sum(jnp.where(weighed, jnp.exp(inside) * gap, 0.0), axis=-1),
        alpha=jnp.sum(jnp.where(weighed, jnp.minimum(p, jnp.exp(log_q)), 0.0), axis=-1),
        pool_mass=jnp.sum(p, axis=-1),
        valid=valid,
    )


def lk_weight(
    terms: PoolTerms,
    *,
    mode: Literal["fixed", "position", "depth"] = "depth",
    eta: float = 3.0,
    scale: float = 1.0,
) -> jax.Array:
    """Weight lambda of the KL term for each row, float32 [..., K], without a gradient.

    `scale * exp(-eta * alpha)`: near `scale` where the distributions barely overlap, falling as
    they meet.

    Args:
      terms: of a batch; the last axis is the depth.
      mode: `position` takes each row's own alpha, `depth` its mean over the valid rows of the
        depth, `fixed` gives `scale` everywhere.
      eta: how fast the weight falls with alpha.
      scale: the weight at alpha 0.
    """
    if mode not in ("fixed", "position", "depth"):
        raise ValueError(f"mode must be fixed, position or depth, got {mode!r}")
    alpha = jax.lax.stop_gradient(terms.alpha)
    if mode == "fixed":
        return jnp.full_like(alpha, scale)
    if mode == "depth":
        others = tuple(range(alpha.ndim - 1))
        count = jnp.sum(terms.valid, axis=others, keepdims=True)
        alpha = jnp.sum(jnp.where(terms.valid, alpha, 0.0), axis=others, keepdims=True)
        alpha = jnp.broadcast_to(alpha / jnp.maximum(count, 1), terms.alpha.shape)
    return scale * jnp.exp(-eta * alpha)


def lk_loss(
    terms: PoolTerms,
    *,
    mode: Literal["fixed", "position", "depth"] = "depth",
    eta: float = 3.0,
    scale: float = 1.0,
    reach: jax.Array | None = None,
    drawn: jax.Array | None = None,
    share: float = 0.0,
) -> jax.Array:
    """Mean over valid rows of `lambda * kl + (1 - lambda) * tv`.

    Args:
      terms, mode, eta, scale: see `lk_weight`.
      reach: [..., K] weight of each row in the mean, from `tree_reach`; all alike if not given.
      drawn: [..., K] log-probability of each row's token in the tree's own scores; -inf, where
        nothing can be learned, is left out.
      share: of `-drawn` in every row's loss.
    """
    weight = lk_weight(terms, mode=mode, eta=eta, scale=scale)
    values = weight * terms.kl + (1.0 - weight) * terms.tv
    if drawn is not None:
        values = (1.0 - share) * values - share * jnp.where(drawn > -jnp.inf, drawn, 0.0)
    if reach is None:
        return mean_over(values, terms.valid)
    total = jnp.sum(jnp.where(terms.valid, reach, 0.0))
    return jnp.sum(jnp.where(terms.valid, reach * values, 0.0)) / jnp.maximum(total, 1e-6)


def tree_reach(label_log_probs: jax.Array, nodes: int) -> jax.Array:
    """How surely a tree of `nodes` nodes holds the parent of each row, float32 [..., K].

    min(1, nodes * q), q being the draft's probability of the path before the row: no more than
    1 / q paths of a depth are as probable. What is learned beyond the tree's reach is of no use
    to it. Has no gradient.

    Args:
      label_log_probs: [..., K], of the path's own tokens under the draft; -inf is allowed.
      nodes: of the tree.
    """
    if nodes < 1:
        raise ValueError(f"nodes must be positive, got {nodes}")
    before = jnp.cumsum(jax.lax.stop_gradient(label_log_probs), axis=-1)[..., :-1]
    before = jnp.pad(before, [(0, 0)] * (before.ndim - 1) + [(1, 0)])
    return jnp.minimum(1.0, nodes * jnp.exp(before))


def drawing_noise(key: jax.Array, target_log_probs: jax.Array, drawn: jax.Array) -> jax.Array:
    """Gumbel noise [..., P] of the candidates, given which token it drew from the target.

    The largest `log p + noise` of all tokens has a Gumbel distribution whichever token it belongs
    to, and those of the others are Gumbel variables cut off there. Zero at log-probability -inf,
    and in rows with a single possible candidate: nothing was drawn there.

    Args:
      key: of the draw.
      target_log_probs: [..., P] float32, of a distribution over these candidates and others.
      drawn: [..., P] bool, the candidate that was drawn; none where it is not among them.
    """
    rest, largest = jax.random.split(key)
    known = target_log_probs != -jnp.inf
    log_p = jnp.where(known, target_log_probs, 0.0)
    top = jax.random.gumbel(largest, (*log_p.shape[:-1], 1), jnp.float32)
    free = log_p + jax.random.gumbel(rest, log_p.shape, jnp.float32)
    below = -jnp.logaddexp(-top, -free)
    noisy = known & (jnp.sum(known, axis=-1, keepdims=True) > 1)
    return jnp.where(noisy, jnp.where(drawn, top, below) - log_p, 0.0)


def mean_over(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Mean of the valid entries; 0 if there is none."""
    return jnp.sum(jnp.where(valid, values, 0.0)) / jnp.maximum(jnp.sum(valid), 1)
