"""`tfm train` and `tfm data`: from a few texts to a network that the other commands read."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file

import tfm_jax.training.run as training
from tests.conftest import VERIFIER
from tfm_jax.checkpoints import read_trio
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.training.batches import PACKED, load_streams
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.prepare import prepare
from tfm_jax.training.trainer import flatten, make_optimiser, start

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
        "pair": {
            "log_every": 2,
            "recipe": {"rows": 4, "drafter": {"anchors": 2}, "weaver": {"anchors": 4}},
            "optimiser": {"steps": 5},
        },
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


@pytest.mark.slow
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

    boards = []

    def board(folder, purge_step):
        boards.append((Path(folder), purge_step))
        return SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=board))
    events = ["--tensorboard", str(tmp_path / "events")]
    done = run(*command, "--resume", "--json", "--plot", *events)
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
    setting, texts = summary["setting"], summary["texts"]
    assert {name: setting[name] for name in ("seed", "dtype", "devices")} == {
        "seed": 0,
        "dtype": "float32",
        "devices": 1,
    }
    assert setting["optimiser"]["steps"] == 5
    assert setting["recipe"].items() >= {"rows": 4, "anchors": 4, "mode": "depth"}.items()
    written = Continuations.load(out / "continuations.npz")
    kinds = texts["continuations_at_0"], texts["continuations_at_1"], texts["held_back"]
    assert min(kinds) > 0
    assert sum(kinds) + texts["left_out"] == len(written.tokens)
    assert (texts["corpus_windows"], texts["held_back"]) == (0, 2)

    # The run is its own: it may write its network again. One sitting gives the same bits as two.
    assert run(*command, "--resume").status == 0
    assert boards == [(tmp_path / "events" / "weaver", 4)]
    whole = run(*arguments(given, trio_dir, tmp_path / "whole"), *events)
    assert "tfm convert" in whole.out
    files = [folder / "weaver" / "model.safetensors" for folder in (tmp_path / "whole", out)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert boards[1:] == [(tmp_path / "events" / "weaver", None)]

    trio = tmp_path / "trio"
    assert run("convert", str(trio_dir), str(trio), "--weaver", str(out / "weaver")).status == 0
    trained = read_trio(trio).weaver
    assert trained is not None
    assert np.abs(trained.params["lm_head_query_in.weight"].astype(np.float32)).max() > 0


@pytest.mark.slow
def test_a_pair_in_two_sittings(run, given, trio_dir, tmp_path, monkeypatch):
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = [*arguments(given, trio_dir, out, "pair"), "--save-every", "0"]
    with monkeypatch.context() as patched:
        stop_after(3, patched)
        with pytest.raises(RuntimeError, match="stopped"):
            run(*command)
    assert not (out / "dflash").exists()
    done = run(*command, "--resume", "--json")
    assert done.status == 0, done.err
    summary = done.json
    assert (summary["network"], summary["steps"], summary["skipped_steps"]) == ("pair", 5, 0)
    assert summary["setting"]["recipe"]["weight"] == 4
    assert summary["setting"]["recipe"]["drafter"]["anchors"] == 2
    losses = summary["before"]["loss"], summary["after"]["loss"]
    assert summary["after"]["loss_drafter"] < summary["before"]["loss_drafter"]
    rose = f"the loss rose from {losses[0]:.3f} to {losses[1]:.3f}: the pair was better before"
    assert (rose in done.err) == (losses[1] > losses[0])
    again = run(*arguments(given, trio_dir, whole, "pair"))
    assert again.status == 0, again.err
    for name in ("dflash", "weaver"):
        files = [folder / name / "model.safetensors" for folder in (out, whole)]
        assert files[0].read_bytes() == files[1].read_bytes()
    line = f"NEW --drafter {whole / 'dflash'} --weaver {whole / 'weaver'}; --model NEW"
    assert line in again.out.replace("\n", " ")
    trio, parts = tmp_path / "trio", ("drafter", "weaver")
    options = ["--drafter", str(out / "dflash"), "--weaver", str(out / "weaver")]
    assert run("convert", str(trio_dir), str(trio), *options).status == 0
    before, after = read_trio(trio_dir), read_trio(trio)
    for part in parts:
        first, second = (getattr(found, part).params for found in (before, after))
        assert any((np.asarray(first[n]) != np.asarray(second[n])).any() for n in first), part


def test_a_pair_goes_on_from_a_whole_trio_of_its_own_sizes(run, given, trio_dir, tmp_path):
    config = tmp_path / "config.json"
    out = tmp_path / "out"

    def refused(edit: dict, *options: str) -> str:
        config.write_text(json.dumps(edit | CONFIG))
        done = run(*arguments(given, trio_dir, out, "pair"), "--config", str(config), *options)
        assert done.status == 2
        assert done.err.count("\n") == 1
        assert not out.exists()
        return done.err

    weaver = dataclasses.asdict(read_trio(trio_dir).weaver.config)
    assert "asks for" in refused({"weaver": weaver | {"mlp_dim": 2 * weaver["mlp_dim"]}})
    stages = CONFIG["stages"]
    for recipe, message in (
        ({"rows": 4, "drafters": {}}, "pair.recipe has unknown entries: drafters"),
        ({"rows": 4, "weaver": {"rows": 8}}, "the same rows, got 4 and 8"),
        ({"rows": 4, "weaver": []}, "pair.recipe.weaver must be an object"),
        ({"rows": 4, "drafter": {"loss": "x"}}, "pair.recipe.drafter: loss must be decayed"),
        ({"weight": -1}, "weight must be finite and at least 0, got -1"),
    ):
        config.write_text(
            json.dumps({"stages": stages | {"pair": stages["pair"] | {"recipe": recipe}}})
        )
        done = run(*arguments(given, trio_dir, out, "pair"), "--config", str(config))
        assert done.status == 2
        assert message in done.err
    alone = tmp_path / "alone"
    shutil.copytree(trio_dir, alone)
    shutil.rmtree(alone / "weaver")
    done = run(*arguments(given, alone, out, "pair"))
    assert done.status == 2
    assert f"{alone} has no Weaver: a pair is trained from the model's own" in done.err
    assert not out.exists()


@pytest.mark.parametrize("network", ["weaver", "dflash", "verifier", "pair"])
def test_networks_that_lie_in_the_folder_are_not_replaced(
    run, given, damaged, trio_dir, tmp_path, network
):
    (damaged / "training.jsonl").write_text('{"title": "weaver", "step": 9}\n')
    before = {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()}
    refused = run(*arguments(given, damaged, damaged, network))
    assert refused.status == 2
    assert f"{damaged} is the model itself: name another folder to write" in refused.err
    for resume in ([], ["--resume"]):
        refused = run(*arguments(given, trio_dir, damaged, network), *resume)
        assert refused.status == 2
        kept = "dflash, weaver" if network == "pair" else network
        assert f"{damaged} holds {kept}, training.jsonl, made by no training" in refused.err
        assert refused.err.count("\n") == 1
    assert {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()} == before


def test_a_folder_goes_on_with_the_network_that_it_began_with(
    run, given, trio_dir, tmp_path, monkeypatch
):
    stop_before_training(monkeypatch)
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="stopped"):
        run(*arguments(given, trio_dir, out))
    (out / "checkpoints").mkdir()
    sources = (out / "sources.json").read_bytes()
    refused = run(*arguments(given, trio_dir, out, "dflash"), "--resume")
    assert refused.status == 2
    assert "network was weaver, now dflash" in refused.err
    assert (out / "sources.json").read_bytes() == sources


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
        "eos_token_ids": [0, 2],
    }
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps({**CONFIG, "verifier": sizes}))
    command[command.index("--config") + 1] = str(file)
    verifier = run(*command)
    assert verifier.status == 0, verifier.err
    assert read_trio(tmp_path / "v" / "verifier").verifier.config.head_dim == 24
    assert (tmp_path / "v" / "verifier" / "tokenizer.json").is_file()


@pytest.fixture
def own_corpus(tmp_path: Path) -> Path:
    """A corpus with a tokenizer of its own, and a little text held back."""
    folder, text = tmp_path / "corpus", tmp_path / "texts"
    text.mkdir()
    for name, row in enumerate(np.random.default_rng(0).integers(100, 999, (80, 30))):
        words = " ".join(f"the number {n} comes before {n + 1}." for n in row)
        (text / f"{name}.txt").write_text(words)
    prepare(folder, text_dirs=(str(text),), packages=False, vocab_size=270, progress=False)
    return folder


def untrained(config, batches, optimiser, *, seed, **_):
    """A verifier's state before its first step."""
    del batches
    params = flatten(Verifier(config, rngs=nnx.Rngs(seed)))
    return start(params, make_optimiser(optimiser), 1)


