"""The whole experiment on a tiny trio, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

import tfm_jax
from experiments import recipes, text_sets
from experiments.acceptance import DOMAINS
from experiments.replay import by_domain, summarise
from tests.conftest import WEAVER, write_trio
from tfm_jax.checkpoints import read_trio
from tfm_jax.decoding.state import Trio
from tfm_jax.training.trainer import OptimiserConfig
from tfm_jax.training.weaver import WeaverRecipe

RANDOM = np.random.default_rng(5)
TEXTS = {
    "rows": 12,
    "total": 40,
    "prompt": 12,
    "shortest": 4,
    "batches": 1,
    "greedy_share": 0.5,
    "most_copied": 0.9,
}


@pytest.fixture
def folder(tiny_trio: Trio, tmp_path: Path) -> Path:
    """A trio on disk."""
    write_trio(tiny_trio, tmp_path / "trio")
    return tmp_path / "trio"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Packed tokens that the tiny verifier knows, and two held-back prompts a domain."""
    path = tmp_path / "corpus"
    path.mkdir()
    buffer = io.BytesIO()
    np.savez(
        buffer, allow_pickle=False, **{"train.prose": RANDOM.integers(6, 80, 400).astype(np.uint16)}
    )
    (path / "tokens.npz.xz").write_bytes(lzma.compress(buffer.getvalue()))
    rows = [
        {"domain": domain, "tokens": RANDOM.integers(6, 80, 9 + i).tolist()}
        for domain in DOMAINS
        for i in range(2)
    ]
    (path / text_sets.HELDOUT).write_text(json.dumps({"prompts": rows}))
    return path


@pytest.mark.slow
def test_the_whole_experiment(folder, corpus, tmp_path, monkeypatch, capsys) -> None:
    plan = recipes.Plan(
        new_tokens=16,
        texts=TEXTS,
        optimiser=OptimiserConfig(steps=21, matrix_rate=0.006, other_rate=0.0012),
        recipes={
            "plain": WeaverRecipe(rows=4, anchors=4),
            "noise": WeaverRecipe(rows=4, anchors=4, eta=0.7, nodes=64, noise=1.0),
        },
        arm=1e-6,
        write=0.001,
        train=0.002,
    )
    monkeypatch.setattr(recipes, "Plan", lambda: plan)
    evaluation = {d: [RANDOM.integers(6, 80, 12).tolist()] for d in DOMAINS}
    monkeypatch.setattr(recipes, "load_prompts", lambda model, domain, *_: evaluation[domain])
    out = tmp_path / "out"
    places = ["--model", str(folder), "--corpus", str(corpus), "--out", str(out)]
    recipes.main([*places, "--seconds", "600", "--count", "1", "--seed", "3", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / "recipes.json").read_text())

    assert result["setting"]["seed"] == 3
    assert result["setting"]["recipes"]["noise"]["nodes"] == 64
    assert result["texts"]["texts"] > 4
    runs = result["training"]
    assert [run["run"] for run in runs] == ["plain", "noise", "second"]
    assert runs[2]["recipe"] == result["best"]
    # No run sees the batches of another.
    assert [run["first_batch"] for run in runs] == [0, runs[0]["steps"], 2 * runs[0]["steps"]]
    log = (out / "training.jsonl").read_text().splitlines()
    titles = [json.loads(line)["title"] for line in log]
    assert list(dict.fromkeys(titles)) == ["plain", "noise", "second"]

    held_back = {(r["weaver"], r["method"]) for r in result["held_back"]}
    assert held_back == {
        *(("first", method) for method in text_sets.METHODS),
        *((weaver, "tfm") for weaver in ("plain", "noise", "second")),
    }
    decoded = result["decoded"]
    assert len(decoded) == 8
    assert all(row["as_replayed"] == row["prompts"] == 4 for row in decoded)
    replayed = {
        (r["weaver"], r["method"], r["temperature"]): r["mean_accepted_length"]
        for r in result["evaluation"]
        if r["shared_noise"] or r["temperature"] == 0
    }
    for row in decoded:
        key = (row["weaver"], row["method"], row["temperature"])
        assert row["mean_accepted_length"] == replayed[key]
    assert all(r["to_base"] == 1 for r in decoded if (r["weaver"], r["method"]) == ("first", "tfm"))

    # What was judged is what lies in the file.
    for name in ("verifier", "dflash"):
        (out / name).symlink_to(folder / name)
    model = tfm_jax.load(out, dtype="float32")
    assert model.trio.weaver is not None
    assert model.trio.weaver.config == WEAVER
    loop = recipes.compile_loops(model, evaluation, 16)["tfm"]
    rounds = recipes.decode_rounds(model, loop, "tfm", evaluation, 1.0, 16)
    measured = by_domain(DOMAINS, rounds)
    (row,) = (r for r in decoded if r["weaver"] == "second" and r["temperature"] == 1)
    assert summarise(measured, measured)["by_domain"] == row["by_domain"]
    new, old = (read_trio(path, dtype="float32").weaver for path in (out, folder))
    assert new is not None
    assert old is not None
    assert any((new.params[name] != old.params[name]).any() for name in new.params)


def test_bad_input_is_refused(folder, corpus, tmp_path, capsys) -> None:
    with pytest.raises(ValueError, match="2 prompts of prose, 3 needed"):
        text_sets.heldout_prompts(corpus, 3)
    for name in ("count", "new_tokens", "longest_prompt"):
        with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
            dataclasses.replace(recipes.Plan(), **{name: 0})
    for seconds in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"seconds must be finite and positive, got {seconds}"):
            recipes.Plan(seconds=seconds)
    for arm in (0.0, 0.2, float("nan")):
        with pytest.raises(ValueError, match=f"3 arms must be positive and fit .* got {arm} each"):
            recipes.Plan(arm=arm)
    with pytest.raises(ValueError, match="one number of rows"):
        recipes.Plan(recipes={"a": WeaverRecipe(rows=4), "b": WeaverRecipe(rows=8)})
    kept = tmp_path / "kept"
    (kept / "weaver").mkdir(parents=True)
    (kept / "training.jsonl").write_text("of a run before\n")
    with refused(capsys, r"kept holds training\.jsonl, weaver, which are not replaced"):
        recipes.main(["--model", str(folder), "--corpus", str(corpus), "--out", str(kept)])
    assert (kept / "training.jsonl").read_text() == "of a run before\n"
    with refused(capsys, "no corpus"):
        recipes.main(["--corpus", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(FileNotFoundError, match=r"no held-back prompts.*heldout_prompts\.json"):
        text_sets.heldout_prompts(tmp_path, 1)
    (corpus / "tokenizer.json").write_text("{}")
    with refused(capsys, "another tokenizer"):
        recipes.main(["--corpus", str(corpus), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
