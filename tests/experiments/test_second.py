"""Another edition is made for the packaged verifier, and both are measured alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from experiments import larger, second
from experiments.acceptance import DOMAINS
from experiments.text_sets import SETTINGS, TextSet
from tests.training.test_pocket import corpus, small  # noqa: F401
from tfm_jax.checkpoints.opened import open_drafter, open_verifier
from tfm_jax.training.leftovers import network_digest
from tfm_jax.training.pocket import STAGES

RANDOM = np.random.default_rng(4)


def written(path: Path, stages: Path) -> Path:
    """The tiny configuration with the stages of another one."""
    settings = json.loads(larger.CONFIG.read_text())
    own = json.loads(stages.read_text())["stages"]
    settings["stages"] = {**settings["stages"], **own}
    settings = small(settings)
    settings["stages"]["verifier"].pop("mixture", None)
    for name in ("prompt", "shortest"):
        settings["stages"]["continuations"][name] = 8
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.slow
def test_both_editions_share_a_verifier_and_are_measured_alike(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch,
    capsys,
) -> None:
    first, out = tmp_path / "first", tmp_path / "out"
    places = ["--corpus", str(corpus)]
    config = ["--config", str(written(tmp_path / "first.json", larger.CONFIG))]
    larger.main([*STAGES, *places, "--out", str(first), *config])
    prompts = {d: [RANDOM.integers(6, 280, 9 + i).tolist() for i in range(3)] for d in DOMAINS}
    monkeypatch.setattr(larger, "heldout_prompts", lambda folder, count: prompts)
    monkeypatch.setattr(second, "heldout_prompts", lambda folder, count: prompts)
    monkeypatch.setattr(larger, "load_prompts", lambda model, domain, *_: prompts[domain])
    monkeypatch.setattr(second, "POCKET", str(first))

    places += ["--out", str(out)]
    config = ["--config", str(written(tmp_path / "second.json", second.CONFIG))]
    few = ["--count", "3", "--new-tokens", "12", "--json"]
    second.main(["continuations", "dflash", *places, *config, "--seed", "1"])
    assert capsys.readouterr().out == ""
    second.main(["weaver", "measure", *places, *config, "--seed", "1", *few])
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / second.RESULT).read_text())
    assert network_digest(open_verifier(out / "verifier")) == network_digest(
        open_verifier(first / "verifier")
    )
    drafters = [network_digest(open_drafter(folder / "dflash")) for folder in (first, out)]
    assert drafters[0] != drafters[1]
    assert [row["trio"] for row in result["networks"]] == ["first"] * 4 + ["second"] * 4
    assert len(result["rows"]) == 2 * 2 * 11
    lengths = [
        sum(r["mean_accepted_length"] for r in result["rows"] if r["trio"] == trio)
        for trio in ("first", "second")
    ]
    assert lengths[0] != lengths[1]
    for trio in ("first", "second"):
        groups = [row for row in result["by_entropy"] if row["trio"] == trio]
        assert [row["texts"] for row in groups] == [5, 5, 5, 5, 4] * 3
    # The same texts of the same verifier: their entropies agree, whoever drafts them.
    halves = np.split(np.asarray([row["nats"] for row in result["by_entropy"]]), 2)
    np.testing.assert_allclose(halves[0], halves[1], atol=1e-4)


def test_both_editions_are_opened_before_one_is_measured(tmp_path: Path, monkeypatch) -> None:
    order = []
    texts = TextSet(domains=["code"], starts={}, nats={0.0: np.ones(1), 1.0: np.ones(1)})
    rounds = {"tfm": {s: [[2]] for s in SETTINGS}, "ddtree": {s: [[1, 1]] for s in SETTINGS}}

    def measure(edition: str, model: Path, work: larger.Work) -> larger.Measurement:
        order.append(f"measured {edition}")
        sets, found = {"held back": texts}, {"held back": rounds}
        rows = [{"trio": edition, "model": model.name}]
        return larger.Measurement(sets=sets, rounds=found, rows=rows, nats={"code": 1.0})

    def networks_of(edition: str, folder: Path, model: Path) -> list:
        order.append(f"opened {edition}")
        if not folder.is_dir():
            raise ValueError(f"{folder} is no complete trio")
        return [{"trio": edition, "stage": "weaver"}]

    monkeypatch.setattr(second.tfm_jax, "load", lambda folder, dtype: Path(folder))
    monkeypatch.setattr(second, "measure", measure)
    monkeypatch.setattr(second, "networks_of", networks_of)
    monkeypatch.setattr(larger.Work, "setting", lambda *_: {})
    out = tmp_path / "out"
    work = larger.Work(corpus=tmp_path, out=out, prompting=larger.Prompting(), result=second.RESULT)
    with pytest.raises(ValueError, match="no complete trio"):
        second.measure_step(work)
    assert order == ["opened first", "opened second"]
    out.mkdir()
    second.measure_step(work)
    assert order[2:] == ["opened first", "opened second", "measured first", "measured second"]
    result = json.loads((out / second.RESULT).read_text())
    assert [row["trio"] for row in result["by_entropy"]] == ["first"] * 3 + ["second"] * 3
    assert [row["model"] for row in result["rows"]] == [second.directory(second.POCKET).name, "out"]


def test_bad_input_is_refused_and_nothing_is_written(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch,
    capsys,
) -> None:
    out = tmp_path / "out"
    places = ["--corpus", str(corpus), "--out", str(out)]
    with refused(capsys, "another tokenizer"):
        second.main(["dflash", *places])
    with refused(capsys, "--count is only for measure"):
        second.main(["dflash", *places, "--count", "3"])
    with refused(capsys, "--seed is only for training"):
        second.main(["measure", *places, "--seed", "3"])
    monkeypatch.setattr(second, "check_corpus", lambda *_: None)
    with refused(capsys, r"continuations\.npz is missing: the stage continuations makes it"):
        second.main(["dflash", *places])
    with refused(capsys, "count must be positive, got 0"):
        second.main(["measure", *places, "--count", "0"])
    monkeypatch.setattr(second, "heldout_prompts", lambda *_: None)
    with refused(capsys, "holds no dflash and no weaver to measure"):
        second.main(["measure", *places])
    assert not out.exists()
    out.mkdir()
    (out / "provenance.json").write_text("{}")
    with refused(capsys, "holds a provenance.json and no verifier"):
        second.main(["continuations", *places])
    shutil.copytree(second.directory(second.POCKET) / "verifier", out / "verifier")
    settings = json.loads((out / "verifier" / "config.json").read_text())
    settings["rms_norm_eps"] = 1e-5
    (out / "verifier" / "config.json").write_text(json.dumps(settings))
    with refused(capsys, "is not the package's verifier"):
        second.main(["continuations", *places])
