"""Every stage runs from packed text to files that `read_trio` takes, and each one learns."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import tfm_jax
from tests.conftest import DRAFTER, VERIFIER, WEAVER, write_trio
from tfm_jax.checkpoints import module_params, read_trio, write_hf
from tfm_jax.checkpoints.opened import open_verifier
from tfm_jax.config import ConfigError
from tfm_jax.decoding.state import Trio
from tfm_jax.training import pocket
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.leftovers import network_digest
from tfm_jax.training.prepare import prepare

SHIPPED = Path(tfm_jax.__file__).parent / "assets" / "pocket" / "verifier" / "tokenizer.json"
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
    lengths = {"total": 64, "prompt": 12, "shortest": 8}
    stages["continuations"] |= {"rows": 16, "batches": 1, **lengths}
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


@pytest.mark.slow
def test_all_stages(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = written(tiny(), tmp_path)
    out = tmp_path / "trio"
    command = ["all", "--corpus", str(corpus), "--out", str(out), "--config", str(config)]
    assert pocket.main(command) == 0
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
        assert entry["verifier_sha256"] == network_digest(open_verifier(out / "verifier"))
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
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert pocket.main(command) == 1
    assert "were made with the verifier in" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def written(settings: dict, folder: Path) -> Path:
    """The configuration as a file."""
    file = folder / "config.json"
    file.write_text(json.dumps(settings))
    return file


def tiny() -> dict:
    return small(json.loads(pocket.CONFIG.read_text()))


def test_tokenizer_and_configuration_must_fit(corpus: Path, tmp_path: Path) -> None:
    settings = tiny()
    settings["drafter"]["mask_token_id"] = 4
    config, out = written(settings, tmp_path), tmp_path / "out"
    with pytest.raises(ConfigError, match="has the mask token 3, the drafter's mask_token_id is 4"):
        pocket.train_stage("verifier", corpus, out, config=config)
    with pytest.raises(ValueError, match="stage must be one of"):
        pocket.train_stage("drafter", corpus, out)
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        pocket.train_stage("verifier", corpus, out, tokenizer=tmp_path / "absent.json")
    with pytest.raises(ValueError, match=r"for the stage verifier alone, got .*json for dflash"):
        pocket.train_stage("dflash", corpus, out, tokenizer=corpus / "tokenizer.json")
    with pytest.raises(ValueError, match="was packed with another tokenizer"):
        pocket.train_stage("verifier", corpus, out, tokenizer=SHIPPED)
    assert not out.exists()


def test_a_corpus_without_a_tokenizer_takes_the_packages(corpus: Path, tmp_path: Path) -> None:
    alone = tmp_path / "corpus"
    alone.mkdir()
    shutil.copy(corpus / "tokens.npz.xz", alone)
    assert pocket.plan_stage("verifier", alone, tmp_path / "out").tokenizer == SHIPPED
    own = Path(shutil.copy(SHIPPED, alone))
    assert pocket.plan_stage("verifier", alone, tmp_path / "out").tokenizer == own


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--seconds=nan", "seconds of verifier must be finite and positive, got nan"),
        ("--seconds=0", "seconds of verifier must be finite and positive, got 0.0"),
        ("--devices=0", "devices must be positive, got 0"),
        ("--devices=99", "99 devices asked for"),
        ("--seed=-1", "seed must lie in"),
        ("--config=nowhere.json", "nowhere.json"),
        ("--corpus=nowhere", "nowhere is no corpus: it has no tokens.npz.xz"),
    ],
)
def test_bad_options_are_one_line_before_any_stage(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture, option: str, message: str
) -> None:
    out = tmp_path / "out"
    assert pocket.main(["all", "--corpus", str(corpus), "--out", str(out), option]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"no object `stages\.verifier`"),
        ('{"stages": {"dflash": {}}}', r"dflash\.log_every is missing"),
        ("[1]", "expected an object whose `stages` are objects"),
        ("{", "is not JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    corpus: Path, tmp_path: Path, text: str, message: str
) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        pocket.train_stage("verifier", corpus, out, config=config)
    assert not out.exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.pop("drafter"), "has no drafter"),
        (lambda s: s["weaver"].update(d_rank=0), "weaver: d_rank must be"),
        (lambda s: s["stages"]["weaver"]["recipe"].update(anchor=3), "weaver.recipe: .*'anchor'"),
        (lambda s: s["stages"]["dflash"]["optimiser"].update(rate=1), "dflash.optimiser: .*'rate'"),
        (lambda s: s["stages"]["continuations"].update(most_copeid=1), "continuations.most_copeid"),
        (lambda s: s["stages"]["continuations"].pop("prompt"), "continuations.prompt is missing"),
        (lambda s: s["stages"]["continuations"].update(total=14), "no room for a prompt of 8"),
        (lambda s: s["stages"]["continuations"].update(given=9), "given is for `tfm train` alone"),
        (lambda s: s["stages"]["verifier"].update(mixture={"math": 1}), "falls on the corpus"),
        (lambda s: s["stages"]["verifier"].update(length=40_000), "too short for windows"),
        (lambda s: s["stages"].pop("weaver"), r"no object `stages\.weaver`"),
    ],
)
def test_what_a_later_stage_needs_is_refused_before_the_first(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture, edit, message: str
) -> None:
    settings, out = tiny(), tmp_path / "out"
    settings["stages"]["continuations"]["shortest"] = 8
    edit(settings)
    config = str(written(settings, tmp_path))
    places = ["--corpus", str(corpus), "--out", str(out)]
    assert pocket.main(["all", *places, "--config", config]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()


def test_times_may_be_left_out(corpus: Path, tmp_path: Path) -> None:
    settings = tiny()
    for stage in settings["stages"].values():
        stage.pop("seconds")
    config = written(settings, tmp_path)
    run = pocket.plan_stage("verifier", corpus, tmp_path / "out", config=config)
    assert run.seconds is None
    assert run.left() is None


@pytest.fixture
def trio(tiny_trio: Trio, tmp_path: Path) -> Path:
    """A folder that all stages have run in, as far as later ones can tell, and `config.json`."""
    out = tmp_path / "trio"
    write_trio(tiny_trio, out)
    (out / "continuations.npz").touch()
    digest = network_digest(open_verifier(out / "verifier"))
    entries = {stage: {"verifier_sha256": digest} for stage in pocket.STAGES}
    (out / "provenance.json").write_text(json.dumps(entries))
    parts = {"verifier": VERIFIER, "drafter": DRAFTER, "weaver": WEAVER}
    written(tiny() | {part: dataclasses.asdict(sizes) for part, sizes in parts.items()}, tmp_path)
    return out


def test_a_stage_builds_on_what_was_made_with_the_verifier_there(
    trio: Path, tiny_trio: Trio, corpus: Path, tmp_path: Path
) -> None:
    def plan(stage: str, **options) -> pocket.Run:
        return pocket.plan_stage(stage, corpus, trio, config=tmp_path / "config.json", **options)

    plan("continuations")
    plan("weaver")
    params = module_params(tiny_trio.verifier)
    params["norm.weight"] = params["norm.weight"] + np.float32(1)
    write_hf(trio / "verifier", tiny_trio.verifier.config, params, overwrite=True)
    plan("continuations")
    plan("weaver", before=["continuations", "dflash"])
    for stage, before, named in (
        ("weaver", [], r"continuations\.npz"),
        ("weaver", ["continuations"], "dflash"),
    ):
        with pytest.raises(ValueError, match=rf"{named} is not known to be made with the verifier"):
            plan(stage, before=before)
    (trio / "dflash" / "config.json").rename(tmp_path / "gone")
    shutil.rmtree(trio / "dflash")
    with pytest.raises(FileNotFoundError, match="dflash is missing: the stage dflash makes it"):
        plan("weaver")


def test_a_stage_replaces_nothing_that_others_were_made_with(
    trio: Path, corpus: Path, tmp_path: Path
) -> None:
    def plan(stage: str) -> pocket.Run:
        return pocket.plan_stage(stage, corpus, trio, config=tmp_path / "config.json")

    files = {path: path.read_bytes() for path in trio.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"continuations\.npz, .*dflash, .*weaver were made with"):
        plan("verifier")
    with pytest.raises(ValueError, match="weaver were made with the dflash in"):
        plan("dflash")
    plan("weaver")
    other = trio / "weaver" / "weaver.safetensors"
    other.touch()
    with pytest.raises(ValueError, match=r"weaver holds other weights, weaver\.safetensors"):
        plan("weaver")
    other.unlink()
    (trio / "provenance.json").unlink()
    with pytest.raises(ValueError, match=r"continuations\.npz is not replaced: .*does not say"):
        plan("continuations")
    del files[trio / "provenance.json"]
    assert {path: path.read_bytes() for path in trio.rglob("*") if path.is_file()} == files


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
