"""`tfm train` and `tfm data`: from a few texts to a network that the other commands read."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file

import tfm_jax.training.run as training
from tfm_jax.checkpoints import read_trio
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.continuations import Continuations

CONFIG = {
    "stages": {
        "verifier": {"rows": 2, "length": 16, "log_every": 2, "optimiser": {"steps": 2}},
        "continuations": {
            "rows": 16,
            "total": 40,
            "prompt": 12,
            "shortest": 3,
            "batches": 1,
            "greedy_share": 0.5,
        },
        "dflash": {"log_every": 2, "recipe": {"rows": 4, "anchors": 2}, "optimiser": {"steps": 2}},
        "weaver": {"log_every": 2, "recipe": {"rows": 4, "anchors": 4}, "optimiser": {"steps": 5}},
    }
}


@pytest.fixture(scope="module", autouse=True)
def kept_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of the same sizes compile once."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("programs")))
    jax.config.update(names[1], 0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration `config.json` and a few texts in `text/`."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text").mkdir()
    words = np.random.default_rng(0).integers(100, 999, (6, 120))
    for name, row in enumerate(words):
        text = " ".join(f"the number {n} comes before {n + 1}." for n in row)
        (folder / "text" / f"{name}.txt").write_text(text)
    return folder


def arguments(given: Path, trio_dir: Path, out: Path, network: str = "weaver") -> list[str]:
    command = ["train", network, "--model", str(trio_dir), "--out", str(out)]
    return [*command, "--config", str(given / "config.json"), "--text", str(given / "text")]


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run saves every step and fails once `step` is saved."""
    original = Checkpoints.save

    def save(self, done, state, seconds):
        original(self, done, state, seconds)
        if done == step:
            raise RuntimeError("stopped")

    monkeypatch.setattr(Checkpoints, "save", save)


