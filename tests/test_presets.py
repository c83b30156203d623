"""Presets against the published numbers of parameters, and models made of them."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tfm_jax import presets
from tfm_jax.checkpoints import parameter_shapes
from tfm_jax.config import ConfigError
from tfm_jax.model import random_model
from tfm_jax.presets import geometry, preset_file, preset_names

# Text parameters of the published checkpoints.
VERIFIERS = {
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.6-27b": 26_895_998_464,
}


def parameters(config) -> int:
    return sum(int(np.prod(shape)) for shape in parameter_shapes(config).values())


@pytest.mark.parametrize(
    "name",
    [
        name if name == "qwen3.5-0.8b" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(set(VERIFIERS) - {"qwen3.5-27b"})
    ],
)
def test_verifiers_have_the_published_number_of_parameters(name):
    assert parameters(geometry(name).verifier) == VERIFIERS[name]


def test_both_27b_verifiers_have_one_geometry():
    assert geometry("qwen3.5-27b").verifier == geometry("qwen3.6-27b").verifier


def test_the_27b_drafter_and_weaver_have_the_published_number_of_parameters():
    sizes = geometry("qwen3.6-27b")
    assert parameters(sizes.drafter) == 1_730_213_120
    assert parameters(sizes.weaver) == 56_694_784


def test_names_are_those_of_the_files():
    assert set(VERIFIERS) < set(preset_names())
    with pytest.raises(ConfigError, match=r"qwen9: no such preset.*qwen3\.6-27b"):
        geometry("qwen9")


def test_files_are_found_in_a_checkout_and_in_an_installed_package(tmp_path, monkeypatch):
    checkout = Path(__file__).parents[1] / "configs"
    assert preset_file("pocket") == checkout / "pocket.json"
    installed = tmp_path / "tfm_jax" / "configs"
    installed.mkdir(parents=True)
    monkeypatch.setattr(presets, "_FOLDERS", (tmp_path / "configs", installed))
    (installed / "pocket.json").write_bytes((checkout / "pocket.json").read_bytes())
    assert preset_file("pocket") == installed / "pocket.json"
    assert geometry("pocket").verifier.hidden_size == 320


def test_a_file_must_hold_all_parts(tmp_path):
    path = tmp_path / "half.json"
    path.write_text(json.dumps({"verifier": {}}))
    with pytest.raises(ConfigError, match=r"half\.json has no drafter and no weaver"):
        geometry(path)
    path.write_text(json.dumps({"verifier": {"depth": 3}, "drafter": {}, "weaver": {}}))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'depth'"):
        geometry(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("5", "must be an object, got 5"),
        ('{"verifier": [], "drafter": {}, "weaver": {}}', r"verifier must be an object, got \[\]"),
        ('{"verifier": "4", "drafter": {}, "weaver": {}}', "verifier must be an object, got '4'"),
        ('{"verifier": null, "drafter": {}, "weaver": {}}', "verifier must be an object, got None"),
    ],
)
def test_a_file_that_holds_no_geometry_is_refused(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"x\.json:? {message}"):
        geometry(path)


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("verifier", "hidden_size", 0, r"verifier: hidden_size must be an integer in 1\.\."),
        ("drafter", "mask_token_id", "4", r"drafter: mask_token_id must be an integer in 0\.\."),
        ("weaver", "d_rank", 0, r"weaver: d_rank must be an integer in 1\.\."),
        ("drafter", "vocab_size", 84, "drafter vocab_size is 84, the verifier's vocab_size is 83"),
    ],
)
def test_bad_sizes_are_named_with_their_file(tiny_preset, tmp_path, part, key, value, message):
    settings = json.loads(tiny_preset.read_text())
    settings[part][key] = value
    path = tmp_path / "x.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"x\.json: .*{message}"):
        geometry(path)


def test_random_models_differ_by_seed_alone(tiny_preset):
    first, again, other = (random_model(tiny_preset, seed=seed) for seed in (0, 0, 1))
    leaves = [jax.tree.leaves(model.trio) for model in (first, again, other)]
    same = [np.array_equal(x, y) for x, y in zip(leaves[0], leaves[1], strict=True)]
    assert all(same)
    assert not all(np.array_equal(x, y) for x, y in zip(leaves[0], leaves[2], strict=True))
    plain = first.generate([5, 6, 7], max_new_tokens=6, method="ar")
    assert len(plain.tokens) == 6
    assert all(np.isfinite(first.logits([5, 6, 7])).ravel())


def test_a_random_model_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError, match="no such preset"):
        random_model("qwen")
    with pytest.raises(ValueError, match="dtype must be one of"):
        random_model("pocket", dtype="float16")


@pytest.mark.parametrize("seed", [1.5, "a", None, -1, 2**32, True])
def test_a_random_model_refuses_what_is_no_seed(seed):
    with pytest.raises(ValueError, match="seed must be an integer in 0"):
        random_model("pocket", seed=seed)
