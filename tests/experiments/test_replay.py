"""Replays along known texts are decoding, round for round, and are averaged as said."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import replay, text_sets
from tfm_jax.config import Sampling
from tfm_jax.decoding.state import Trio
from tfm_jax.model import Model

PROMPTS = [np.random.default_rng(n).integers(6, 80, n).tolist() for n in (9, 21)]
NEW = 40


@pytest.mark.parametrize(
    "method",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ("dflash", "ddtree")), "tfm"],
)
def test_replays_of_many_texts_are_decoding(tiny_trio: Trio, method: str) -> None:
    model = Model(trio=tiny_trio, tokenizer=None, end_tokens=())
    texts = text_sets.make_set(model, {"code": PROMPTS, "chat": PROMPTS[1:]}, 24, NEW)
    assert texts.domains == ["code", "code", "chat"]
    longest, differing = 0, 0
    for temperature, shared in text_sets.SETTINGS:
        found = text_sets.replay(tiny_trio, texts, method, temperature, shared)
        # The third text has the second's prompt, but the first's seed.
        for rounds, prompt, seed in zip(found, [*PROMPTS, PROMPTS[1]], (0, 1, 0), strict=True):
            run = model.generate(
                prompt,
                max_new_tokens=NEW,
                method=method,
                tree=text_sets.METHODS[method],
                sampling=Sampling(temperature=temperature, seed=seed, shared_noise=shared),
            )
            assert tuple(rounds) == run.stats.accepted_lengths
            longest = max(longest, *rounds)
        differing += found[1] != found[2]
    assert longest >= 3
    assert differing


def test_a_replay_needs_the_text(tiny_trio: Trio) -> None:
    model = Model(trio=tiny_trio, tokenizer=None, end_tokens=())
    starts = text_sets.make_set(model, {"code": PROMPTS}, 24, NEW).starts[0.0]
    other = jnp.full_like(starts.ahead, 83)  # no token of the vocabulary
    blind = dataclasses.replace(starts, ahead=other)
    lengths = [
        np.asarray(
            text_sets.replayed_lengths(
                tiny_trio, s, jnp.bool_(True), method="ddtree", shape=text_sets.METHODS["ddtree"]
            )
        )
        for s in (starts, blind)
    ]
    assert lengths[0].max() > 1
    assert lengths[1].max() == 1


def test_a_walk_goes_on_by_what_was_accepted():
    assert replay.walk(np.asarray([3, 9, 9, 1, 2, 9, 4, 9])) == [3, 1, 2, 2]
    assert replay.walk(np.asarray([1, 1])) == [1, 1]


def test_lengths_are_pooled_over_prompts_and_averaged_over_domains():
    base = replay.by_domain(["code", "code", "chat"], [[4, 4], [2, 1, 1], [6]])
    assert base["code"].tolist() == [[8, 2], [4, 3]]
    half = replay.by_domain(["code", "code", "chat"], [[2] * 4, [1, 1, 0.5, 0.5, 0.5, 0.5], [3, 3]])
    own = replay.summarise(half, base)
    assert own["by_domain"] == {"code": 1.2, "chat": 3.0}
    assert own["mean_accepted_length"] == 2.1
    assert own["ci95"][0] < 2.1 < own["ci95"][1]
    # Exactly half of the base for every prompt: paired draws leave no spread.
    assert own["to_base"] == 0.5
    assert own["to_base_ci95"] == [0.5, 0.5]
