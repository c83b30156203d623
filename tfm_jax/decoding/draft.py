"""One drafter pass over [anchor, mask, mask, ...] -> a pool of candidates per future position."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.top_k import top_k
from tfm_jax.decoding.sampling import cool, hide_padding, position_noise
from tfm_jax.decoding.state import DecodeState, Request, Trio
from tfm_jax.models.layers import project

NO_CANDIDATE = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """Marginals of D future positions; row d holds candidates for children of depth-d nodes.

    Attributes:
      hidden: [D, H] drafter's final-norm states.
      ids: [D, K] int32, most probable first, the noise included; NO_CANDIDATE where the vocabulary
        ran out.
      logits: [D, K] float32 raw drafter logits, -inf where there is no candidate.
      noise: [D, K] float32, what the target will add at that position; zeros unless shared.
      temperature: float32 scalar that conditionals are formed at.
    """

    hidden: jax.Array
    ids: jax.Array
    logits: jax.Array
    noise: jax.Array
    temperature: jax.Array

    def log_probs(self, logits: jax.Array, depths: jax.Array) -> jax.Array:
        """Log-probabilities [w, K] over the pool rows `depths` [w] from raw logits [w, K]."""
        return jax.nn.log_softmax(cool(logits, self.temperature) + self.noise[depths], axis=-1)

    @property
    def marginals(self) -> jax.Array:
        """Log-probabilities [D, K] of the drafter alone."""
        return self.log_probs(self.logits, jnp.arange(self.ids.shape[0]))


def draft(trio: Trio, state: DecodeState, request: Request, pool: int) -> Draft:
    """Drafts `trio.depth` positions after the anchor, `pool` candidates each."""
    assert trio.drafter is not None
    assert state.context is not None
    config = trio.drafter.config
    block = jnp.full((config.block_size,), config.mask_token_id, jnp.int32)
    block = block.at[0].set(state.tokens[state.length])
    hidden = trio.drafter(trio.verifier.embed_tokens(block), state.context, state.length)
    hidden = hidden[1 : trio.depth + 1]
    marginals = project(hidden, trio.verifier.output_rows, out_dtype=jnp.float32)
    positions = state.length + 1 + jnp.arange(trio.depth)
    noise = functools.partial(position_noise, request, positions, marginals.shape[-1])
    return make_pools(hidden, marginals, noise, request, pool)


def make_pools(
    hidden: jax.Array,
    marginals: jax.Array,
    noise: Callable[[], jax.Array],
    request: Request,
    pool: int,
) -> Draft:
    """The most probable candidates of each position; where noise is shared, those under it.

    A token that is rare by the marginals is likely once the noise that will choose it is known, so
    pools of the largest sums miss the target far less often than pools of the largest logits.

    Args:
      hidden: [D, H] drafter's final-norm states.
      marginals: [D, V] float32 raw logits.
      noise: gives what the target will add, [D, V] float32; called where it is shared.
      request: its temperature, shared noise and vocabulary limit.
      pool: static, candidates of a position.
    """
    size = min(pool, marginals.shape[-1])

    def plain() -> tuple[jax.Array, ...]:
        logits, ids = top_k(marginals, size, limit=request.vocab_limit)
        return logits, ids, jnp.zeros(ids.shape, jnp.float32)

    def noised() -> tuple[jax.Array, ...]:
        drawn = noise()
        scores = cool(hide_padding(marginals, request.vocab_limit), request.temperature) + drawn
        best, ids = top_k(scores, size)
        logits, drawn = (jnp.take_along_axis(x, ids, axis=-1) for x in (marginals, drawn))
        return jnp.where(jnp.isfinite(best), logits, -jnp.inf), ids, drawn

    sampled = request.temperature > 0
    logits, ids, drawn = jax.lax.cond(sampled & request.shared_noise, noised, plain)
    return Draft(
        hidden=hidden,
        ids=jnp.where(jnp.isfinite(logits), ids, NO_CANDIDATE),
        logits=logits,
        noise=drawn,
        temperature=jnp.where(sampled, request.temperature, 1.0),
    )
