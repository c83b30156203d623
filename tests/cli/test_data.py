"""`tfm data`: what cannot be obeyed is refused before anything is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfm_jax.training import texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-packages", "--extras", "all"], "extras only count when packages are fetched"),
        (["--no-packages", "--cache", "x"], "cache only count when packages are fetched"),
        (["--tokenizer", "x", "--vocab-size", "77"], "vocab_size counts for a new tokenizer only"),
        (["--no-packages", "--vocab-size", "77"], "vocab_size must be in 261..65536, got 77"),
        (["--no-packages", "--tokenizer", "gone.json"], "gone.json"),
    ],
)
def test_options_of_a_corpus_are_obeyed_or_refused(run, tmp_path, options, message):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words " * 20)
    out = tmp_path / "out"
    status, _, err = run("data", "corpus", str(out), "--text", str(tmp_path / "text"), *options)
    assert status == 2
    assert message in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "0"], "seconds must be finite and positive, got 0.0"),
        (["--seconds", "-1"], "seconds must be finite and positive, got -1.0"),
        (["--seconds", "nan"], "seconds must be finite and positive, got nan"),
        (["--seed", "-1"], "seed must lie in 0..4294967295, got -1"),
    ],
)
def test_options_of_continuations_are_checked_first(run, trio_dir, tmp_path, options, message):
    command = ["data", "continuations", str(tmp_path / "t.npz"), "--corpus", str(tmp_path)]
    status, _, err = run(*command, "--model", str(trio_dir), *options)
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    ("place", "message"),
    [("folder", "is a folder: name a file to write"), ("file/t.npz", "is no folder that takes")],
)
def test_the_place_of_continuations_is_checked_first(
    run, trio_dir, tmp_path: Path, monkeypatch, place, message
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(texts, "write_continuations", None)
    command = ["data", "continuations", str(tmp_path / place), "--corpus", str(tmp_path)]
    status, _, err = run(*command, "--model", str(trio_dir))
    assert status == 2
    assert message in err


def test_windows_of_the_corpus_are_no_part_of_a_file(run, trio_dir, tmp_path: Path):
    config = tmp_path / "config.json"
    stage = {"rows": 4, "total": 24, "prompt": 8, "shortest": 4, "batches": 1, "greedy_share": 0.5}
    config.write_text(json.dumps({"stages": {"continuations": stage | {"given": 7}}}))
    command = ["data", "continuations", str(tmp_path / "t.npz"), "--corpus", str(tmp_path)]
    status, _, err = run(*command, "--model", str(trio_dir), "--config", str(config))
    assert status == 2
    assert "continuations.given adds windows of the corpus" in err
