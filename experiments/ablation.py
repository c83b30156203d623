"""Mean accepted length of `tfm` as one thing at a time is changed: tree shape, what Weaver sees.

    python -m experiments.ablation [--count 24]

Plain decoding writes the texts once, and every setting is replayed along them
(`experiments.replay`). A state that Weaver is left without is replaced by its mean over contexts:
it says nothing about the context at hand, while its size stays what Weaver was trained on. Writes
`ablation.json`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.acceptance import DOMAINS, common_setting, load_prompts
from experiments.progress import log
from experiments.replay import (
    States,
    accepted_lengths,
    by_domain,
    starts_at,
    states_at,
    summarise,
    walk,
)
from experiments.store import store
from experiments.texts import Text, read_options, text_arguments, text_parser, write_texts
from pallas_kernels.choice import automatic
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.state import Request, Trio, make_request
from tfm_jax.model import POCKET, Model

RESULT = Path(__file__).parent / "results" / "ablation.json"
BASE = TreeConfig(budget=64, expand=4)
Method = Literal["tfm", "ddtree"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One setting.

    Attributes:
      part: what is varied, "base" for nothing.
      method: "tfm", or "ddtree" for the marginals without Weaver.
      shape: of the trees.
      depth: deepest node, the drafter's own if None; Weaver sees all drafter states even so.
      verifier_state, drafter_states: whether Weaver is given them, or their mean.
      score_temperature: that the scores of a tree are divided by, on top of the text's own.
    """

    part: str
    method: Method = "tfm"
    shape: TreeConfig = BASE
    depth: int | None = None
    verifier_state: bool = True
    drafter_states: bool = True
    score_temperature: float = 1.0

    @property
    def program(self) -> tuple[str, TreeConfig, int | None]:
        """What is compiled for it; the rest is data."""
        return self.method, self.shape, self.depth


def describe(setting: Variant) -> str:
    """What a setting differs in from the base, in a few words."""
    if setting.part == "states" and setting.method == "ddtree":
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
        "scores": f"scores at {setting.score_temperature:g} times their temperature",
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


def lengths_with(
    trio: Trio,
    tokens: jax.Array,
    anchors: jax.Array,
    states: States,
    fed: States,
    request: Request,
    heat: jax.Array,
    *,
    method: str,
    shape: TreeConfig,
    depth: int | None,
) -> jax.Array:
    """`replay.accepted_lengths` at anchors [A] of a text [T], where Weaver is given other states.

    Args:
      trio: the networks.
      tokens, anchors, request: see `replay.starts_at`.
      states: that the drafter's pools come from.
      fed: that Weaver is given.
      heat: float32 scalar, `score_temperature`.
      method, shape, depth: see `Variant`.
    """
    starts = starts_at(trio, tokens, anchors, states, request, shape.pool)
    drafted = dataclasses.replace(
        starts.draft,
        hidden=fed.drafter,
        temperature=starts.draft.temperature * heat,
        noise=starts.draft.noise / heat,
    )
    starts = dataclasses.replace(starts, state=fed.verifier, draft=drafted)
    return accepted_lengths(trio, starts, method=method, shape=shape, depth=depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A text, padded, and the states at each of its anchors."""

    domain: str
    tokens: jax.Array
    anchors: jax.Array
    states: States
    request: Request


@automatic("xla")  # many trees at once: the kernels are made for a single one
def measure(
    model: Model,
    *,
    settings: Sequence[Variant] | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    count: int = 24,
    new_tokens: int = 128,
    longest_prompt: int = 256,
    domains: Sequence[str] = DOMAINS,
    name: str = POCKET,
) -> dict[str, Any]:
    """Returns `{"setting", "rows"}`: mean accepted length of every setting.

    Args:
      model: with all three networks.
      settings: all `variants` if not given. Each is compared with the last base before it.
      temperatures: with shared noise above 0.
      count: prompts a domain; prompt i is sampled with seed i.
      new_tokens: that each text goes on for.
      longest_prompt: prompts are cut to so many tokens, at least 2.
      domains: of the prompts.
      name: what the result calls the model.

    Raises:
      ValueError: a number that is too small, before any compute.
    """
    least = {
        "count": (count, 1),
        "new_tokens": (new_tokens, 1),
        "longest_prompt": (longest_prompt, 2),
    }
    for option, (given, smallest) in least.items():
        if given < smallest:
            raise ValueError(f"{option} must be at least {smallest}, got {given}")
    common = common_setting(model, name)
    settings = variants() if settings is None else list(settings)
    trio = model.trio
    prompts = {d: load_prompts(model, d, count, longest_prompt) for d in domains}
    begin = time.monotonic()
    samples = {t: make_samples(model, prompts, t, new_tokens) for t in temperatures}
    every = [sample for found in samples.values() for sample in found]
    log(f"ablation: {len(every)} texts", begin)
    means = States(
        verifier=jnp.mean(jnp.stack([s.states.verifier.mean(0) for s in every]), axis=0),
        drafter=jnp.mean(jnp.stack([s.states.drafter.mean(0) for s in every]), axis=0),
    )
    programs = compile_programs(trio, settings, every[0])
    log(f"ablation: {len(programs)} programs compiled", begin)
    rows = []
    for temperature, found in samples.items():
        base = None
        for setting in settings:
            run = programs[setting.program]
            heat = setting.score_temperature
            rounds = [
                rounds_of(run, trio, sample, _fed(sample.states, means, setting), heat)
                for sample in found
            ]
            measured = by_domain([s.domain for s in found], rounds)
            if base is None or setting.part == "base":
                base = measured
            rows.append(_row(setting, temperature, trio.depth) | summarise(measured, base))
            shown = f"{describe(setting)}: {rows[-1]['mean_accepted_length']:.3f}"
            log(f"ablation: T = {temperature:g} {shown}", begin)
    return {
        "setting": {
            **common,
            "prompts": {domain: len(found) for domain, found in prompts.items()},
            "new_tokens": new_tokens,
            "longest_prompt": longest_prompt,
            "shared_noise": True,
            "operations": "xla",
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
    read = jax.jit(states_at)
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
                    states=read(trio, tokens, anchors),
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
    run = jax.jit(lengths_with, static_argnames=("method", "shape", "depth"))

    def compiled(program: tuple[str, TreeConfig, int | None]) -> Callable:
        method, shape, depth = program
        states = (like.states, like.states)
        arguments = (trio, like.tokens, like.anchors, *states, like.request, jnp.float32(1))
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


def rounds_of(
    run: Callable, trio: Trio, sample: Sample, fed: States, heat: float = 1.0
) -> list[int]:
    """Tokens that each round emits, with a program of `compile_programs`."""
    given = (sample.tokens, sample.anchors, sample.states, fed, sample.request)
    lengths = run(trio, *given, jnp.float32(heat))
    return walk(np.asarray(lengths))


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
        "score_temperature": setting.score_temperature,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = text_parser(
        "Accepted length, one part changed at a time.",
        temperatures=(0.0, 1.0),
        count=24,
        out=RESULT,
    )
    parser.add_argument("--new-tokens", type=int, default=128)
    options = read_options(parser, arguments, "new_tokens")
    result = measure(**text_arguments(options), new_tokens=options.new_tokens)
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
