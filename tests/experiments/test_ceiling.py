"""Acceptance by depth: along real continuations, with the scores of training, averaged as said."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import ceiling, texts
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.generate import decode, rounds_limit
from tfm_jax.decoding.prefill import prefill
from tfm_jax.decoding.state import Trio, make_request
from tfm_jax.model import Model
from tfm_jax.training.weaver import path_scores

SEEDS = np.asarray([3, 2**32 - 1, 8], np.uint32)


def request_at(temperature: float, total: int, seed: int = 0):
    sampling = Sampling(temperature=temperature, seed=seed, shared_noise=False)
    return make_request(sampling, end_tokens=(), vocab_limit=83, total=total)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_drafts_are_judged_along_plain_decoding(tiny_trio: Trio, prompt, monkeypatch, temperature):
    # Nearly the whole vocabulary: tokens of random networks are not in a small pool.
    monkeypatch.setattr(ceiling, "POOL", 80)
    weaver = nnx.clone(tiny_trio.weaver)
    weaver.config = dataclasses.replace(weaver.config, candidate_pool_size=80)
    trio = dataclasses.replace(tiny_trio, weaver=weaver)
    seeds = SEEDS if temperature else SEEDS[:1]
    state = prefill(trio, prompt, 256)
    request = request_at(temperature, 256)
    tokens, logits = jax.jit(ceiling.continuations)(trio, state, request, jnp.asarray(seeds))
    assert tokens.shape == (len(seeds), 7)
    found = jax.jit(ceiling.draft_acceptances)(trio, state, request, tokens, logits)

    expected = {name: [] for name in ceiling.DRAFTS}
    anchor, verifier = len(prompt) - 1, Trio(verifier=trio.verifier)
    for seed, row, scores in zip(seeds, tokens, logits, strict=True):
        plain = decode(
            verifier,
            prefill(verifier, prompt, 256),
            request_at(temperature, len(prompt) + 7, int(seed)),
            rounds_limit(),
            method="ar",
            shape=TreeConfig(),
        )
        text = plain.tokens[: len(prompt) + 7]
        np.testing.assert_array_equal(row, text[len(prompt) :])
        given = (text, jnp.asarray([anchor]), jnp.ones(1, bool), jnp.float32(temperature))
        path = jax.jit(path_scores, static_argnames="vocab_limit")(trio, *given, vocab_limit=83)
        ids, prior, conditional, target = (
            np.asarray(x[0]) for x in (path.ids, path.prior, path.logits, path.target)
        )
        p = np.exp(target)
        own = np.take_along_axis(np.asarray(jax.nn.softmax(scores, axis=-1)), ids, axis=-1)
        np.testing.assert_allclose(own, p, atol=1e-5)
        for name, drafted in (("marginal", prior), ("weaver", conditional)):
            q = np.exp(drafted - np.logaddexp.reduce(drafted, axis=-1, keepdims=True))
            expected[name].append(np.minimum(p, q).sum(-1))
            expected[f"{name}_argmax"].append(p[np.arange(7), q.argmax(-1)])
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], np.mean(values, axis=0), atol=1e-4)
    differ = np.abs(found["weaver"] - found["marginal"])
    assert differ.max() > 1e-3


def test_oracles_average_groups_of_samples():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (16, 3, 11)), jnp.float32)
    whole = ceiling.oracle_acceptances(logits, 8)
    halves = [ceiling.oracle_acceptances(part, 8) for part in (logits[:8], logits[8:])]
    for name in ceiling.ORACLES:
        np.testing.assert_allclose(
            whole[name], np.mean([h[name] for h in halves], axis=0), rtol=1e-5
        )
    assert (whole["oracle"] < whole["oracle_in_sample"]).all()
    assert (whole["best"] < whole["best_in_sample"]).all()


def test_rows_average_prompts_within_domains_and_then_domains():
    names = ceiling.DRAFTS + ceiling.ORACLES

    def a_prompt(weaver: float) -> dict[str, np.ndarray]:
        return {name: np.full(2, weaver if name == "weaver" else 0.5) for name in names}

    measured = {"prose": [a_prompt(0.6), a_prompt(0.8)], "code": [a_prompt(0.9)]}
    rows = ceiling.summarise(1.0, measured)
    assert [(row["domain"], row["depth"]) for row in rows] == [
        (domain, depth) for domain in ("prose", "code", "macro") for depth in (1, 2)
    ]
    prose, code, macro = rows[0], rows[2], rows[4]
    assert prose["acceptance"]["weaver"] == 0.7
    assert prose["ci95"]["weaver"] == [0.6, 0.8]
    assert code["ci95"]["weaver"] == [0.9, 0.9]
    assert macro["acceptance"] == {name: 0.8 if name == "weaver" else 0.5 for name in names}
    above = macro["weaver_above"]["oracle"]
    assert above["mean"] == 0.3
    assert above["ci95"] == [0.25, 0.35]


def test_the_whole_experiment(tiny_trio: Trio, prompt, monkeypatch, tmp_path):
    model = Model(trio=tiny_trio, tokenizer=None, end_tokens=())
    monkeypatch.setattr(texts, "load", lambda *_, **__: model)
    prompts = [prompt[:12].tolist(), prompt.tolist()]
    monkeypatch.setattr(ceiling, "load_prompts", lambda _, __, count, ___: prompts[:count])
    options = ["--count", "2", "--samples", "16", "--anchors", "2", "--domains", "code", "math"]
    out = tmp_path / "ceiling.json"
    ceiling.main([*options, "--temperatures", "0", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 2 * 3 * 7
    assert [row["samples"] for row in result["samples"]] == [8, 16]
    first = next(r for r in result["rows"] if r["temperature"] == 1 and r["domain"] == "macro")
    # The first position follows from the context: a perfect drafter is always right about it.
    assert first["acceptance"]["oracle"] == 1
    assert first["acceptance"]["best"] == 1
    cold = next(r for r in result["rows"] if r["temperature"] == 0)
    assert set(cold["acceptance"]) == set(ceiling.DRAFTS)


def test_refuses_what_it_cannot_measure(tiny_trio: Trio):
    model = Model(trio=dataclasses.replace(tiny_trio), tokenizer=None, end_tokens=())
    with pytest.raises(ValueError, match="8 times a power of two, got 24"):
        ceiling.measure(model, samples=24)
    with pytest.raises(ValueError, match=r"0 or 1, got \[0.5\]"):
        ceiling.measure(model, temperatures=[0.5])
