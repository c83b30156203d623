"""Accepted lengths without a verifier are those of decoding, and are averaged as said."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import ablation, calibration, texts
from experiments.ablation import Variant
from experiments.replay import States
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.draft import Draft
from tfm_jax.decoding.sampling import cool
from tfm_jax.decoding.state import Trio
from tfm_jax.model import Model

SHAPE = TreeConfig(budget=24, expand=3, children=12, pool=40)
PROMPT = np.random.default_rng(3).integers(6, 80, 21).tolist()


@pytest.fixture(scope="module")
def model(tiny_trio: Trio) -> Model:
    return Model(trio=tiny_trio, tokenizer=None, end_tokens=())


@pytest.mark.parametrize("method", [pytest.param("tfm", marks=pytest.mark.slow), "ddtree"])
def test_rounds_are_those_of_decoding(model: Model, method):
    setting = Variant(part="base", method=method, shape=SHAPE)
    longest = 0
    for temperature in (0.0, 1.0):
        samples = ablation.make_samples(model, {"code": [PROMPT[:9], PROMPT]}, temperature, 40)
        programs = ablation.compile_programs(model.trio, [setting], samples[0])
        for seed, (sample, prompt) in enumerate(zip(samples, (PROMPT[:9], PROMPT), strict=True)):
            run = model.generate(
                prompt,
                max_new_tokens=40,
                method=method,
                tree=SHAPE,
                sampling=Sampling(temperature=temperature, seed=seed),
            )
            program = programs[setting.program]
            rounds = ablation.rounds_of(program, model.trio, sample, sample.states)
            assert tuple(rounds) == run.stats.accepted_lengths
            longest = max(longest, *rounds)
    assert longest >= 3


def test_what_weaver_is_fed_and_how_deep_trees_go_matter(model: Model):
    (sample,) = ablation.make_samples(model, {"code": [PROMPT]}, 1.0, 40)
    base = Variant(part="base", shape=SHAPE)
    shallow = Variant(part="depth", shape=SHAPE, depth=1)
    programs = ablation.compile_programs(model.trio, [base, shallow], sample)

    def lengths(setting: Variant, fed: States) -> np.ndarray:
        arguments = (sample.tokens, sample.anchors, sample.states, fed, sample.request)
        return np.asarray(programs[setting.program](model.trio, *arguments, jnp.float32(1)))

    full = lengths(base, sample.states)
    for name in ("verifier", "drafter"):
        other = dataclasses.replace(
            sample.states, **{name: jnp.roll(getattr(sample.states, name), 5, axis=0)}
        )
        assert (lengths(base, other) != full).any()
    assert lengths(shallow, sample.states).max() == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tfm", "ddtree"])
def test_heated_scores_are_divided_by_their_temperature(model: Model, monkeypatch, method):
    heat = 3.0
    settings = [
        Variant(part="base", method=method, shape=SHAPE),
        Variant(part="scores", method=method, shape=SHAPE, score_temperature=heat),
    ]
    (sample,) = ablation.make_samples(model, {"code": [PROMPT]}, 1.0, 40)
    given = (sample.tokens, sample.anchors, sample.states, sample.states, sample.request)

    def lengths(setting: Variant, heat: float) -> np.ndarray:
        program = ablation.compile_programs(model.trio, settings, sample)[setting.program]
        return np.asarray(program(model.trio, *given, jnp.float32(heat)))

    own, heated = (lengths(setting, setting.score_temperature) for setting in settings)
    assert (own != heated).any()

    def log_probs(self: Draft, logits: jax.Array, depths: jax.Array) -> jax.Array:
        scores = cool(logits, self.temperature) + self.noise[depths]
        return jax.nn.log_softmax(scores / heat, axis=-1)

    monkeypatch.setattr(Draft, "log_probs", log_probs)
    jax.clear_caches()
    np.testing.assert_array_equal(lengths(settings[0], 1.0), heated)


@pytest.mark.slow
def test_calibration_compares_each_method_with_its_own_scores(model: Model, monkeypatch, tmp_path):
    monkeypatch.setattr(texts, "load", lambda *_, **__: model)
    monkeypatch.setattr(ablation, "load_prompts", lambda *_: [PROMPT])
    monkeypatch.setattr(calibration, "TEMPERATURES", (2.0,))
    monkeypatch.setattr(calibration, "Variant", functools.partial(Variant, shape=SHAPE))
    out = tmp_path / "calibration.json"
    calibration.main(
        ["--temperatures", "1", "--new-tokens", "12", "--domains", "code", "--out", str(out)]
    )
    rows = json.loads(out.read_text())["rows"]
    found = [(row["method"], row["score_temperature"]) for row in rows]
    assert found == [("ddtree", 1.0), ("ddtree", 2.0), ("tfm", 1.0), ("tfm", 2.0)]
    assert (rows[0]["to_base"], rows[2]["to_base"]) == (1, 1)
    assert rows[3]["name"] == "scores at 2 times their temperature"


def test_the_whole_experiment(model: Model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(texts, "load", lambda *_, **__: model)
    monkeypatch.setattr(ablation, "load_prompts", lambda *_: [PROMPT])
    shallow = Variant(part="depth", shape=SHAPE, depth=2)
    blind = Variant(part="states", shape=SHAPE, drafter_states=False)
    settings = [Variant(part="base", shape=SHAPE), shallow, blind]
    monkeypatch.setattr(ablation, "variants", lambda: settings)
    out = tmp_path / "ablation.json"
    ablation.main(
        ["--temperatures", "1", "--new-tokens", "24", "--domains", "code", "--out", str(out)]
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["depth"] for row in rows] == [7, 2, 7]
    assert [row["name"] for row in rows] == [
        "base",
        "depth 2",
        "Weaver without drafter states",
    ]
    assert rows[0]["to_base"] == 1
    assert "of the base" in capsys.readouterr().out


def test_variants_differ_from_the_base_in_one_part():
    base, *others = ablation.variants()
    assert base.shape == TreeConfig(budget=64)
    for other in others:
        fields = {"method", "depth", "verifier_state", "drafter_states"}
        changed = [f for f in fields if getattr(other, f) != getattr(base, f)]
        changed += [
            f.name
            for f in dataclasses.fields(TreeConfig)
            if getattr(other.shape, f.name) != getattr(base.shape, f.name)
        ]
        assert len(changed) == 1 or (other.part == "states" and len(changed) == 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"longest_prompt": 1}, "longest_prompt must be at least 2, got 1"),
        ({"new_tokens": 0}, "new_tokens must be at least 1, got 0"),
    ],
)
def test_numbers_that_no_run_could_have(given, message):
    with pytest.raises(ValueError, match=message):
        ablation.measure(None, **given)
