"""Mean accepted length of `tfm` as one thing at a time is changed: tree shape, what Weaver sees.

    python -m experiments.ablation [--count 24]

A text does not depend on how it is drafted, so plain decoding writes it once and no setting needs
the verifier: a tree grows at every position, and the text says how much of it decoding would
accept. Starting at the prompt's end and going on by what was accepted visits the rounds of
`generate`. A state that Weaver is left without is replaced by its mean over contexts: it says
nothing about the context at hand, while its size stays what Weaver was trained on. Writes
`ablation.json`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import tfm_jax
from experiments.acceptance import DOMAINS, common_setting, load_prompts
from experiments.bootstrap import draws, interval
from experiments.store import store
from experiments.texts import Text, write_texts
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.accept import accept
from tfm_jax.decoding.ddtree import ddtree
from tfm_jax.decoding.draft import Draft
from tfm_jax.decoding.grow import grow, slots, weaver_scorer
from tfm_jax.decoding.sampling import hide_padding, position_noise
from tfm_jax.decoding.state import Request, Trio, make_request
from tfm_jax.model import Model
from tfm_jax.models.layers import project
from tfm_jax.training.dflash import draft_blocks

RESULT = Path(__file__).parent / "results" / "ablation.json"
TOGETHER = 64  # trees that grow side by side
BASE = TreeConfig(budget=64, expand=4)
UNLIMITED = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One setting.

    Attributes:
      part: what is varied, "base" for nothing.
      method: "tfm", or "ddtree" for the marginals without Weaver.
      shape: of the trees.
      depth: deepest node, the drafter's own if None; Weaver sees all drafter states even so.
      verifier_state, drafter_states: whether Weaver is given them, or their mean.
    """

    part: str
    method: Literal["tfm", "ddtree"] = "tfm"
    shape: TreeConfig = BASE
    depth: int | None = None
    verifier_state: bool = True
    drafter_states: bool = True

    @property
    def program(self) -> tuple[str, TreeConfig, int | None]:
        """What is compiled for it; the rest is data."""
        return self.method, self.shape, self.depth


def describe(setting: Variant) -> str:
    """What a setting differs in from the base, in a few words."""
    if setting.method == "ddtree":
        return "without Weaver (DDTree)"
    missing = [
        name
        for name, given in (
            ("verifier state", setting.verifier_state),
            ("drafter states", setting.drafter_states),
        )
        if not given
    ]
    if missing:
        return f"Weaver without {' and '.join(missing)}"
    shape = setting.shape
    return {
        "pool": f"K = {shape.pool}",
        "expand": f"w = {shape.expand}",
        "children": f"{shape.children} children",
        "depth": f"depth {setting.depth}",
    }.get(setting.part, setting.part)


def variants(
    pools: Sequence[int] = (16, 64, 128),
    expands: Sequence[int] = (1, 2, 8),
    depths: Sequence[int] = (4, 8, 12),
    children: Sequence[int] = (4, 8, 16),
) -> list[Variant]:
    """The base, and everything that differs from it in one part."""
    changed = functools.partial(dataclasses.replace, BASE)
    return [
        Variant(part="base"),
        *(Variant(part="pool", shape=changed(pool=n)) for n in pools),
        *(Variant(part="expand", shape=changed(expand=n)) for n in expands),
        *(Variant(part="depth", depth=n) for n in depths),
        *(Variant(part="children", shape=changed(children=n)) for n in children),
        Variant(part="states", verifier_state=False),
        Variant(part="states", drafter_states=False),
        Variant(part="states", verifier_state=False, drafter_states=False),
        Variant(part="states", method="ddtree"),
    ]


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


@jax.jit
def states_at(trio: Trio, tokens: jax.Array, anchors: jax.Array) -> States:
    """The states at anchors [A] of a text [T], as decoding would compute them."""
    assert trio.drafter is not None
    hidden = trio.verifier.forward(tokens, trio.taps)
    keep = jnp.ones(anchors.shape, bool)
    blocks = draft_blocks(trio.verifier, trio.drafter, tokens, hidden.features, anchors, keep)
    return States(verifier=hidden.final[anchors - 1], drafter=blocks[:, 1 : trio.depth + 1])


