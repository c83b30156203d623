"""Rounds of decoding along a text that is known, without decoding it again.

A text does not depend on how it is drafted, so plain decoding writes it once and nothing needs the
verifier any more: a tree grows at every position, and the text says how much of it decoding would
accept. Starting at the prompt's end and going on by what was accepted visits the rounds of
`generate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bootstrap import draws, interval
from experiments.store import rounded
from tfm_jax.config import TreeConfig
from tfm_jax.decoding.draft import Draft, make_pools
from tfm_jax.decoding.round import grow_tree
from tfm_jax.decoding.sampling import position_noise
from tfm_jax.decoding.state import Request, Trio
from tfm_jax.models.layers import project
from tfm_jax.training.dflash import draft_blocks
from tfm_jax.tree import ROOT

TOGETHER = 64  # trees that grow side by side


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class States:
    """What Weaver is given at A anchors.

    Attributes:
      verifier: [A, H] final-norm states that predicted the anchors.
      drafter: [A, D, H] final-norm states of the block.
    """

    verifier: jax.Array
    drafter: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Starts:
    """What rounds at A anchors of a text start from, and the text that they are compared with.

    Attributes:
      root: [A] int32, the anchors' tokens.
      ahead: [A, D + 1] int32, the tokens after them.
      state: [A, H] final-norm states that predicted the anchors.
      draft: with a leading axis [A].
    """

    root: jax.Array
    ahead: jax.Array
    state: jax.Array
    draft: Draft


def states_at(trio: Trio, tokens: jax.Array, anchors: jax.Array) -> States:
    """The states at anchors [A] of a text [T], as decoding would compute them."""
    assert trio.drafter is not None
    hidden = trio.verifier.forward(tokens, trio.taps)
    keep = jnp.ones(anchors.shape, bool)
    blocks = draft_blocks(trio.verifier, trio.drafter, tokens, hidden.features, anchors, keep)
    return States(verifier=hidden.final[anchors - 1], drafter=blocks[:, 1 : trio.depth + 1])


def starts_at(
    trio: Trio,
    tokens: jax.Array,
    anchors: jax.Array,
    states: States,
    request: Request,
    pool: int,
) -> Starts:
    """Where rounds at anchors [A] of a text [T] start.

    Args:
      trio: the networks.
      tokens: [T] int32, with as many tokens after every anchor as a tree is deep, and one.
      anchors: [A] int32.
      states: from `states_at`.
      request: its temperature, seed, shared noise and vocabulary limit.
      pool: static, candidates of a depth.
    """
    offsets = jnp.arange(trio.depth)
    vocab = trio.verifier.config.vocab_size
    noise = jax.lax.cond(
        (request.temperature > 0) & request.shared_noise,
        lambda: position_noise(request, jnp.arange(tokens.shape[0]), vocab),
        lambda: jnp.zeros((tokens.shape[0], vocab), jnp.float32),
    )

    def one(inputs: tuple[jax.Array, States]) -> Starts:
        anchor, own = inputs
        marginals = project(own.drafter, trio.verifier.output_rows, out_dtype=jnp.float32)
        drawn = noise[anchor + 1 + offsets]
        return Starts(
            root=tokens[anchor],
            ahead=tokens[anchor + 1 + jnp.arange(trio.depth + 1)],
            state=own.verifier,
            draft=make_pools(own.drafter, marginals, lambda: drawn, request, pool),
        )

    return jax.lax.map(one, (anchors, states), batch_size=min(TOGETHER, anchors.size))


def accepted_lengths(
    trio: Trio, starts: Starts, *, method: str, shape: TreeConfig, depth: int | None = None
) -> jax.Array:
    """Tokens that a round at each anchor emits, bonus included, [A] int32.

    Args:
      trio: the networks; its Weaver grows the trees of "tfm".
      starts: of all rounds.
      method: "dflash", "ddtree" or "tfm".
      shape: of the trees; the pool is that of `starts`.
      depth: deepest node, the drafter's own if None; Weaver sees all drafter states even so.
    """
    limit = trio.depth if depth is None else depth
    trio = dataclasses.replace(trio, growth=None)  # its kernels are made for one tree at a time

    def one(start: Starts) -> jax.Array:
        pools = {name: getattr(start.draft, name)[:limit] for name in ("ids", "logits", "noise")}
        drafted = dataclasses.replace(start.draft, **pools)
        tree = grow_tree(trio, start.root, drafted, start.state, method, shape)
        above = jnp.maximum(tree.parent, ROOT)
        right = tree.valid & (tree.token == start.ahead[tree.depth[above]])
        right = right.at[ROOT].set(True)

        # Right so far and right above: paths twice as long each time. A loop, since XLA takes a
        # minute to compile gathers of gathers under `vmap`.
        def double(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            on, above = carry
            return on & on[above], above[above]

        on, _ = jax.lax.fori_loop(0, limit.bit_length(), double, (right, above))
        return on.sum(dtype=jnp.int32)

    return jax.lax.map(one, starts, batch_size=min(TOGETHER, starts.root.size))


def walk(lengths: np.ndarray) -> list[int]:
    """Tokens that each round of decoding emits, from those of a round at every position [A].

    The last round is cut to what is still to be emitted.
    """
    rounds, position = [], 0
    while position < len(lengths):
        rounds.append(min(int(lengths[position]), len(lengths) - position))
        position += rounds[-1]
    return rounds


def by_domain(domains: Sequence[str], rounds: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Emitted tokens and rounds of every text, [texts, 2] for each domain."""
    found: dict[str, list[tuple[int, int]]] = {}
    for domain, lengths in zip(domains, rounds, strict=True):
        found.setdefault(domain, []).append((sum(lengths), len(lengths)))
    return {domain: np.asarray(pairs) for domain, pairs in found.items()}


def summarise(measured: dict[str, np.ndarray], base: dict[str, np.ndarray]) -> dict[str, Any]:
    """Mean accepted length, macro average over domains, and its ratio to the base's, paired.

    Args:
      measured, base: from `by_domain`, of the same texts.
    """
    own, drawn = _lengths(measured)
    reference, reference_drawn = _lengths(base)
    ratio = drawn.mean(axis=0) / reference_drawn.mean(axis=0)
    return {
        "mean_accepted_length": rounded(own.mean()),
        "ci95": rounded(interval(drawn.mean(axis=0))),
        "to_base": rounded(own.mean() / reference.mean()),
        "to_base_ci95": rounded(interval(ratio)),
        "by_domain": dict(zip(measured, rounded(own), strict=True)),
    }


def _lengths(measured: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean accepted lengths [domains], and resampled ones [domains, resamples]."""
    stacks = list(measured.values())
    means = [stack[:, 0].sum() / stack[:, 1].sum() for stack in stacks]
    sums = [
        stack[chosen].sum(axis=1)
        for stack, chosen in zip(stacks, draws([len(s) for s in stacks]), strict=True)
    ]
    return np.asarray(means), np.asarray([s[:, 0] / s[:, 1] for s in sums])
