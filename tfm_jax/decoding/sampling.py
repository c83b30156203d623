"""Choosing tokens from the verifier's logits, the same way in every method.

The noise of a position depends on the seed and the position alone. A sampled text is then a
function of the seed: drafting can change how fast it appears, never what it says.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from tfm_jax.decoding.state import Request

_COLDEST = 1e-30  # divides any float32 logit without touching the denormals
_BELOW_ONE, _LEAST = 1.0 - 2.0**-24, 2.0**-46  # what keeps the noise finite


def position_noise(request: Request, positions: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise [P, vocab] float32 for the tokens at `positions` [P]."""
    key = jax.random.key(request.seed)

    def at(position: jax.Array) -> jax.Array:
        coarse, fine = jax.random.split(jax.random.fold_in(key, position))
        # The 23 bits of one draw end at 15.9: in a large vocabulary several tokens would tie. The
        # second draw adds bits below them; token i has the same noise in every vocabulary.
        u = jax.random.uniform(coarse, (vocab,)) + 2.0**-23 * jax.random.uniform(fine, (vocab,))
        return -jnp.log(jnp.clip(-jnp.log1p(-jnp.minimum(u, _BELOW_ONE)), _LEAST, None))

    return jax.vmap(at)(positions)


def hide_padding(logits: jax.Array, vocab_limit: jax.Array) -> jax.Array:
    """Logits [..., V] with -inf at ids that no token has."""
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_limit, logits, -jnp.inf)


def choose(
    logits: jax.Array, depths: jax.Array, positions: jax.Array, request: Request
) -> jax.Array:
    """The target's token [N] int32 for every row of logits [N, V] float32.

    Greedy at temperature 0, lowest id on ties. Above it a draw from the filtered softmax by
    the Gumbel maximum.

    Args:
      logits: [N, V] float32.
      depths: [N] int32, row of `positions` that the row's token will stand at.
      positions: [P] int32, distinct positions.
    """
    chex.assert_shape(depths, logits.shape[:1])

    # Within the branches, where the mask joins what reads it: outside it would be a copy.
    def real() -> jax.Array:
        return hide_padding(logits, request.vocab_limit)

    def draw() -> jax.Array:
        scaled = cool(real(), request.temperature)
        filtered = (request.top_k > 0) | (request.top_p < 1) | (request.min_p > 0)
        scaled = jax.lax.cond(filtered, lambda: filter_logits(scaled, request), lambda: scaled)
        noise = position_noise(request, positions, logits.shape[-1])
        return jnp.argmax(scaled + noise[depths], axis=-1)

    def greedy() -> jax.Array:
        return jnp.argmax(real(), axis=-1)

    return jax.lax.cond(request.temperature > 0, draw, greedy).astype(jnp.int32)


def cool(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logits [..., V] over a temperature, best one zero: nothing overflows however cold it is."""
    above = logits - jnp.max(logits, axis=-1, keepdims=True)
    return above / jnp.maximum(temperature, _COLDEST)


def filter_logits(scaled: jax.Array, request: Request) -> jax.Array:
    """Logits [N, V], already divided by the temperature, with -inf outside the allowed set.

    Order: top-k, then top-p on what is left (a token stays while the probability before it is
    below top_p), then min-p against the best token. Ties are kept in order of id; the best token
    always stays.
    """
    vocab = scaled.shape[-1]
    ranked = jnp.sort(scaled, axis=-1, descending=True)
    k = jnp.where(request.top_k > 0, request.top_k, vocab)
    within = jnp.arange(vocab) < k
    ranked = jnp.where(within, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # Not by top_p alone: it may round to zero, and the running sum may reach one early.
    keep = (before < request.top_p) | (request.top_p >= 1) | (jnp.arange(vocab) == 0)
    keep &= within & (probability >= request.min_p * probability[:, :1])
    # What is kept is the front of the ranking: all above its last value, and of those that are
    # equal to that the first few.
    count = jnp.sum(keep, axis=-1, keepdims=True)
    last = jnp.take_along_axis(ranked, count - 1, axis=-1)
    above, level = scaled > last, scaled == last
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    kept = above | (level & (jnp.cumsum(level, axis=-1) <= room))
    return jnp.where(kept, scaled, -jnp.inf)
