"""A tiny trio goes through all steps, and a Weaver that grew computes what it did."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import capacity, larger, text_sets
from experiments.acceptance import DOMAINS
from experiments.recipes import Networks, Plan, with_weaver
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


def test_what_the_pools_hold_bounds_every_weaver(networks: Networks) -> None:
    prompts = {"code": [RANDOM.integers(6, 80, 12).tolist() for _ in range(3)]}
    texts = text_sets.make_set(networks.model, prompts, 12, 24)
    bound = text_sets.within_pools(texts)
    assert set(bound) == {(0.0, True), (1.0, True)}
    starts = texts.starts[0.0]
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
    # XLA of jaxlib 0.10.2 aborts on a CPU where several key heads have several value heads each.
    settings["verifier"] |= {"num_attention_heads": 2, "linear_num_key_heads": 1}
    settings["drafter"]["num_key_value_heads"] = 1
    settings["stages"]["verifier"]["mixture"] = {"text": 1.0, "prose": 0.5}
    config.write_text(json.dumps(settings))
    prompts = {d: [RANDOM.integers(6, 280, 9 + i).tolist() for i in range(2)] for d in DOMAINS}
    monkeypatch.setattr(larger, "heldout_prompts", lambda folder, count: prompts)
    monkeypatch.setattr(larger, "load_prompts", lambda model, domain, *_: prompts[domain])
    out = tmp_path / "out"
    places = ["--corpus", str(corpus), "--out", str(out), "--config", str(config)]
    few = ["--count", "2", "--new-tokens", "16", "--json"]
    larger.main(["verifier", "continuations", "dflash", *places])
    assert capsys.readouterr().out == ""
    larger.main(["weaver", "measure", *places, *few])
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
    plan = Plan(
        texts=texts,
        optimiser=OptimiserConfig(steps=21, matrix_rate=0.006, other_rate=0.0012),
        recipes={"plain": WeaverRecipe(rows=4, anchors=4)},
    )
    monkeypatch.setattr(larger, "PLAN", plan)
    seconds = ["--text-seconds", "1", "--arm-seconds", "1"]
    larger.main(["capacity", *places, *few, *seconds])
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / larger.RESULT).read_text())
    assert [row for row in result["rows"] if row["trio"] == "larger"] == first["rows"]

    assert [row["stage"] for row in result["networks"]] == [*STAGES, *STAGES]
    assert result["networks"][0]["heldout_nats_per_token"]
    assert result["networks"][0]["sizes"]["hidden_size"] == 48
    assert [row["blocks"] for row in result["training"]] == [1, 2]
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


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="count must be positive, got 0"):
        larger.Prompting(count=0)
