"""How often drafts that cannot see the realised tokens are accepted, at the very best.

One future position has a distribution p_n over the vocabulary for each of N sampled ways to get
there. A draft q that is the same for all of them is accepted with probability sum_v min(p_n, q).
Two such drafts: the marginal, mean p_n, which a perfect drafter would learn (the paper's oracle),
and the best q of all, which no independent draft can beat, a point mass included.

Both come from samples, so each acceptance is bracketed: `held_out` judges q on samples it was not
made from and is too low on average, `in_sample` on its own samples and is too high.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bracket:
    """Acceptance probability between two estimates, float32 scalars.

    For the best draft both sides hold in expectation at every N. For the marginal `held_out` does
    (sum min(p, q) is concave in q); `in_sample` starts from 1 at N = 1 and meets it as N grows.
    """

    held_out: jax.Array
    in_sample: jax.Array


def overlap(p: jax.Array, q: jax.Array) -> jax.Array:
    """Acceptance probability of a draft from q where the target is p: [...] of two [..., V]."""
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def marginal_oracle(p: jax.Array) -> Bracket:
    """1 - expected total variation between the marginal and the conditionals p [N, V], N >= 2.

    `held_out` leaves each sample out of the marginal that it is compared with.
    """
    count = p.shape[0]
    if count < 2:
        raise ValueError(f"a marginal needs at least 2 samples, got {count}")
    total = p.sum(axis=0)
    # The difference may round to just below zero.
    others = jnp.maximum(total - p, 0.0) / (count - 1)
    return Bracket(held_out=overlap(p, others).mean(), in_sample=overlap(p, total / count).mean())


def best_oracle(p: jax.Array) -> Bracket:
    """Acceptance of the best draft that is the same for all conditionals p [N, V], N even.

    `held_out` finds the draft on one half of the samples and judges it on the other, both ways.
    """
    count = p.shape[0]
    if count < 2 or count % 2:
        raise ValueError(f"two halves need an even number of samples, got {count}")
    first, second = p[: count // 2], p[count // 2 :]
    crossed = overlap(second, best_draft(first)).mean() + overlap(first, best_draft(second)).mean()
    return Bracket(held_out=crossed / 2, in_sample=overlap(p, best_draft(p)).mean())


def best_draft(p: jax.Array) -> jax.Array:
    """The distribution q [V] with the largest mean over n of sum_v min(p[n, v], q[v]).

    What q[v] adds next is the share of samples with p[n, v] above it, so mass goes wherever that
    share is largest: every q[v] rises along the sorted samples at once, until the sum is 1. Within
    a level all entries add alike, and the last one is filled in proportion.

    Args:
      p: [N, V] float32, distributions.
    """
    levels = jnp.sort(p, axis=0)
    sums = levels.sum(axis=-1)  # at most 1 at the first level, at least 1 at the last
    above = jnp.argmax(sums >= 1.0).astype(jnp.int32)
    # Rounding may leave all sums just below 1.
    above = jnp.where(sums[-1] < 1.0, p.shape[0] - 1, above)
    below = jnp.maximum(above - 1, 0)
    gap = sums[above] - sums[below]
    share = jnp.where(gap > 0, (1.0 - sums[below]) / jnp.where(gap > 0, gap, 1.0), 1.0)
    return levels[below] + jnp.clip(share, 0.0, 1.0) * (levels[above] - levels[below])