def test_a_weaver_from_a_few_texts_in_two_sittings(run, given, trio_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    command = [*arguments(given, trio_dir, out), "--save-every", "0"]
    with monkeypatch.context() as patched:
        stop_after(3, patched)
        with pytest.raises(RuntimeError, match="stopped"):
            run(*command)
    assert not (out / "weaver").exists()
    again = run(*command)
    assert again.status == 2
    assert "holds a run already: resume it" in again.err
    other = run(*command, "--resume", "--steps", "9")
    assert other.status == 2
    assert "with other settings: optimiser was" in other.err

    done = run(*command, "--resume", "--json", "--plot")
    assert done.status == 0, done.err
    assert "goes on from step 3" in done.err
    assert "expected accepted length before training" in done.err
    summary = done.json
    assert json.loads((out / "summary.json").read_text()) == summary
    assert (summary["steps"], summary["skipped_steps"]) == (5, 0)
    assert summary["heldout"]
    # An untrained Weaver gives the drafter's marginals.
    before, after = summary["before"], summary["after"]
    for name in ("length_greedy", "length_sampled", "tv"):
        assert before[name] == pytest.approx(before[f"{name}_marginals"], abs=1e-4)
        assert after[f"{name}_marginals"] == pytest.approx(before[f"{name}_marginals"], abs=1e-4)
    assert after["loss"] < before["loss"]
    log = (out / "training.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [2, 4, 5]
    wanted = {"pool_recall", "tv", "length_greedy", "skipped", "texts_left_out"}
    assert wanted | {"steps_per_second", "tokens_per_second"} <= json.loads(log[0]).keys()
    assert (out / "training.svg").stat().st_size > 1000

    trio = tmp_path / "trio"
    assert run("convert", str(trio_dir), str(trio), "--weaver", str(out / "weaver")).status == 0
    trained = read_trio(trio).weaver
    assert trained is not None
    assert np.abs(trained.params["lm_head_query_in.weight"].astype(np.float32)).max() > 0


@pytest.mark.slow
def test_two_sittings_give_the_weaver_of_one(run, given, trio_dir, tmp_path, monkeypatch):
    whole = run(*arguments(given, trio_dir, tmp_path / "whole"))
    assert "tfm convert" in whole.out
    command = [*arguments(given, trio_dir, tmp_path / "parts"), "--save-every", "0"]
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        with pytest.raises(RuntimeError, match="stopped"):
            run(*command)
    assert run(*command, "--resume").status == 0
    files = [tmp_path / name / "weaver" / "model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_warm_start_goes_on_from_the_weaver_given(run, given, trio_dir, tmp_path):
    texts = tmp_path / "texts.npz"
    tokens = np.random.default_rng(0).integers(4, 8000, (20, 40)).astype(np.uint16)
    prompt = np.full(20, 6, np.int32)
    prompt[3] = 39  # no room after it
    temperature = (np.arange(20) % 2).astype(np.float32)
    Continuations(tokens=tokens, prompt=prompt, temperature=temperature).save(texts)
    command = arguments(given, trio_dir, tmp_path / "out")
    command = [*command[: command.index("--text")], "--texts", str(texts), "--steps", "1"]
    warm = run(*command, "--warm-start", str(trio_dir / "weaver"), "--json")
    assert warm.status == 0, warm.err
    assert "left out 1 of 18 texts" in warm.err
    log = json.loads((tmp_path / "out" / "training.jsonl").read_text())
    assert (log["texts"], log["texts_left_out"]) == (17, 1)
    trained = load_file(tmp_path / "out" / "weaver" / "model.safetensors")["out_norm.weight"]
    given_norm = load_file(trio_dir / "weaver" / "model.safetensors")["out_norm.weight"]
    np.testing.assert_allclose(trained.astype(np.float32), given_norm, atol=0.01)
    assert np.abs(given_norm - 1).min() > 0.1


@pytest.mark.slow
def test_a_drafter_and_a_verifier(run, given, trio_dir, tmp_path):
    drafter = run(*arguments(given, trio_dir, tmp_path / "d", "dflash"), "--json")
    assert drafter.status == 0, drafter.err
    assert {"loss", "accuracy", "length_greedy"} <= drafter.json["after"].keys()
    new = str(tmp_path / "d" / "dflash")
    assert run("convert", str(trio_dir), str(tmp_path / "t"), "--drafter", new).status == 0
    command = arguments(given, trio_dir, tmp_path / "v", "verifier")
    config = json.loads((trio_dir / "verifier" / "config.json").read_text())
    sizes = {
        "vocab_size": config["vocab_size"],
        "hidden_size": 40,
        "intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps({**CONFIG, "verifier": sizes}))
    command[command.index("--config") + 1] = str(file)
    verifier = run(*command)
    assert verifier.status == 0, verifier.err
    assert read_trio(tmp_path / "v" / "verifier").verifier.config.head_dim == 24
    assert (tmp_path / "v" / "verifier" / "tokenizer.json").is_file()


def test_continuations_from_a_corpus(run, given, trio_dir, tmp_path):
    corpus, texts = str(tmp_path / "corpus"), tmp_path / "new" / "texts.npz"
    tokenizer = str(trio_dir / "verifier" / "tokenizer.json")
    text = ["--text", str(given / "text"), "--no-packages"]
    made = run("data", "corpus", corpus, *text, "--tokenizer", tokenizer)
    assert made.status == 0, made.err
    assert "the user's own" in made.out
    command = ["data", "continuations", str(texts), "--corpus", corpus, "--model", str(trio_dir)]
    done = run(*command, "--config", str(given / "config.json"))
    assert done.status == 0, done.err
    assert "16 texts of 40 tokens" in done.out
    assert Continuations.load(texts).tokens.shape == (16, 40)
    refused = run("data", "corpus", corpus, "--no-packages")
    assert refused.status == 2
    assert "nothing to build from" in refused.err


def stop_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write random continuations, and stop once these are stored."""

    def write(verifier, corpus, options, **_):
        del verifier, corpus
        rows, total = options["rows"], options["total"]
        return Continuations(
            tokens=np.random.default_rng(0).integers(4, 8000, (rows, total)).astype(np.uint16),
            prompt=np.full(rows, options["shortest"], np.int32),
            temperature=np.ones(rows, np.float32),
        )

    def stop(*_):
        raise RuntimeError("stopped")

    monkeypatch.setattr(training, "write_continuations", write)
    monkeypatch.setattr(training, "initial_weaver", stop)


def test_leftovers_of_other_sources_are_refused(
    run, given, trio_dir, damaged, tmp_path, monkeypatch
):
    stop_before_training(monkeypatch)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text(" ".join(f"number {n}," for n in range(200)))
    command = arguments(given, trio_dir, tmp_path / "out")
    with pytest.raises(RuntimeError, match="stopped"):
        run(*command)
    (damaged / "verifier" / "model.safetensors").write_bytes(
        (trio_dir / "verifier" / "model.safetensors").read_bytes()[:-1] + b"?"
    )
    for more, message in (
        (["--text", str(other)], f"text was {given / 'text'}, now {other}"),
        (["--text", str(tmp_path / "gone")], "gone does not exist"),
        (["--model", str(damaged)], f"verifier was {trio_dir}, now {damaged}"),
        (["--seed", "5"], "seed was 0, now 5"),
        (["--dtype", "bfloat16"], "dtype was float32, now bfloat16"),
    ):
        for resume in ([], ["--resume"]):
            refused = run(*command, *more, *resume)
            assert refused.status == 2
            assert message in refused.err
    # The same sources again: what lies there is taken.
    monkeypatch.setattr(training, "write_continuations", None)
    with pytest.raises(RuntimeError, match="stopped"):
        run(*command)
    (tmp_path / "out" / "sources.json").unlink()
    assert "no sources.json that says what from" in run(*command).err


def test_a_run_goes_on_against_the_networks_that_it_began_with(
    run, given, trio_dir, damaged, tmp_path, monkeypatch
):
    stop_before_training(monkeypatch)
    texts = tmp_path / "texts.npz"
    tokens = np.random.default_rng(0).integers(4, 8000, (8, 40)).astype(np.uint16)
    few = {"prompt": np.full(8, 6, np.int32), "temperature": np.ones(8, np.float32)}
    Continuations(tokens=tokens, **few).save(texts)
    command = arguments(given, trio_dir, tmp_path / "out")
    command = [*command[: command.index("--text")], "--texts", str(texts)]
    with pytest.raises(RuntimeError, match="stopped"):
        run(*command)
    (tmp_path / "out" / "checkpoints").mkdir()
    weights = damaged / "dflash" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    refused = run(*command, "--resume", "--model", str(damaged))
    assert refused.status == 2
    assert f"drafter was {trio_dir}, now {damaged}" in refused.err
    with pytest.raises(RuntimeError, match="stopped"):
        run(*command, "--resume")


def test_a_text_that_fails_leaves_the_folder_free(run, given, trio_dir, tmp_path, monkeypatch):
    stop_before_training(monkeypatch)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(bytes(range(256)) * 9)
    command = arguments(given, trio_dir, tmp_path / "out")
    assert "too short" in run(*command, "--text", str(tmp_path / "text")).err
    with pytest.raises(RuntimeError, match="stopped"):
        run(*command)


def test_texts_without_room_are_refused_before_they_are_written(run, given, trio_dir, tmp_path):
    command = arguments(given, trio_dir, tmp_path / "out")
    sizes = {"total": 12, "prompt": 12, "shortest": 10}
    file = spoiled(given, lambda s: s["stages"]["continuations"].update(sizes))
    command[command.index("--config") + 1] = file
    assert "continuations of 12 tokens have no room for a prompt of 10" in run(*command).err
    assert not (tmp_path / "out").exists()


def test_a_recipe_may_leave_out_its_rows(run, given, trio_dir, tmp_path, monkeypatch):
    stop_before_training(monkeypatch)
    command = arguments(given, trio_dir, tmp_path / "out")
    file = spoiled(given, lambda s: s["stages"]["weaver"]["recipe"].pop("rows"))
    command[command.index("--config") + 1] = file
    with pytest.raises(RuntimeError, match="stopped"):
        run(*command)


def spoiled(given: Path, edit) -> str:
    settings = json.loads(json.dumps(CONFIG))
    edit(settings)
    file = given / "spoiled.json"
    file.write_text(json.dumps(settings))
    return str(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps must be positive, got 0"),
        (["--steps", "5", "--seconds", "9"], "steps and seconds both give the length"),
        (["--seconds", "-1"], "seconds must be finite and positive, got -1.0"),
        (["--seed", "-1"], "seed must lie in 0..4294967295, got -1"),
        (["--save-every", "-1"], "save_every must be at least 0"),
        (["--devices", "0"], "devices must be positive, got 0"),
        (["--devices", "99"], "99 devices asked for, 1 found"),
        (["--corpus", "nowhere"], "corpus and text both name the text"),
        (["--model", "nowhere"], "nowhere: no such directory"),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--warm-start", "nowhere.pth"], "nowhere.pth: no such file"),
    ],
)
def test_bad_options_are_one_line(run, given, trio_dir, tmp_path, options, message):
    command = arguments(given, trio_dir, tmp_path / "out")
    if options[0] == "--config":
        command = command[: command.index("--config")] + command[command.index("--text") :]
    status, out, err = run(*command, *options)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s["stages"]["weaver"].update(stepz=1), "unknown weaver.stepz"),
        (
            lambda s: s["stages"]["weaver"].update(most_copied=0.5),
            "unknown weaver.most_copied",
        ),
        (lambda s: s["stages"].update(drafter={}), "no stage is called drafter"),
        (lambda s: s["stages"]["weaver"].pop("log_every"), "weaver.log_every is missing"),
        (lambda s: s["stages"]["weaver"]["recipe"].update(rows=0), "recipe: rows must be positive"),
        (lambda s: s["stages"]["weaver"]["recipe"].update(mode="x"), "mode must be fixed"),
        (lambda s: s["stages"]["weaver"]["recipe"].update(rows="2"), "rows must be an integer"),
        (lambda s: s["stages"]["weaver"]["optimiser"].update(rate=1), "'rate'"),
        (lambda s: s["stages"]["weaver"].update(log_every=0), "weaver.log_every must be positive"),
        (lambda s: s.update(weaver={"d_model": 8}), "weaver: WeaverConfig.__init__() missing"),
    ],
)
def test_bad_configurations_are_refused(run, given, trio_dir, tmp_path, edit, message):
    command = arguments(given, trio_dir, tmp_path / "out")
    command[command.index("--config") + 1] = spoiled(given, edit)
    status, _, err = run(*command)
    assert status == 2
    assert message in err
    assert not (tmp_path / "out" / "weaver").exists()


def test_texts_that_cannot_be_trained_on_are_refused_at_the_start(run, given, trio_dir, tmp_path):
    file = tmp_path / "texts.npz"
    command = arguments(given, trio_dir, tmp_path / "out")
    command = [*command[: command.index("--text")], "--texts", str(file)]
    shape = {"prompt": np.full(3, 9, np.int32), "temperature": np.ones(3, np.float32)}
    Continuations(tokens=np.zeros((3, 10), np.uint16), **shape).save(file)
    assert "none of the 3 texts of 10 tokens has 3 tokens" in run(*command).err
    Continuations(tokens=np.full((3, 30), 9000, np.uint16), **shape).save(file)
    assert "hold token 9000, the verifier's vocabulary has 8192" in run(*command).err
    np.savez(file, tokens=np.zeros((3, 10)))
    assert "holds no continuations" in run(*command).err
    file.write_bytes(b"nonsense")
    assert "holds no continuations" in run(*command).err
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_drafter_or_with_too_little_text(run, given, trio_dir, tmp_path):
    alone = shutil.copytree(trio_dir / "verifier", tmp_path / "alone")
    command = arguments(given, alone, tmp_path / "out")
    assert "has no drafter: a Weaver scores a drafter's candidates" in run(*command).err
    (tmp_path / "text").mkdir()
    few = "A few words that nobody, however patient, could ever train upon."
    (tmp_path / "text" / "a.txt").write_text(few)
    command = arguments(given, trio_dir, tmp_path / "out")
    command[command.index("--text") + 1] = str(tmp_path / "text")
    result = run(*command)
    assert result.status == 2
    assert "too short" in result.err


@pytest.mark.parametrize(
    ("module", "option", "message"),
    [
        ("matplotlib", ["--plot"], "plots need matplotlib"),
        ("tensorboardX", ["--tensorboard", "events"], "need tensorboardX"),
    ],
)
def test_what_is_not_installed_is_named(
    run, given, trio_dir, tmp_path, monkeypatch, module, option, message
):
    monkeypatch.setitem(sys.modules, module, None)
    result = run(*arguments(given, trio_dir, tmp_path / "out"), *option)
    assert result.status == 2
    assert message in result.err
    assert not (tmp_path / "out").exists()