def accepted_lengths(
    trio: Trio,
    tokens: jax.Array,
    anchors: jax.Array,
    states: States,
    fed: States,
    request: Request,
    *,
    method: str,
    shape: TreeConfig,
    depth: int | None,
) -> jax.Array:
    """Tokens that a round at each anchor emits, bonus included, [A] int32.

    Args:
      trio: the networks.
      tokens: [T] int32, with as many tokens after every anchor as a tree is deep, and one.
      anchors: [A] int32.
      states: that the drafter's pools come from.
      fed: that Weaver is given.
      request: its temperature, seed and shared noise.
      method, shape, depth: see `Variant`.
    """
    limit = trio.depth if depth is None else depth
    offsets = jnp.arange(trio.depth)
    vocab = trio.verifier.config.vocab_size
    sampled = request.temperature > 0
    noise = jax.lax.cond(
        sampled & request.shared_noise,
        lambda: position_noise(request, jnp.arange(tokens.shape[0]), vocab),
        lambda: jnp.zeros((tokens.shape[0], vocab), jnp.float32),
    )

    def one(inputs: tuple[jax.Array, States, States]) -> jax.Array:
        anchor, own, given = inputs
        marginals = project(own.drafter, trio.verifier.output_rows, out_dtype=jnp.float32)
        marginals = hide_padding(marginals, request.vocab_limit)
        logits, ids = jax.lax.top_k(marginals, min(shape.pool, vocab))
        drafted = Draft(
            hidden=given.drafter,
            ids=ids,
            logits=logits,
            noise=jnp.take_along_axis(noise[anchor + 1 + offsets], ids, axis=-1),
            temperature=jnp.where(sampled, request.temperature, 1.0),
        )
        root = tokens[anchor]
        if method == "ddtree":
            tree = ddtree(root, ids[:limit], drafted.marginals[:limit], shape.budget)
        else:
            scorer, memory = weaver_scorer(trio, drafted, given.verifier, slots(shape))
            tree = grow(root, ids[:limit], scorer, memory, shape)
        # Right at nodes of the text's own path, and nothing else is walked along.
        targets = tokens[anchor + 1 + tree.depth]
        ends = request.end_tokens
        return accept(tree, targets, depth=limit, limit=jnp.int32(UNLIMITED), end_tokens=ends).count

    return jax.lax.map(one, (anchors, states, fed), batch_size=min(TOGETHER, anchors.size))


