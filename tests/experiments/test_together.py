"""A pair is trained further in several ways from one trio, and all are measured alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from test_second import written

from experiments import larger, second, together
from experiments.acceptance import DOMAINS
from tests.training.test_pocket import corpus  # noqa: F401
from tfm_jax.checkpoints.opened import open_drafter, open_verifier, open_weaver
from tfm_jax.training.leftovers import network_digest
from tfm_jax.training.pocket import STAGES

RANDOM = np.random.default_rng(6)


@pytest.mark.slow
def test_every_way_starts_from_one_trio_and_leaves_another(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch,
    capsys,
) -> None:
    first, out = tmp_path / "first", tmp_path / "out"
    places = ["--corpus", str(corpus)]
    own = written(tmp_path / "first.json", larger.CONFIG)
    larger.main([*STAGES, *places, "--out", str(first), "--config", str(own)])
    settings = json.loads(own.read_text())
    pair = json.loads(together.CONFIG.read_text())["stages"]["pair"]
    pair["recipe"] |= {"rows": 4, "drafter": {"anchors": 4}}
    pair["recipe"]["weaver"] |= {"anchors": 4}
    pair["optimiser"]["steps"] = 3
    settings["stages"]["pair"] = pair
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    prompts = {d: [RANDOM.integers(6, 280, 9 + i).tolist() for i in range(2)] for d in DOMAINS}
    for module in (larger, together):
        monkeypatch.setattr(module, "heldout_prompts", lambda folder, count: prompts)
    monkeypatch.setattr(larger, "load_prompts", lambda model, domain, *_: prompts[domain])
    monkeypatch.setattr(second, "POCKET", str(first))
    monkeypatch.setattr(together, "POCKET", str(first))
    monkeypatch.setattr(together, "CONFIG", config)

    places += ["--out", str(out)]
    few = ["--count", "2", "--new-tokens", "10", "--json"]
    together.main(["texts", "together", *places, "--text-seconds", "1", "--seconds", "1"])
    assert capsys.readouterr().out == ""
    together.main(["variation", "measure", *places, "--seconds", "1", *few])
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / together.RESULT).read_text())
    assert [row["trio"] for row in result["training"]] == ["together", "variation"]
    assert [row.get("eta") for row in result["training"]] == [None, 3.0]
    assert set(result["setting"]) == {"own", "together", "variation"}
    assert len(result["rows"]) == 3 * 2 * 11

    def digests(opener, name: str) -> list[str]:
        folders = (first, out / "together", out / "variation")
        return [network_digest(opener(folder / name)) for folder in folders]

    verifier, drafter, weaver = (
        digests(opener, name)
        for opener, name in (
            (open_verifier, "verifier"),
            (open_drafter, "dflash"),
            (open_weaver, "weaver"),
        )
    )
    assert len(set(verifier)) == 1
    assert drafter[0] == drafter[2] != drafter[1]
    assert len(set(weaver)) == 3
    # The drafter of "variation" is the first one, and so are its baselines.
    lengths = {
        (row["trio"], row["prompts"], row["temperature"], row["shared_noise"]): row
        for row in result["rows"]
        if row["method"] == "ddtree"
    }
    for (trio, *setting), row in lengths.items():
        if trio == "variation":
            same = lengths["own", *setting]["mean_accepted_length"]
            assert row["mean_accepted_length"] == same


def test_bad_input_is_refused_and_nothing_is_written(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch,
    capsys,
) -> None:
    out = tmp_path / "out"
    places = ["--corpus", str(corpus), "--out", str(out)]
    with refused(capsys, "another tokenizer"):
        together.main(["texts", *places])
    monkeypatch.setattr(together, "check_corpus", lambda *_: None)
    with refused(capsys, "--count is only for measure"):
        together.main(["texts", *places, "--count", "3"])
    with refused(capsys, "--start is only for together, variation, weaver"):
        together.main(["texts", *places, "--start", "x"])
    with refused(capsys, r"continuations\.npz is missing: the step texts makes it"):
        together.main(["together", "texts", *places])
    with refused(capsys, "--seconds must be finite and positive, got 0"):
        together.main(["texts", "weaver", *places, "--seconds", "0"])
    with refused(capsys, "nowhere"):
        together.main(["texts", "weaver", *places, "--start", str(tmp_path / "nowhere")])
    with refused(capsys, "not the package's verifier"):
        together.main(["texts", "weaver", *places, "--start", str(other_trio(tmp_path))])
    with refused(capsys, "seed must lie in 0"):
        together.main(["texts", *places, "--seed", "-1"])
    assert not out.exists()
    (out / "weaver").mkdir(parents=True)
    with refused(capsys, "holds weaver, which together.json there does not account for"):
        together.main(["texts", "weaver", *places])


def other_trio(folder: Path) -> Path:
    """The packaged trio with another norm in its verifier."""
    trio = folder / "trio"
    shutil.copytree(second.directory(second.POCKET), trio)
    config = trio / "verifier" / "config.json"
    settings = json.loads(config.read_text()) | {"rms_norm_eps": 1e-5}
    config.write_text(json.dumps(settings))
    return trio
