"""Every stage runs from packed text to files that `read_trio` takes, and each one learns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tfm_jax.checkpoints import read_trio
from tfm_jax.config import ConfigError
from tfm_jax.training import pocket
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.prepare import prepare

WORDS = "the cat and a dog saw one old man with his red hat near that big house by some river"


def small(settings: dict) -> dict:
    """The pocket configuration with tiny networks and runs of a few steps."""
    settings["verifier"] |= {
        "vocab_size": 288,
        "hidden_size": 48,
        "intermediate_size": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    settings["drafter"] |= {
        "vocab_size": 288,
        "hidden_size": 48,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
        "num_attention_heads": 2,
        "head_dim": 32,
        "block_size": 8,
        "target_layer_ids": [0, 1],
        "num_target_layers": 2,
    }
    settings["weaver"] |= {
        "d_model": 48,
        "d_embed": 48,
        "d_rank": 32,
        "num_heads": 2,
        "mlp_dim": 32,
        "depth": 7,
        "candidate_pool_size": 64,
    }
    stages = settings["stages"]
    for stage in stages.values():
        stage["seconds"] = None
    for name in ("verifier", "dflash", "weaver"):
        stages[name]["log_every"] = 10
        stages[name]["optimiser"]["steps"] = 40
    stages["verifier"] |= {"rows": 4, "length": 64}
    stages["continuations"] |= {"rows": 16, "total": 64, "prompt": 12, "batches": 1}
    # All texts in every step, so that the losses of two steps compare.
    stages["dflash"]["recipe"] |= {"rows": 16, "anchors": 4}
    stages["weaver"]["recipe"] |= {"rows": 16, "anchors": 4}
    return settings


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    words = WORDS.split()
    for i in range(120):
        lines = (" ".join(random.choice(words, 9)) + "." for _ in range(30))
        (folder / f"{i}.txt").write_text("\n".join(lines) + "\n")
    out = tmp_path_factory.mktemp("corpus")
    prepare(out, text_dirs=(str(folder),), packages=False, vocab_size=288, progress=False)
    return out


def test_all_stages(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small(json.loads(pocket.CONFIG.read_text()))))
    out = tmp_path / "trio"
    pocket.main(["all", "--corpus", str(corpus), "--out", str(out), "--config", str(config)])
    shown = capsys.readouterr().out
    trio = read_trio(out)
    assert trio.drafter is not None
    assert trio.weaver is not None
    assert trio.tokenizer == out / "verifier" / "tokenizer.json"
    assert str(trio.verifier.params["embed_tokens.weight"].dtype) == "bfloat16"
    assert str(trio.verifier.params["layers.0.linear_attn.A_log"].dtype) == "float32"
    texts = Continuations.load(out / "continuations.npz")
    assert texts.tokens.shape[1] == 64
    log = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    first = {record["title"]: record for record in reversed(log)}
    last = {record["title"]: record for record in log}
    for name in ("verifier", "dflash", "weaver"):
        assert last[name]["loss"] < first[name]["loss"]
        assert last[name]["step"] == last[name]["steps"]
        assert f"{name}: done in" in shown
    assert last["verifier"]["loss"] < 0.75 * np.log(288)
    sampled = [last["weaver"][f"length_sampled{of}"] for of in ("", "_marginals")]
    assert sampled[0] > sampled[1]
    entries = json.loads((out / "provenance.json").read_text())
    assert list(entries) == list(pocket.STAGES)
    assert "devices" not in entries["continuations"]  # they are written on one
    assert entries["weaver"]["devices"] == 1
    for entry in entries.values():
        assert entry["seconds"] > 0
        assert entry["device"]
        assert len(entry["corpus_manifest_sha256"]) == 64
        assert len(entry["corpus_tokens_sha256"]) == 64
    assert entries["verifier"]["tokens"] == last["verifier"]["step"] * 4 * 64
    for name in ("verifier", "dflash", "weaver"):
        entry = entries[name]
        assert entry["flops_per_step"] == last[name]["flops_per_step"] > 0
        assert entry["tokens_per_second"] == last[name]["tokens_per_second"]
        rate = entry["flops_per_step"] * entry["steps_per_second"] / 1e12
        assert entry["tflops_per_second"] == pytest.approx(rate, abs=1e-4)
        share = rate / entry["matrix_tflops_per_second"]
        assert entry["share_of_matrix_rate"] == pytest.approx(share, abs=1e-3)
        assert 0 < entry["share_of_matrix_rate"] < 1


def test_tokenizer_and_configuration_must_fit(corpus: Path, tmp_path: Path) -> None:
    settings = small(json.loads(pocket.CONFIG.read_text()))
    settings["drafter"]["mask_token_id"] = 4
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="mask token of the configuration"):
        pocket.train_stage("verifier", corpus, tmp_path / "out", config=config)
    with pytest.raises(ValueError, match="stage must be one of"):
        pocket.train_stage("drafter", corpus, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        pocket.train_stage("verifier", corpus, tmp_path / "out", tokenizer=tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--seconds=nan", "seconds of verifier must be finite and positive, got nan"),
        ("--seconds=0", "seconds of verifier must be finite and positive, got 0.0"),
        ("--devices=0", "devices must be positive, got 0"),
        ("--devices=99", "99 devices asked for"),
        ("--seed=-1", "seed must lie in"),
    ],
)
def test_bad_options_are_refused_before_any_stage(
    corpus: Path, tmp_path: Path, option: str, message: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        pocket.main(["all", "--corpus", str(corpus), "--out", str(out), option])
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"no object `stages\.verifier`"),
        ('{"stages": {"dflash": {}}}', r"no object `stages\.verifier`"),
        ("[1]", r"no object `stages\.verifier`"),
        ('{"stages": {"verifier": {"log_every": 0}}}', r"verifier\.log_every must be positive"),
        ("{", "is not JSON"),
    ],
)
def test_a_configuration_whose_stage_does_not_fit_is_refused(
    corpus: Path, tmp_path: Path, text: str, message: str
) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        pocket.train_stage("verifier", corpus, out, config=config)
    assert not out.exists()


def test_the_pocket_trio_has_the_geometry_and_the_size_it_must_have() -> None:
    from tfm_jax.checkpoints import parameter_shapes
    from tfm_jax.presets import parse_geometry

    settings = json.loads(pocket.CONFIG.read_text())
    sizes = parse_geometry(settings, "pocket")
    verifier, drafter, weaver = sizes.verifier, sizes.drafter, sizes.weaver
    heads = (verifier.head_dim, verifier.rotary_dim, drafter.head_dim, weaver.head_dim)
    assert heads == (256, 64, 128, 128)
    assert (verifier.linear_key_head_dim, verifier.linear_value_head_dim) == (128, 128)
    assert verifier.linear_num_value_heads == 3 * verifier.linear_num_key_heads
    shapes = [parameter_shapes(config) for config in (verifier, drafter, weaver)]
    parameters = sum(int(np.prod(shape)) for part in shapes for shape in part.values())
    assert 2 * parameters <= 35.6e6