def walk(lengths: np.ndarray) -> list[int]:
    """Tokens that each round of decoding emits, from those of a round at every position [A].

    The last round is cut to what is still to be emitted.
    """
    rounds, position = [], 0
    while position < len(lengths):
        rounds.append(min(int(lengths[position]), len(lengths) - position))
        position += rounds[-1]
    return rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A text, padded, and the states at each of its anchors."""

    domain: str
    tokens: jax.Array
    anchors: jax.Array
    states: States
    request: Request


def measure(
    model: Model,
    *,
    settings: Sequence[Variant] | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    count: int = 24,
    new_tokens: int = 128,
    longest_prompt: int = 256,
    domains: Sequence[str] = DOMAINS,
) -> dict[str, Any]:
    """Returns `{"setting", "rows"}`: mean accepted length of every setting.

    Args:
      model: with all three networks.
      settings: the base first; all `variants` if not given.
      temperatures: with shared noise above 0.
      count: prompts a domain; prompt i is sampled with seed i.
      new_tokens: that each text goes on for.
      longest_prompt: prompts are cut to so many tokens.
      domains: of the prompts.
    """
    common = common_setting(model)
    settings = variants() if settings is None else list(settings)
    trio = model.trio
    prompts = {d: load_prompts(model, d, count, longest_prompt) for d in domains}
    begin = time.monotonic()
    samples = {t: make_samples(model, prompts, t, new_tokens) for t in temperatures}
    every = [sample for found in samples.values() for sample in found]
    log(f"{len(every)} texts", begin)
    means = States(
        verifier=jnp.mean(jnp.stack([s.states.verifier.mean(0) for s in every]), axis=0),
        drafter=jnp.mean(jnp.stack([s.states.drafter.mean(0) for s in every]), axis=0),
    )
    programs = compile_programs(trio, settings, every[0])
    log(f"{len(programs)} programs compiled", begin)
    rows = []
    for temperature, found in samples.items():
        base = None
        for setting in settings:
            run = programs[setting.program]
            rounds = [
                rounds_of(run, trio, sample, _fed(sample.states, means, setting))
                for sample in found
            ]
            measured = by_domain([s.domain for s in found], rounds)
            base = measured if base is None else base
            rows.append(_row(setting, temperature, trio.depth) | summarise(measured, base))
            shown = f"{describe(setting)}: {rows[-1]['mean_accepted_length']:.3f}"
            log(f"T = {temperature:g} {shown}", begin)
    return {
        "setting": {
            **common,
            "prompts": {domain: len(found) for domain, found in prompts.items()},
            "new_tokens": new_tokens,
            "longest_prompt": longest_prompt,
            "shared_noise": True,
            "without": "a state that Weaver is left without is replaced by its mean over contexts",
            "prompt_form": "plain continuation, no chat template; end tokens do not stop",
        },
        "rows": rows,
    }


def make_samples(
    model: Model, prompts: dict[str, list[list[int]]], temperature: float, new_tokens: int
) -> list[Sample]:
    """Texts of all domains, which go on beyond the last anchor as far as a tree reaches.

    Args:
      model: with all three networks.
      prompts: of each domain, of 2 tokens or more.
      temperature: of the texts.
      new_tokens: anchors of a text.
    """
    trio = model.trio
    ahead = trio.depth + 1
    longest = max(len(prompt) for found in prompts.values() for prompt in found)
    samples = []
    for domain, found in prompts.items():
        for text in write_texts(model, found, temperature, new_tokens + ahead):
            padding = longest + new_tokens + ahead - len(text.tokens)
            tokens = jnp.asarray(np.pad(text.tokens, (0, padding)), jnp.int32)
            anchors = text.prompt - 1 + jnp.arange(new_tokens)
            samples.append(
                Sample(
                    domain=domain,
                    tokens=tokens,
                    anchors=anchors,
                    states=states_at(trio, tokens, anchors),
                    request=_request(model, temperature, text),
                )
            )
    return samples


def _request(model: Model, temperature: float, text: Text) -> Request:
    return make_request(
        Sampling(temperature=temperature, seed=text.seed),
        end_tokens=(),
        vocab_limit=model.vocab_limit,
        total=len(text.tokens),
    )


def compile_programs(
    trio: Trio, settings: Sequence[Variant], like: Sample
) -> dict[tuple[str, TreeConfig, int | None], Callable]:
    """A program for every kind of tree, compiled side by side."""
    run = jax.jit(accepted_lengths, static_argnames=("method", "shape", "depth"))

    def compiled(program: tuple[str, TreeConfig, int | None]) -> Callable:
        method, shape, depth = program
        arguments = (trio, like.tokens, like.anchors, like.states, like.states, like.request)
        return run.lower(*arguments, method=method, shape=shape, depth=depth).compile()

    programs = list(dict.fromkeys(setting.program for setting in settings))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip(programs, pool.map(compiled, programs), strict=True))


def _fed(states: States, means: States, setting: Variant) -> States:
    verifier = states.verifier if setting.verifier_state else means.verifier
    drafter = states.drafter if setting.drafter_states else means.drafter
    return States(
        verifier=jnp.broadcast_to(verifier, states.verifier.shape),
        drafter=jnp.broadcast_to(drafter, states.drafter.shape),
    )


def rounds_of(run: Callable, trio: Trio, sample: Sample, fed: States) -> list[int]:
    """Tokens that each round emits, with a program of `compile_programs`."""
    lengths = run(trio, sample.tokens, sample.anchors, sample.states, fed, sample.request)
    return walk(np.asarray(lengths))


def by_domain(domains: Sequence[str], rounds: Sequence[list[int]]) -> dict[str, np.ndarray]:
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
        "mean_accepted_length": _rounded(own.mean()),
        "ci95": _rounded(interval(drawn.mean(axis=0))),
        "to_base": _rounded(own.mean() / reference.mean()),
        "to_base_ci95": _rounded(interval(ratio)),
        "by_domain": dict(zip(measured, _rounded(own), strict=True)),
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


def _row(setting: Variant, temperature: float, depth: int) -> dict[str, Any]:
    shape = setting.shape
    return {
        "temperature": temperature,
        "part": setting.part,
        "name": describe(setting),
        "method": setting.method,
        "budget": shape.budget,
        "pool": shape.pool,
        "expand": shape.expand,
        "children": shape.children,
        "depth": depth if setting.depth is None else setting.depth,
        "verifier_state": setting.verifier_state,
        "drafter_states": setting.drafter_states,
    }


def _rounded(x: np.ndarray | np.floating) -> Any:
    return np.round(np.asarray(x, np.float64), 4).tolist()


def log(line: str, begin: float) -> None:
    print(f"ablation: {line}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Accepted length, one part changed at a time.")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--count", type=int, default=24, help="prompts a domain")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--longest-prompt", type=int, default=256, help="in tokens")
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=list(DOMAINS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=RESULT, help="file to write")
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    options = parser.parse_args(arguments)
    result = measure(
        tfm_jax.load(options.model, dtype=options.dtype),
        temperatures=options.temperatures,
        count=options.count,
        new_tokens=options.new_tokens,
        longest_prompt=options.longest_prompt,
        domains=options.domains,
    )
    store(options.out, result)
    if options.json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        low, high = row["ci95"]
        print(
            f"T = {row['temperature']:g}  {row['name']:45s} {row['mean_accepted_length']:.3f} "
            f"({low:.2f} to {high:.2f})  {row['to_base']:.1%} of the base"
        )


if __name__ == "__main__":
    main()
