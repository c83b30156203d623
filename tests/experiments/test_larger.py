"""A tiny trio goes through all steps, and a Weaver that grew computes what it did."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from experiments import capacity, larger, text_sets
from experiments.acceptance import DOMAINS
from experiments.recipes import Learning, Networks, with_weaver
from experiments.replay import by_domain
from tests.conftest import WEAVER
from tests.training.test_pocket import corpus, small  # noqa: F401
from tfm_jax.decoding.state import Trio
from tfm_jax.model import Model
from tfm_jax.training.pocket import STAGES
from tfm_jax.training.trainer import OptimiserConfig, flatten
from tfm_jax.training.weaver import WeaverRecipe

RANDOM = np.random.default_rng(3)
SIZES = {
    "as it is": capacity.Size(blocks=1, inner=24),
    "enlarged": capacity.Size(blocks=2, inner=40),
}


@pytest.fixture
def networks(tiny_trio: Trio) -> Networks:
    assert tiny_trio.weaver is not None
    return Networks(
        model=Model(trio=tiny_trio, tokenizer=None, end_tokens=()),
        frozen=dataclasses.replace(tiny_trio, weaver=None),
        config=WEAVER,
        first=flatten(tiny_trio.weaver),
    )


@pytest.mark.slow
def test_an_enlarged_weaver_starts_as_the_same_function(networks: Networks) -> None:
    grown = capacity.enlarged(networks, SIZES["enlarged"])
    assert grown.config.num_layers == 2
    assert sum(map(jnp.size, grown.first.values())) > sum(map(jnp.size, networks.first.values()))
    keys = jax.random.split(jax.random.key(0), 3)
    given = [
        jax.random.normal(k, shape)
        for k, shape in zip(keys, [(40,), (7, 40), (7, 40)], strict=True)
    ]
    old, new = (with_weaver(n, n.first).weaver for n in (networks, grown))
    assert old is not None
    assert new is not None
    np.testing.assert_allclose(new.chain(*given), old.chain(*given), atol=1e-5)
    with pytest.raises(ValueError, match="smaller than 1 of 24"):
        capacity.enlarged(networks, capacity.Size(blocks=1, inner=8))
    gated = dataclasses.replace(networks, config=dataclasses.replace(WEAVER, variant="rope_swiglu"))
    with pytest.raises(ValueError, match="learned_gelu"):
        capacity.enlarged(gated, SIZES["enlarged"])


@pytest.mark.slow
def test_what_the_pools_hold_bounds_every_weaver(networks: Networks) -> None:
    prompts = {"code": [RANDOM.integers(6, 80, 12).tolist() for _ in range(3)]}
    texts = text_sets.make_set(networks.model, prompts, 12, 24)
    bound = text_sets.within_pools(texts)
    assert set(bound) == {(0.0, True), (1.0, True)}
    starts = texts.starts[0.0, True]
    ids, ahead = np.asarray(starts.draft.ids), np.asarray(starts.ahead)
    expected = [
        [1 + next((d for d in range(7) if row[d] not in pool[d]), 7) for pool, row in text]
        for text in (zip(*both, strict=True) for both in zip(ids, ahead, strict=True))
    ]
    assert bound[0.0, True] == [text_sets.walk(np.asarray(lengths)) for lengths in expected]
    (own, most) = (
        by_domain(texts.domains, rounds[0.0, True])["code"][:, 1].sum()
        for rounds in (text_sets.replay_all(networks.model.trio, texts, "tfm"), bound)
    )
    assert most <= own


@pytest.mark.slow
def test_all_steps(corpus: Path, tmp_path: Path, monkeypatch, capsys) -> None:  # noqa: F811
    config = tmp_path / "config.json"
    settings = small(json.loads(larger.CONFIG.read_text()))
    settings["stages"]["verifier"]["mixture"] = {"text": 1.0, "prose": 0.5}
    config.write_text(json.dumps(settings))
    prompts = {d: [RANDOM.integers(6, 280, 9 + i).tolist() for i in range(2)] for d in DOMAINS}
    monkeypatch.setattr(larger, "heldout_prompts", lambda folder, count: prompts)
    monkeypatch.setattr(larger, "load_prompts", lambda model, domain, *_: prompts[domain])
    out = tmp_path / "out"
    places = ["--corpus", str(corpus), "--out", str(out)]
    sizes = ["--config", str(config)]
    few = ["--count", "2", "--new-tokens", "16", "--json"]
    larger.main(["verifier", "continuations", "dflash", *places, *sizes])
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=r"networks missing: weaver; stages missing .*: weaver"):
        larger.main(["measure", *places, *few])
    larger.main(["weaver", "measure", *places, *sizes, *few])
    first = json.loads(capsys.readouterr().out)
    assert {row["trio"] for row in first["rows"]} == {"larger"}

    monkeypatch.setattr(larger, "POCKET", str(out))
    monkeypatch.setattr(
        larger,
        "SIZES",
        {
            "as it is": capacity.Size(blocks=1, inner=32),
            "enlarged": capacity.Size(blocks=2, inner=48),
        },
    )
    texts = {
        "rows": 12,
        "total": 40,
        "prompt": 12,
        "shortest": 4,
        "batches": 1,
        "greedy_share": 0.5,
    }
    optimiser = OptimiserConfig(steps=1, matrix_rate=0.006, other_rate=0.0012)
    monkeypatch.setattr(larger, "LEARNING", Learning(texts=texts, optimiser=optimiser, seed=3))
    monkeypatch.setattr(larger, "RECIPE", WeaverRecipe(rows=4, anchors=4))
    (out / "capacity.jsonl").write_text("of a run before\n")
    order = []
    for name in ("measure", "train_arms"):
        monkeypatch.setattr(larger, name, noted(order, name, getattr(larger, name)))
    larger.main(["capacity", *places, *few, "--text-seconds", "1", "--arm-steps", "7"])
    assert order == ["measure", "measure done", "train_arms", "train_arms done"]
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / larger.RESULT).read_text())
    assert [row for row in result["rows"] if row["trio"] == "larger"] == first["rows"]

    assert [row["stage"] for row in result["networks"]] == [*STAGES, *STAGES]
    assert result["networks"][0]["heldout_nats_per_token"]
    assert result["networks"][0]["sizes"]["hidden_size"] == 48
    assert len(result["networks"][0]["corpus_tokens_sha256"]) == 64
    assert "devices" in result["networks"][0]
    assert "devices" not in result["networks"][1]
    assert "flops_per_step" not in result["networks"][1]
    for row in (result["networks"][i] for i in (0, 2, 3)):
        rate = row["flops_per_step"] * row["steps_per_second"] / 1e12
        assert row["tflops_per_second"] == pytest.approx(rate, abs=1e-4)
        share = rate / row["matrix_tflops_per_second"]
        assert row["share_of_matrix_rate"] == pytest.approx(share, abs=1e-3)
    assert [(row["blocks"], row["steps"]) for row in result["training"]] == [(1, 7), (2, 7)]
    log = [json.loads(line) for line in (out / "capacity.jsonl").read_text().splitlines()]
    assert [(line["title"], line["step"]) for line in log] == [("as it is", 7), ("enlarged", 7)]
    learned = result["setting"]["pocket"]["capacity"]
    assert (learned["seed"], learned["text_seconds"]) == (3, 1)
    assert learned["optimiser"]["steps"] == 7
    assert learned["texts"] == texts
    assert len(learned["written"]["digest"]) == 64
    assert result["training"][1]["parameters"] > result["training"][0]["parameters"]

    # The same trio under two names: the same lengths.
    rows = {
        (r["trio"], r["weaver"], r["prompts"], r["method"], r["temperature"], r["shared_noise"]): r
        for r in result["rows"]
    }
    assert len(rows) == len(result["rows"]) == 2 * 2 * 11 + 2 * 2 * 3
    for (trio, weaver, *rest), row in rows.items():
        if weaver == "own":
            other = rows["pocket" if trio == "larger" else "larger", weaver, *rest]
            assert row["mean_accepted_length"] == other["mean_accepted_length"]
            dflash = rows[trio, weaver, rest[0], "dflash", *rest[2:]]
            ratio = row["mean_accepted_length"] / dflash["mean_accepted_length"]
            assert row["to_dflash"] == pytest.approx(ratio, abs=2e-4)
        else:
            assert row["to_own_ci95"][0] <= row["to_own"] <= row["to_own_ci95"][1]
    larger.main(["measure", *places, *few[:-1]])
    assert "tfm/ddtree" in capsys.readouterr().out
    larger.main(["continuations", *places, *sizes])
    assert capsys.readouterr().out == ""


def noted(order: list[str], name: str, function: Callable) -> Callable:
    """The function, which notes when it begins and when it is done."""

    def call(*arguments: Any) -> Any:
        order.append(name)
        result = function(*arguments)
        order.append(f"{name} done")
        return result

    return call


@pytest.mark.parametrize(
    ("steps", "option"),
    [
        ("measure", "--verifier-seconds=5"),
        ("capacity", "--seed=1"),
        ("capacity", "--config=x.json"),
        ("continuations", "--devices=2"),
        ("verifier", "--json"),
        ("verifier", "--count=3"),
        ("weaver", "--new-tokens=3"),
        ("measure", "--text-seconds=nan"),
        ("measure", "--arm-steps=9"),
    ],
)
def test_options_that_no_step_reads_are_refused(steps: str, option: str, capsys) -> None:
    with pytest.raises(SystemExit):
        larger.main([steps, "--corpus", "c", "--out", "o", option])
    assert f"{option.partition('=')[0]} is only for" in capsys.readouterr().err


def test_bad_input_is_refused_before_any_step(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    capsys,
) -> None:
    out = tmp_path / "out"
    places = ["--corpus", str(corpus), "--out", str(out)]
    config = tmp_path / "config.json"
    settings = small(json.loads(larger.CONFIG.read_text()))
    settings["stages"]["verifier"]["mixture"] = {"prose": 1}
    config.write_text(json.dumps(settings))
    sizes = ["--config", str(config)]
    with refused(capsys, "16 prompts of prose, 40 needed"):
        larger.main(["verifier", "measure", *places, *sizes])
    with refused(capsys, "seconds of weaver must be finite and positive, got nan"):
        larger.main(["verifier", "weaver", *places, *sizes, "--weaver-seconds", "nan"])
    with refused(capsys, r"continuations\.npz is missing: the stage continuations makes it"):
        larger.main(["verifier", "weaver", *places, *sizes])
    with refused(capsys, "99 devices asked for"):
        larger.main(["verifier", *places, "--devices", "99"])
    with refused(capsys, "another tokenizer"):
        larger.main(["verifier", "capacity", *places, *sizes])
    with refused(capsys, "--text-seconds must be finite and positive, got inf"):
        larger.main(["capacity", *places, "--text-seconds", "inf"])
    with refused(capsys, "steps must be positive, got 0"):
        larger.main(["capacity", *places, "--arm-steps", "0"])
    with refused(capsys, "verifier is missing: the stage verifier makes it"):
        larger.main(["weaver", *places])
    with refused(capsys, "no corpus"):
        larger.main(["verifier", "--corpus", str(tmp_path), "--out", str(out)])
    assert not out.exists()


def test_a_trio_of_missing_parts_is_refused(networks: Networks, tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps({"verifier": {}, "dflash": {}}))
    with pytest.raises(ValueError, match=r"provenance\.json: continuations, weaver"):
        larger.networks_of("larger", tmp_path, networks.model)
    without = dataclasses.replace(networks.model, trio=networks.frozen)
    with pytest.raises(ValueError, match="networks missing: weaver"):
        larger.networks_of("larger", tmp_path, without)


def test_a_stage_states_its_rates(networks: Networks, tmp_path: Path) -> None:
    rates = {
        "steps_per_second": 2.5,
        "tokens_per_second": 80.0,
        "flops_per_step": 10**12,
        "tflops_per_second": 2.5,
        "matrix_tflops_per_second": 8.0,
        "share_of_matrix_rate": 0.3125,
    }
    entries = {stage: {} if stage == "continuations" else rates for stage in STAGES}
    (tmp_path / "provenance.json").write_text(json.dumps(entries))
    for row in larger.networks_of("larger", tmp_path, networks.model):
        assert entries[row["stage"]].items() <= row.items()


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="count must be positive, got 0"):
        larger.Prompting(count=0)
