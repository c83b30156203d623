"""Many texts at once, written by the verifier after prompts, and the rounds of decoding along them.

All texts of a set are one batch: written side by side, drafted at every position, and replayed
with any method and Weaver (`experiments.replay`). On a GPU use it inside `automatic("xla")`: the
kernels are made for one text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr

from experiments.acceptance import DOMAINS, common_setting
from experiments.replay import (
    Starts,
    States,
    accepted_lengths,
    by_domain,
    starts_at,
    states_at,
    summarise,
    walk,
)
from experiments.store import rounded
from tfm_jax.checkpoints.trio import open_trio
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.sampling import hide_padding
from tfm_jax.decoding.state import Trio, make_request
from tfm_jax.model import Model, directory
from tfm_jax.training.continuations import write_on
from tfm_jax.training.texts import packed_corpus

METHODS = {
    "tfm": TreeConfig(budget=64, expand=4),
    "ddtree": TreeConfig(budget=64),
    "dflash": TreeConfig(budget=15),
}
SETTINGS = ((0.0, True), (1.0, True), (1.0, False))  # temperature, shared noise
TEXTS_TOGETHER = 4  # texts that are replayed side by side
HELDOUT = "heldout_prompts.json"

Prompts = Mapping[str, Sequence[Sequence[int]]]
Rounds = list[list[int]]
Measured = Mapping[tuple[float, bool], Rounds]  # by setting

_write = jax.jit(write_on, static_argnames=("total", "vocab_limit"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSet:
    """Texts of the verifier and where their rounds start, in every setting.

    Attributes:
      domains: of each text.
      starts: by temperature and shared noise, of all texts [R, A].
      nats: by temperature, [R] mean entropy of the verifier's distributions that the anchors of
        each text are from; the first anchor is the prompt's last token.
    """

    domains: list[str]
    starts: dict[tuple[float, bool], Starts]
    nats: dict[float, np.ndarray]


def check_corpus(corpus: Path, model: str | Path | None = None) -> None:
    """Refuses a folder that is no packed corpus, or one of another tokenizer than a model's.

    Raises:
      ValueError: the corpus was packed with another tokenizer.
      OSError: it is none, or the model is missing.
    """
    tokenizer = None
    if model is not None:
        file = open_trio(directory(model)).text_files / "tokenizer.json"
        tokenizer = file if file.is_file() else None
    packed_corpus(corpus, (), tokenizer, corpus)


def replay_setting(model: Model, name: str, corpus: Path) -> dict[str, Any]:
    """What every row of replays depends on, the model by its name."""
    return {
        **common_setting(model, name),
        "corpus": corpus.name,
        "methods": {method: dataclasses.asdict(shape) for method, shape in METHODS.items()},
        "operations": "xla",
        "training_dtype": "bfloat16",
        "prompt_form": "plain continuation, no chat template; end tokens do not stop",
    }


def heldout_prompts(corpus: Path, count: int) -> dict[str, list[list[int]]]:
    """`count` prompts a domain from held-back documents of a packed corpus, evenly spaced.

    Raises:
      ValueError: a domain has fewer.
      OSError: there are none.
    """
    if not (corpus / HELDOUT).is_file():
        raise FileNotFoundError(f"{corpus} has no held-back prompts: it has no {HELDOUT}")
    rows = json.loads((corpus / HELDOUT).read_text("utf-8"))["prompts"]
    found = {}
    for domain in DOMAINS:
        own = [row["tokens"] for row in rows if row["domain"] == domain]
        if len(own) < count:
            raise ValueError(f"{corpus / HELDOUT}: {len(own)} prompts of {domain}, {count} needed")
        found[domain] = [own[i * len(own) // count] for i in range(count)]
    return found


@functools.partial(jax.jit, static_argnames=("new_tokens", "vocab_limit"))
def states_along(
    trio: Trio, tokens: jax.Array, lengths: jax.Array, *, new_tokens: int, vocab_limit: int
) -> tuple[States, jax.Array]:
    """The states at the anchors of texts that go on beyond the last one as far as a tree reaches.

    Args:
      trio: the networks.
      tokens: [R, T] int32 texts.
      lengths: [R] int32, at least 2, of their prompts; the first anchor is a prompt's last token.
      new_tokens: static, anchors A of a text.
      vocab_limit: static, see `Request`.

    Returns:
      states [R, A], and the verifier's entropy [R, A] float32 where each anchor was chosen, in nats
      at temperature 1.
    """

    def one(text: tuple[jax.Array, jax.Array]) -> tuple[States, jax.Array]:
        tokens, length = text
        states = states_at(trio, tokens, _anchors(length, new_tokens))
        logits = hide_padding(trio.verifier.logits(states.verifier), jnp.int32(vocab_limit))
        return states, entr(jax.nn.softmax(logits, axis=-1)).sum(axis=-1)

    return jax.lax.map(one, (tokens, lengths))


@functools.partial(jax.jit, static_argnames=("vocab_limit",))
def starts_along(
    trio: Trio,
    tokens: jax.Array,
    lengths: jax.Array,
    seeds: jax.Array,
    states: States,
    temperature: jax.Array,
    shared: jax.Array,
    *,
    vocab_limit: int,
) -> Starts:
    """Where the rounds at the anchors of texts start, [R, A].

    Args:
      trio, tokens, lengths, vocab_limit: see `states_along`.
      seeds: [R] uint32.
      states: from `states_along`.
      temperature: float32 scalar, that the texts were drawn at.
      shared: bool scalar, whether drafts know the target's noise.
    """
    total, new_tokens = tokens.shape[1], states.verifier.shape[1]
    common = make_request(Sampling(), end_tokens=(), vocab_limit=vocab_limit, total=total)
    common = dataclasses.replace(common, temperature=temperature, shared_noise=shared)

    def one(text: tuple[jax.Array, jax.Array, jax.Array, States]) -> Starts:
        tokens, length, seed, states = text
        request = dataclasses.replace(common, seed=seed)
        anchors = _anchors(length, new_tokens)
        return starts_at(trio, tokens, anchors, states, request, METHODS["tfm"].pool)

    return jax.lax.map(one, (tokens, lengths, seeds, states))


def _anchors(length: jax.Array, count: int) -> jax.Array:
    """The last token of a prompt, and those after it."""
    return length - 1 + jnp.arange(count)


@functools.partial(jax.jit, static_argnames=("method", "shape"))
def replayed_lengths(trio: Trio, starts: Starts, *, method: str, shape: TreeConfig) -> jax.Array:
    """Tokens that a round at each anchor of each text emits, [R, A] int32.

    Args:
      trio: the networks.
      starts: of all rounds, [R, A].
      method, shape: of the trees.
    """
    run = functools.partial(accepted_lengths, trio, method=method, shape=shape)
    together = min(TEXTS_TOGETHER, starts.root.shape[0])
    return jax.lax.map(run, starts, batch_size=together)


def make_set(model: Model, prompts: Prompts, width: int, new_tokens: int) -> TextSet:
    """The texts after prompts; prompt i of a domain has seed i, as in `experiments.acceptance`."""
    rows = [(domain, i, p) for domain, own in prompts.items() for i, p in enumerate(own)]
    padded = np.stack([np.pad(prompt, (0, width - len(prompt))) for _, _, prompt in rows])
    lengths = jnp.asarray([len(prompt) for _, _, prompt in rows], jnp.int32)
    seeds = jnp.asarray([seed for _, seed, _ in rows], jnp.uint32)
    limit = model.vocab_limit
    total = width + new_tokens + model.trio.depth + 1
    starts, nats = {}, {}
    for temperature in dict.fromkeys(temperature for temperature, _ in SETTINGS):
        temperatures = jnp.full((len(rows),), temperature)
        given = (jnp.asarray(padded, jnp.int32), lengths, temperatures, seeds)
        texts = _write(model.trio.verifier, *given, total=total, vocab_limit=limit)
        states, found = states_along(
            model.trio, texts, lengths, new_tokens=new_tokens, vocab_limit=limit
        )
        nats[temperature] = np.asarray(found).mean(axis=1)
        for shared in (shared for other, shared in SETTINGS if other == temperature):
            made = (texts, lengths, seeds, states, jnp.float32(temperature), jnp.bool_(shared))
            starts[temperature, shared] = jax.block_until_ready(
                starts_along(model.trio, *made, vocab_limit=limit)
            )
    return TextSet(domains=[domain for domain, _, _ in rows], starts=starts, nats=nats)


def replay(trio: Trio, texts: TextSet, method: str, temperature: float, shared: bool) -> Rounds:
    """Tokens that each round of decoding would emit, for each text."""
    starts = texts.starts[temperature, shared]
    lengths = replayed_lengths(trio, starts, method=method, shape=METHODS[method])
    return [walk(row) for row in np.asarray(lengths)]


def replay_all(trio: Trio, texts: TextSet, method: str) -> Measured:
    """`replay` in every setting."""
    return {setting: replay(trio, texts, method, *setting) for setting in SETTINGS}


def within_pools(texts: TextSet) -> Measured:
    """Rounds of a Weaver that knows each next token and can only take it from the pools.

    No Weaver accepts more of these drafts. Without shared noise nothing knows the next token.
    """
    found = {}
    for temperature, shared in SETTINGS:
        if temperature == 0 or shared:
            lengths = np.asarray(_lengths_within(texts.starts[temperature, shared]))
            found[temperature, shared] = [walk(row) for row in lengths]
    return found


@jax.jit
def _lengths_within(starts: Starts) -> jax.Array:
    depth = starts.draft.ids.shape[-2]
    inside = (starts.draft.ids == starts.ahead[..., :depth, None]).any(axis=-1)
    return 1 + jnp.cumprod(inside, axis=-1).sum(axis=-1)


def rows_beside(
    names: Mapping[str, Any], texts: TextSet, rounds: Measured, bases: Mapping[str, Measured]
) -> list[dict[str, Any]]:
    """A row of the result for each setting, compared with other rounds of the same texts.

    Args:
      names: of the row.
      texts: that all rounds are along.
      rounds: what the rows are about.
      bases: by name; the ratio to one is `to_<name>`.
    """
    rows = []
    for setting, found in rounds.items():
        own = by_domain(texts.domains, found)
        noise = setting[1] and setting[0] > 0
        row = {**names, "temperature": setting[0], "shared_noise": noise}
        for base, other in bases.items():
            summary = summarise(own, by_domain(texts.domains, other[setting]))
            row |= {n.replace("to_base", f"to_{base}"): value for n, value in summary.items()}
        rows.append(row)
    return rows


def rows_by_entropy(
    names: Mapping[str, Any],
    sets: Mapping[str, TextSet],
    rounds: Mapping[str, Mapping[str, Measured]],
    groups: int = 5,
) -> list[dict[str, Any]]:
    """What `tfm` gains over DDTree on texts that are easy and hard to predict.

    All texts of a setting, ranked by the verifier's entropy along them, in groups of equal size.

    Args:
      names: of the rows.
      sets: texts, by the kind of their prompts.
      rounds: along them, by kind and method.
      groups: number of them.
    """
    rows = []
    for setting in SETTINGS:
        temperature, shared = setting
        nats = np.concatenate([texts.nats[temperature] for texts in sets.values()])
        found = {
            method: [text for kind in sets for text in rounds[kind][method][setting]]
            for method in ("tfm", "ddtree")
        }
        for chosen in np.array_split(np.argsort(nats, kind="stable"), min(groups, len(nats))):
            tfm, ddtree = (
                by_domain(["all"] * len(chosen), [found[method][i] for i in chosen])
                for method in ("tfm", "ddtree")
            )
            summary = summarise(tfm, ddtree)
            rows.append(
                {
                    **names,
                    "temperature": temperature,
                    "shared_noise": shared and temperature > 0,
                    "texts": len(chosen),
                    "nats": rounded(nats[chosen].mean()),
                    "nats_range": rounded(nats[chosen[[0, -1]]]),
                    "tfm": summary["mean_accepted_length"],
                    "ddtree": summarise(ddtree, ddtree)["mean_accepted_length"],
                    "to_ddtree": summary["to_base"],
                    "to_ddtree_ci95": summary["to_base_ci95"],
                }
            )
    return rows
