"""What decoding carries from round to round, and what a request asks of it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.weaver_step import Weights
from tfm_jax.config import MAX_END_TOKENS, Sampling
from tfm_jax.models.dflash import Drafter, DrafterCache
from tfm_jax.models.qwen36 import Cache, Verifier
from tfm_jax.models.weaver import Weaver

NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trio:
    """The networks of a decoder; plain decoding needs the verifier alone.

    Attributes:
      verifier, drafter, weaver: the modules.
      growth: the Weaver's parameters in the form of the fused growth; without them trees grow by
        the module itself.
    """

    verifier: Verifier
    drafter: Drafter | None = None
    weaver: Weaver | None = None
    growth: Weights | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """Verifier layers whose outputs the drafter reads."""
        return () if self.drafter is None else self.drafter.config.target_layer_ids

    @property
    def depth(self) -> int:
        """Deepest position a tree can reach past its root."""
        if self.drafter is None:
            return 0
        if self.weaver is None:
            return self.drafter.config.depth
        return min(self.drafter.config.depth, self.weaver.config.depth)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One request's settings, all of them data: none causes a new compilation.

    Attributes:
      temperature, top_p, min_p: float32 scalars.
      top_k: int32 scalar, 0 for no limit.
      seed: uint32 scalar.
      shared_noise: bool scalar.
      end_tokens: [MAX_END_TOKENS] int32, padded with NO_TOKEN.
      vocab_limit: int32 scalar; ids from here on are padding and are never chosen.
      total: int32 scalar, length of the text at which generation stops.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    shared_noise: jax.Array
    end_tokens: jax.Array
    vocab_limit: jax.Array
    total: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """Committed text and everything computed from it.

    The newest token, the anchor, has been emitted but not yet run: no cache holds it.

    Attributes:
      tokens: [capacity] int32, the text; `tokens[length]` is the anchor.
      length: int32, rows in every cache and position of the anchor.
      caches: one per verifier layer.
      context: the drafter's cache of committed positions; None without a drafter.
      hidden: [H] the verifier's final-norm state at position length - 1; zeros before any.
      rounds: int32, rounds so far.
      accepted: [capacity] int32, tokens emitted by each round, bonus included.
      drafted: [capacity] int32, drafted nodes of each round.
      deepest: [capacity] int32, deepest drafted node of each round.
      finished: bool, an end token was emitted or the limit reached.
    """

    tokens: jax.Array
    length: jax.Array
    caches: tuple[Cache, ...]
    context: DrafterCache | None
    hidden: jax.Array
    rounds: jax.Array
    accepted: jax.Array
    drafted: jax.Array
    deepest: jax.Array
    finished: jax.Array


def empty_state(trio: Trio, capacity: int) -> DecodeState:
    """A state without text, with room for `capacity` positions."""
    dtype = trio.verifier.dtype
    counts = jnp.zeros((capacity,), jnp.int32)
    return DecodeState(
        tokens=counts,
        length=jnp.int32(0),
        caches=trio.verifier.empty_caches(capacity),
        context=None if trio.drafter is None else trio.drafter.empty_cache(capacity, dtype),
        hidden=jnp.zeros((trio.verifier.config.hidden_size,), dtype),
        rounds=jnp.int32(0),
        accepted=counts,
        drafted=counts,
        deepest=counts,
        finished=jnp.bool_(False),
    )


def networks_for(trio: Trio, method: str) -> Trio:
    """The networks that a method runs, so that nothing else is passed to the device.

    Raises:
      ValueError: the trio lacks one of them.
    """
    needs = {"ar": (), "dflash": ("drafter",), "ddtree": ("drafter",), "tfm": ("drafter", "weaver")}
    if not isinstance(method, str) or method not in needs:
        raise ValueError(f"method must be one of {', '.join(needs)}, got {method!r}")
    missing = [name for name in needs[method] if getattr(trio, name) is None]
    if missing:
        raise ValueError(
            f"method {method!r} needs a {' and a '.join(missing)}; none was loaded "
            "(method 'ar' needs the verifier alone)"
        )
    names = needs[method] + (("growth",) if method == "tfm" else ())
    return Trio(verifier=trio.verifier, **{name: getattr(trio, name) for name in names})


def make_request(
    sampling: Sampling, *, end_tokens: tuple[int, ...], vocab_limit: int, total: int
) -> Request:
    """Turns settings into arrays.

    Raises:
      ValueError: more than MAX_END_TOKENS end tokens.
    """
    if len(end_tokens) > MAX_END_TOKENS:
        raise ValueError(f"at most {MAX_END_TOKENS} end tokens, got {len(end_tokens)}")
    padded = (*end_tokens, *[NO_TOKEN] * (MAX_END_TOKENS - len(end_tokens)))
    return Request(
        temperature=jnp.float32(sampling.temperature),
        top_k=jnp.int32(sampling.top_k),
        top_p=jnp.float32(sampling.top_p),
        min_p=jnp.float32(sampling.min_p),
        seed=jnp.uint32(sampling.seed),
        shared_noise=jnp.bool_(sampling.shared_noise),
        end_tokens=jnp.asarray(padded, jnp.int32),
        vocab_limit=jnp.int32(vocab_limit),
        total=jnp.int32(total),
    )
