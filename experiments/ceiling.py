"""Acceptance probability at every depth, and the ceiling of drafts that do not see their own path.

    python -m experiments.ceiling [--count 20] [--samples 128]

At anchors along the verifier's own texts many continuations are drawn from the verifier. Along each
of them, one depth at a time, the target distribution is compared with four drafts: the drafter's
marginal and Weaver's conditional, each as a distribution to draw from (accepted with probability
1 - total variation) and as a point mass on its best token. The same continuations say what the best
drafts that are blind to the path can reach (`experiments.oracle`). Writes `ceiling.json`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.acceptance import DOMAINS, common_setting, load_prompts
from experiments.bootstrap import draws, interval
from experiments.oracle import best_oracle, marginal_oracle
from experiments.progress import log
from experiments.store import rounded, store
from experiments.texts import read_options, text_arguments, text_parser, write_texts
from pallas_kernels.choice import automatic
from tfm_jax.config import Sampling
from tfm_jax.decoding.draft import draft
from tfm_jax.decoding.generate import bucket
from tfm_jax.decoding.prefill import prefill
from tfm_jax.decoding.sampling import hide_padding
from tfm_jax.decoding.state import DecodeState, Request, Trio, make_request
from tfm_jax.model import POCKET, Model
from tfm_jax.models.weaver import pool_logits
from tfm_jax.training.continuations import next_token
from tfm_jax.training.losses import pool_log_probs, pool_terms

RESULT = Path(__file__).parent / "results" / "ceiling.json"
POOL = 512
FEWEST = 8  # samples of the coarsest oracle
DRAFTS = ("marginal", "marginal_argmax", "weaver", "weaver_argmax")
ORACLES = ("oracle", "oracle_in_sample", "best", "best_in_sample")
MACRO = "macro"
QUIET = 20  # seconds between lines of progress

ByDepth = dict[str, jax.Array]  # name -> [D]


def continuations(
    trio: Trio, state: DecodeState, request: Request, seeds: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """N continuations of a text, and the distribution that each of their tokens was drawn from.

    Args:
      trio: its verifier writes, as deep as its drafts go.
      state: after prefill of the text.
      request: temperature 0 or 1.
      seeds: [N] uint32.

    Returns:
      tokens [N, D] int32 and logits [N, D, V] float32; at temperature 0 these are all on the token.
    """

    def one(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = dataclasses.replace(request, seed=seed)

        def step(carry, offset: jax.Array):
            token, caches = carry
            position = state.length + offset
            token, logits, caches = next_token(trio.verifier, token, caches, position, own)
            return (token, caches), (token, logits)

        anchor = state.tokens[state.length]
        return jax.lax.scan(step, (anchor, state.caches), jnp.arange(trio.depth))[1]

    tokens, logits = jax.vmap(one)(seeds)
    logits = hide_padding(logits, request.vocab_limit)
    certain = jnp.where(jnp.arange(logits.shape[-1]) == tokens[..., None], 0.0, -jnp.inf)
    return tokens, jnp.where(request.temperature > 0, logits, certain)


def draft_acceptances(
    trio: Trio, state: DecodeState, request: Request, tokens: jax.Array, logits: jax.Array
) -> ByDepth:
    """Mean acceptance probability over N continuations of each of DRAFTS, as decoding scores them.

    Args:
      trio, state, request: as for `continuations`; without shared noise.
      tokens, logits: what it returned.
    """
    verifier, weaver = trio.verifier, trio.weaver
    assert weaver is not None
    drafted = draft(trio, state, request, POOL)
    anchors = jnp.broadcast_to(state.tokens[state.length], (tokens.shape[0], 1))
    path = jnp.concatenate([anchors, tokens[:, :-1]], axis=1)
    query = jax.vmap(weaver.chain, in_axes=(None, None, 0))(
        state.hidden, drafted.hidden, verifier.embed_tokens(path)
    )
    candidates = verifier.output_rows[drafted.ids]  # [D, K, H]
    conditional = jax.vmap(pool_logits, in_axes=(0, None, None))(query, drafted.logits, candidates)
    ids = jnp.broadcast_to(drafted.ids, conditional.shape)
    target = pool_log_probs(logits, ids)
    valid = jnp.ones(tokens.shape, bool)
    found: ByDepth = {}
    marginal = jnp.broadcast_to(drafted.logits, conditional.shape)
    for name, scores in (("marginal", marginal), ("weaver", conditional)):
        best = jnp.argmax(scores, axis=-1, keepdims=True)
        found[name] = pool_terms(scores, target, valid).alpha.mean(axis=0)
        at_best = jnp.exp(jnp.take_along_axis(target, best, axis=-1)[..., 0])
        found[f"{name}_argmax"] = at_best.mean(axis=0)
    return found


def oracle_acceptances(logits: jax.Array, samples: int) -> ByDepth:
    """Acceptance probabilities ORACLES from N / `samples` groups of continuations, averaged.

    Args:
      logits: [N, D, V] of the target.
      samples: continuations that an oracle is made from.
    """

    def at_depth(rows: jax.Array) -> tuple[jax.Array, ...]:
        p = jax.nn.softmax(rows, axis=-1)
        groups = p.reshape(-1, samples, p.shape[-1])
        marginal, best = jax.lax.map(lambda g: (marginal_oracle(g), best_oracle(g)), groups)
        brackets = (marginal.held_out, marginal.in_sample, best.held_out, best.in_sample)
        return tuple(x.mean() for x in brackets)

    return dict(zip(ORACLES, jax.lax.map(at_depth, logits.swapaxes(0, 1)), strict=True))


@jax.jit
def acceptances(
    trio: Trio, state: DecodeState, request: Request, seeds: jax.Array
) -> tuple[ByDepth, dict[int, ByDepth]]:
    """Acceptance of DRAFTS, and of ORACLES by number of samples (none for a single seed)."""
    tokens, logits = continuations(trio, state, request, seeds)
    sizes = doublings(seeds.shape[0]) if seeds.shape[0] > 1 else []
    oracles = {n: oracle_acceptances(logits, n) for n in sizes}
    return draft_acceptances(trio, state, request, tokens, logits), oracles


def doublings(samples: int) -> list[int]:
    """FEWEST, twice as many, and so on up to `samples`."""
    return [FEWEST << i for i in range((samples // FEWEST).bit_length())]


@automatic("xla")  # many continuations at once: the kernels are made for a single one
def measure(
    model: Model,
    *,
    temperatures: Sequence[float] = (1.0,),
    count: int = 20,
    samples: int = 128,
    anchors: int = 4,
    stride: int = 24,
    longest_prompt: int = 256,
    domains: Sequence[str] = DOMAINS,
    name: str = POCKET,
) -> dict[str, Any]:
    """Returns `{"setting", "rows", "samples"}`; rows hold acceptance probabilities by depth.

    Args:
      model: with all three networks.
      temperatures: 0 or 1. At 0 there is one continuation, and no oracle: a perfect drafter would
        know it all.
      count: prompts a domain.
      samples: continuations an anchor, FEWEST times a power of two.
      anchors, stride: contexts of a prompt, ending so many tokens of the verifier apart.
      longest_prompt: prompts are cut to so many tokens.
      domains: of the prompts.
      name: what the result calls the model.

    Raises:
      ValueError: a temperature or a number of samples that is not one of those.
    """
    odd = [t for t in temperatures if t not in (0.0, 1.0)]
    if odd:
        raise ValueError(f"temperatures must be 0 or 1, got {odd}")
    if samples not in doublings(samples):
        raise ValueError(f"samples must be {FEWEST} times a power of two, got {samples}")
    if min(count, anchors, stride) < 1:
        raise ValueError(f"count, anchors, stride must be positive: {count, anchors, stride}")
    common = common_setting(model, name)
    trio = dataclasses.replace(model.trio, growth=None)
    longest = longest_prompt + stride * (anchors - 1)
    capacity = bucket(longest, longest + trio.depth, trio.depth)
    prompts = {d: load_prompts(model, d, count, longest_prompt) for d in domains}
    rows, by_samples = [], []
    for temperature in temperatures:
        drafts: dict[str, list] = {domain: [] for domain in domains}
        oracles: dict[str, list] = {domain: [] for domain in domains}
        request = make_request(
            Sampling(temperature=temperature, shared_noise=False),
            end_tokens=(),
            vocab_limit=model.vocab_limit,
            total=capacity,
        )
        begin = said = time.monotonic()
        for place, domain in enumerate(domains):
            texts = write_texts(model, prompts[domain], temperature, stride * (anchors - 1) + 1)
            for text in texts:
                found = []
                for offset in range(0, stride * anchors, stride):
                    random = np.random.default_rng((place, text.seed, offset))
                    number = samples if temperature > 0 else 1
                    seeds = random.integers(2**32, size=number, dtype=np.uint32)
                    context = np.asarray(text.tokens[: text.prompt + offset], np.int32)
                    state = prefill(trio, context, capacity)
                    found.append(acceptances(trio, state, request, jnp.asarray(seeds)))
                mean = jax.tree.map(lambda *x: np.mean(np.stack(x), axis=0), *found)
                drafts[domain].append(mean[0])
                oracles[domain].append(mean[1])
                if text is texts[-1] or time.monotonic() - said > QUIET:
                    log(
                        f"ceiling: T = {temperature:g}: {domain} {text.seed + 1}/{len(texts)}",
                        begin,
                    )
                    said = time.monotonic()
        rows += summarise(temperature, _joined(drafts, oracles))
        by_samples += _by_samples(temperature, oracles)
    return {
        "setting": {
            **common,
            "prompts": {domain: len(found) for domain, found in prompts.items()},
            "longest_prompt": longest_prompt,
            "anchors": anchors,
            "stride": stride,
            "samples": samples,
            "pool": POOL,
            "operations": "xla",
            "texts": "the verifier's own after each prompt, no chat template; end tokens do not "
            "stop; every depth along the verifier's path, whether or not the draft held before",
        },
        "rows": rows,
        "samples": by_samples,
    }


Measured = dict[str, list[dict[str, np.ndarray]]]  # domain -> prompts -> name -> [D]


def _joined(drafts: Measured, oracles: dict[str, list[dict[int, Any]]]) -> Measured:
    """Drafts, and the oracles of most samples beside them."""
    return {
        domain: [
            own | (other[max(other)] if other else {})
            for own, other in zip(drafts[domain], oracles[domain], strict=True)
        ]
        for domain in drafts
    }


def summarise(temperature: float, measured: Measured) -> list[dict[str, Any]]:
    """A row for each domain and depth, and for the macro average over domains.

    Intervals resample prompts within domains. Rows of the macro average say how far Weaver is above
    each oracle, with paired intervals.
    """
    names = [n for n in DRAFTS + ORACLES if n in next(iter(measured.values()))[0]]
    # [prompts, names, D] for each domain
    stacks = [
        np.asarray([[prompt[name] for name in names] for prompt in found])
        for found in measured.values()
    ]
    drawn = [
        stack[chosen].mean(axis=1)
        for stack, chosen in zip(stacks, draws([len(s) for s in stacks]), strict=True)
    ]
    means = [stack.mean(axis=0) for stack in stacks]
    labels = [*measured, MACRO]
    means.append(np.mean(means, axis=0))
    drawn.append(np.mean(drawn, axis=0))
    rows = []
    for label, mean, resampled in zip(labels, means, drawn, strict=True):
        spread = interval(resampled)
        for d in range(mean.shape[-1]):
            row = {
                "temperature": temperature,
                "domain": label,
                "depth": d + 1,
                "acceptance": {n: rounded(mean[i, d]) for i, n in enumerate(names)},
                "ci95": {n: rounded(spread[:, i, d]) for i, n in enumerate(names)},
            }
            if label == MACRO and "oracle" in names:
                row["weaver_above"] = {
                    other: _gain(mean[:, d], resampled[:, :, d], names, other) for other in ORACLES
                }
            rows.append(row)
    return rows


def _gain(
    mean: np.ndarray, resampled: np.ndarray, names: list[str], other: str
) -> dict[str, float | list[float]]:
    a, b = names.index("weaver"), names.index(other)
    spread = interval(resampled[:, a] - resampled[:, b])
    return {"mean": rounded(mean[a] - mean[b]), "ci95": rounded(spread)}


def _by_samples(
    temperature: float, oracles: dict[str, list[dict[int, Any]]]
) -> list[dict[str, Any]]:
    """The oracles' macro averages by depth, for every number of samples."""
    rows = []
    for n in next(iter(oracles.values()))[0]:
        row: dict[str, Any] = {"temperature": temperature, "samples": n}
        for name in ORACLES:
            by_domain = [np.mean([p[n][name] for p in found], axis=0) for found in oracles.values()]
            row[name] = rounded(np.mean(by_domain, axis=0))
        rows.append(row)
    return rows


def show(result: dict[str, Any]) -> None:
    """Prints the macro averages."""
    for row in result["rows"]:
        if row["domain"] == MACRO:
            cells = "  ".join(f"{name} {x:.3f}" for name, x in row["acceptance"].items())
            print(f"T = {row['temperature']:g}  depth {row['depth']:2d}  {cells}")


def main(arguments: list[str] | None = None) -> None:
    parser = text_parser(
        "Acceptance by depth, and its ceiling.", temperatures=(1.0,), count=20, out=RESULT
    )
    parser.add_argument("--samples", type=int, default=128, help="continuations an anchor")
    parser.add_argument("--anchors", type=int, default=4, help="contexts a prompt")
    options = read_options(parser, arguments, "samples", "anchors")
    result = measure(**text_arguments(options), samples=options.samples, anchors=options.anchors)
    store(options.out, result)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
