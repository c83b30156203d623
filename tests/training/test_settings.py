"""Configurations of training: every entry of the wrong kind or out of range is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfm_jax.config import ConfigError
from tfm_jax.presets import preset_file
from tfm_jax.training.settings import SHORT, check_lengths, read_settings, stage_settings


@pytest.mark.parametrize(
    ("stage", "name", "value", "message"),
    [
        ("weaver", "recipe", [], "weaver.recipe must be an object, got []"),
        ("weaver", "optimiser", None, "weaver.optimiser must be an object, got None"),
        ("weaver", "log_every", 0, "weaver.log_every must be positive, got 0"),
        ("weaver", "log_every", "5", "weaver.log_every must be an integer, got '5'"),
        ("verifier", "rows", "2", "verifier.rows must be an integer, got '2'"),
        ("verifier", "mixture", [1], "verifier.mixture must be an object, got [1]"),
        ("verifier", "mixture", {}, "verifier.mixture must have a weight above 0, got {}"),
        ("verifier", "mixture", {"a": "1"}, "verifier.mixture.a must be finite and at least 0"),
        ("verifier", "mixture", {"a": -1}, "verifier.mixture.a must be finite and at least 0"),
        ("weaver", "mixture", {"a": 1}, "unknown weaver.mixture"),
        ("verifier", "length", 0, "verifier.length must be positive, got 0"),
        ("dflash", "seconds", -5, "dflash.seconds must be finite and positive, got -5"),
        ("dflash", "seconds", 0, "dflash.seconds must be finite and positive, got 0"),
        ("dflash", "seconds", "5", "dflash.seconds must be finite and positive, got '5'"),
        ("dflash", "seconds", float("nan"), "dflash.seconds must be finite and positive, got nan"),
        ("continuations", "greedy_share", 7, "greedy_share must lie in 0..1, got 7"),
        ("continuations", "most_copied", -1, "most_copied must lie in 0..1, got -1"),
        ("continuations", "shortest", -3, "continuations.shortest must be positive, got -3"),
        ("continuations", "given", -1, "continuations.given must be at least 0, got -1"),
        ("continuations", "batches", 0, "continuations.batches must be positive, got 0"),
        ("continuations", "batches", True, "continuations.batches must be an integer, got True"),
    ],
)
def test_entries_that_do_not_fit_are_named(
    tmp_path: Path, stage: str, name: str, value: Any, message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"stages": {stage: {**SHORT[stage], name: value}}}))
    with pytest.raises(ConfigError) as refused:
        read_settings(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert message in str(refused.value)


def test_sizes_are_objects(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"verifier": [1]}))
    with pytest.raises(ConfigError, match=r"verifier must be an object, got \[1\]"):
        read_settings(tmp_path / "config.json")


def test_times_may_be_left_to_the_steps(tmp_path: Path) -> None:
    stages = {name: {**stage, "seconds": None} for name, stage in SHORT.items()}
    (tmp_path / "config.json").write_text(json.dumps({"stages": stages}))
    settings = read_settings(tmp_path / "config.json")
    assert stage_settings(settings, "weaver")["seconds"] is None


@pytest.mark.parametrize("name", ["pocket", "larger"])
def test_the_files_of_the_trios_are_read(name: str) -> None:
    settings = read_settings(preset_file(name))
    assert set(settings["stages"]) == set(SHORT) - ({"pair"} if name == "larger" else set())
    assert ("mixture" in stage_settings(settings, "verifier")) == (name == "larger")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"prompt": 13}, r"prompt must lie in 2\.\.total, got 13 of 12"),
        ({"prompt": 1, "shortest": 1}, r"prompt must lie in 2\.\.total, got 1 of 12"),
        ({"shortest": 7}, "shortest must be at most prompt, got 7 of 6"),
        ({"shortest": 1, "given": 5}, "given texts need a shortest of at least 2, got 1"),
        ({"total": 9}, "of 9 tokens have no room for a prompt of 3 and 7 tokens after it"),
    ],
)
def test_lengths_without_room_are_refused(sizes: dict[str, int], message: str) -> None:
    fits = {"total": 12, "prompt": 6, "shortest": 3}
    check_lengths(fits, 7, "c.json: continuations")
    check_lengths({**fits, "total": 10}, 7, "c.json: continuations")
    with pytest.raises(ConfigError, match=rf"c\.json: continuations:? {message}"):
        check_lengths({**fits, **sizes}, 7, "c.json: continuations")