def verifier_command(given: Path, own_corpus: Path, out: Path, **entries) -> list[str]:
    """Training of a tiny verifier on the corpus; `entries` are of its stage."""
    sizes = {name: getattr(VERIFIER, name) for name in ("hidden_size", "intermediate_size")}
    heads = [f.name for f in dataclasses.fields(VERIFIER) if "head" in f.name]
    sizes |= {name: getattr(VERIFIER, name) for name in ("layer_types", *heads)}
    sizes |= {"vocab_size": 272, "eos_token_ids": entries.pop("ends", [0, 2])}

    def edit(settings):
        settings["verifier"] = sizes
        settings["stages"]["verifier"].update(entries)

    command = ["train", "verifier", "--corpus", str(own_corpus), "--out", str(out)]
    return [*command, "--config", spoiled(given, edit)]


def test_a_verifier_says_what_it_was_trained_and_measured_on(
    run, given, own_corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "train_verifier", untrained)
    mixture = {"mixture": {"prose": 3, "math": 1}}
    measured = run(*verifier_command(given, own_corpus, tmp_path / "one", **mixture), "--json")
    assert measured.status == 0, measured.err
    summary = measured.json
    assert summary["heldout"]
    assert set(summary["after"]) == {"prose"} == set(summary["texts"]["held_back"])
    assert summary["setting"]["mixture"] == {"prose": 1}
    assert summary["setting"]["length"] == 16
    assert summary["texts"]["corpus_tokens"]["prose"] > 1000
    kept = (tmp_path / "one" / "verifier" / "tokenizer.json").read_bytes()
    assert kept == (own_corpus / "tokenizer.json").read_bytes()

    heldout = len(load_streams(own_corpus / PACKED, "heldout")["prose"])
    command = verifier_command(given, own_corpus, tmp_path / "two", length=heldout)
    bare = run(*command)
    assert bare.status == 0, bare.err
    assert f"nothing is held back: no domain of {own_corpus} has more than" in bare.out
    assert "nothing was held back to measure on" in bare.out
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert (summary["heldout"], summary["after"]) == (False, {})


