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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dflash", "ddtree", "tfm"])
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
    starts = text_sets.make_set(model, {"code": PROMPTS}, 24, NEW).starts[0.0, True]
    other = jnp.full_like(starts.ahead, 83)  # no token of the vocabulary
    blind = dataclasses.replace(starts, ahead=other)
    lengths = [
        np.asarray(
            text_sets.replayed_lengths(
                tiny_trio, s, method="ddtree", shape=text_sets.METHODS["ddtree"]
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
    base = replay.by_domain(["code", "code", "chat"], [[8, 8], [4, 2, 2], [12]])
    assert base["code"].tolist() == [[16, 2], [8, 3]]
    half = replay.by_domain(["code", "code", "chat"], [[4] * 4, [2, 2, 1, 1, 1, 1], [6, 6]])
    own = replay.summarise(half, base)
    assert own["by_domain"] == {"code": 2.4, "chat": 6.0}
    assert own["mean_accepted_length"] == 4.2
    assert own["ci95"][0] < 4.2 < own["ci95"][1]
    # Exactly half of the base for every prompt: paired draws leave no spread.
    assert own["to_base"] == 0.5
    assert own["to_base_ci95"] == [0.5, 0.5]


def test_rows_name_what_they_are_compared_with():
    texts = text_sets.TextSet(domains=["code", "chat"], starts={}, nats={})
    rounds = {(0.0, True): [[2, 2], [3]], (1.0, True): [[2, 2], [3]]}
    base = {setting: [[1] * 4, [1] * 3] for setting in rounds}
    rows = text_sets.rows_beside({"method": "tfm"}, texts, rounds, {"base": base, "own": rounds})
    assert [(r["temperature"], r["shared_noise"]) for r in rows] == [(0.0, False), (1.0, True)]
    assert rows[0]["method"] == "tfm"
    assert (rows[0]["to_base"], rows[0]["to_own"]) == (2.5, 1.0)
    assert rows[0]["to_own_ci95"] == [1.0, 1.0]


def test_gains_are_grouped_by_how_predictable_texts_are():
    nats = {0.0: np.asarray([0.5, 3.0]), 1.0: np.asarray([2.0, 1.0])}
    sets = {
        kind: text_sets.TextSet(domains=["code", "chat"], starts={}, nats=own)
        for kind, own in (("held back", nats), ("evaluation", {t: n + 4 for t, n in nats.items()}))
    }
    tfm, ddtree = [[4, 4], [2, 2, 2, 2]], [[2] * 4, [1] * 8]
    rounds = {
        kind: {
            method: {setting: lengths.copy() for setting in text_sets.SETTINGS}
            for method, lengths in (("tfm", tfm), ("ddtree", ddtree))
        }
        for kind in sets
    }
    rows = text_sets.rows_by_entropy({"trio": "a"}, sets, rounds, groups=4)
    assert [row["nats"] for row in rows] == [0.5, 3.0, 4.5, 7.0] + [1.0, 2.0, 5.0, 6.0] * 2
    assert [row["tfm"] for row in rows] == [4.0, 2.0, 4.0, 2.0] + [2.0, 4.0, 2.0, 4.0] * 2
    assert [row["ddtree"] for row in rows[:4]] == [2.0, 1.0, 2.0, 1.0]
    assert {row["to_ddtree"] for row in rows} == {2.0}
    assert [row["shared_noise"] for row in rows] == [False] * 4 + [True] * 4 + [False] * 4
    (pair, *_) = text_sets.rows_by_entropy({}, sets, rounds, groups=2)
    assert (pair["texts"], pair["nats"], pair["nats_range"]) == (2, 1.75, [0.5, 3.0])
    assert pair["tfm"] == pytest.approx(16 / 6, abs=1e-4)


def test_entropy_is_that_of_the_distribution_that_chose_each_root(tiny_trio: Trio):
    rng = np.random.default_rng(5)
    prompts = {"code": [rng.integers(6, 80, 9).tolist() for _ in range(2)]}
    model = Model(trio=tiny_trio, tokenizer=None, end_tokens=())
    texts = text_sets.make_set(model, prompts, 9, 6)
    for temperature, found in texts.nats.items():
        roots = np.asarray(
            texts.starts[temperature, True].root
        )  # [2, 6], the first is the prompt's end
        for prompt, row, nats in zip(prompts["code"], roots, found, strict=True):
            logits = np.asarray(model.logits([*prompt, *row[1:]]), np.float64)[7:-1]
            p = np.exp(logits - logits.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            assert nats == pytest.approx(-(p * np.log(p)).sum(-1).mean(), rel=1e-4)
