"""Configurations of training: every entry of the wrong kind or out of range is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfm_jax.config import ConfigError
from tfm_jax.training.settings import SHORT, read_settings, stage_settings


@pytest.mark.parametrize(
    ("stage", "name", "value", "message"),
    [
        ("weaver", "recipe", [], "weaver.recipe must be an object, got []"),
        ("weaver", "optimiser", None, "weaver.optimiser must be an object, got None"),
        ("weaver", "log_every", 0, "weaver.log_every must be positive, got 0"),
        ("weaver", "log_every", "5", "weaver.log_every must be an integer, got '5'"),
        ("verifier", "rows", "2", "verifier.rows must be an integer, got '2'"),
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