def test_a_verifier_takes_one_tokenizer_whose_end_tokens_it_has(
    run, given, own_corpus, trio_dir, tmp_path
):
    out = tmp_path / "out"
    command = verifier_command(given, own_corpus, out)
    for model in (str(trio_dir), "nowhere", "pocket"):
        refused = run(*command, "--model", model)
        assert refused.status == 2
        assert f"{own_corpus} has a tokenizer of its own, and model ({model})" in refused.err
    refused = run(*verifier_command(given, own_corpus, out, ends=[0, 1]))
    assert "has the end tokens [0, 2], the verifier's eos_token_ids are [0, 1]" in refused.err
    refused = run(*verifier_command(given, own_corpus, out, mixture={"math": 1}))
    assert "no weight in {'math': 1} falls on the corpus domains ['prose']" in refused.err
    (own_corpus / "tokenizer.json").unlink()
    refused = run(*command, "--model", "nowhere")
    assert "nowhere: no such directory" in refused.err
    assert not (out / "verifier").exists()


def test_options_that_a_network_does_not_read_are_refused(tmp_path):
    job = training.Job(out=tmp_path / "out", texts=tmp_path / "a.npz", warm_start=tmp_path / "w")
    with pytest.raises(ValueError, match="a verifier reads no texts and no warm_start"):
        training.train_network("verifier", job)
    with pytest.raises(ValueError, match="a dflash reads no warm_start"):
        training.train_network("dflash", job)


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


def test_padding_of_the_vocabulary_is_neither_written_nor_learned(
    run, given, damaged, tmp_path, monkeypatch
):
    """A verifier of 8192 rows whose tokenizer has 270 tokens."""
    seen = []
    objective = training.weaver_objective

    def spy(*arguments, vocab_limit):
        seen.append(vocab_limit)
        return objective(*arguments, vocab_limit=vocab_limit)

    def stop(folder, setting, **_):
        raise RuntimeError(f"{folder.name} of {setting['padding']} rows of padding")

    monkeypatch.setattr(training, "weaver_objective", spy)
    monkeypatch.setattr(training, "_evaluation", lambda *_: lambda _: {})
    monkeypatch.setattr(training, "Checkpoints", stop)
    corpus, out, file = tmp_path / "corpus", tmp_path / "out", tmp_path / "texts.npz"
    text = (str(given / "text"),)
    prepare(corpus, text_dirs=text, packages=False, vocab_size=270, progress=False)
    shutil.copy(corpus / "tokenizer.json", damaged / "verifier")
    with pytest.raises(RuntimeError, match="checkpoints of 7922 rows of padding"):
        run(*arguments(given, damaged, out))
    assert seen == [270]
    command = ["data", "continuations", str(file), "--model", str(damaged)]
    done = run(*command, "--corpus", str(corpus), "--config", str(given / "config.json"))
    assert done.status == 0, done.err
    for texts in (Continuations.load(out / "continuations.npz"), Continuations.load(file)):
        assert set(texts.temperature) == {0, 1}
        assert texts.tokens.max() < 270


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
    warm = {**shape, "temperature": np.array([0, 0.7, 1], np.float32)}
    Continuations(tokens=np.zeros((3, 30), np.uint16), **warm).save(file)
    assert f"{file}: temperature must be 0 or 1, got 0.7" in run(*command).err
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
