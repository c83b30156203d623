"""Conversion writes everything that was read, whole or not at all."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tfm_jax.checkpoints import CheckpointError, convert, read_trio
from tfm_jax.checkpoints.opened import open_weaver
from tfm_jax.checkpoints.trio import open_trio
from tfm_jax.cli import main

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "tfm_jax" / "assets" / "pocket" / "verifier" / "tokenizer.json"


def digest(directory):
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def assert_same(one, two):
    assert one.keys() == two.keys()
    for path in one:
        assert one[path].dtype == two[path].dtype, path
        assert one[path].tobytes() == two[path].tobytes(), path


@pytest.mark.parametrize("layout", ["text_f32", "hub_f32", "hub_bf16_sharded"])
def test_a_verifier_comes_back_bit_for_bit(fixtures, tmp_path, layout):
    source = fixtures / "qwen36_tiny" / layout
    report = convert(source, tmp_path / "out")
    direct, stored = read_trio(source), read_trio(tmp_path / "out")
    assert stored.verifier.config == direct.verifier.config
    assert_same(stored.verifier.params, direct.verifier.params)
    assert stored.drafter is None
    assert stored.weaver is None
    assert report.read["verifier"][2] == 109
    assert sum(report.skipped.values()) == (36 if "sharded" in layout else 0)


def test_a_trio_comes_back_bit_for_bit(trio_dir, tmp_path):
    shutil.copyfile(TOKENIZER, trio_dir / "verifier" / "tokenizer.json")
    before = digest(trio_dir)
    report = convert(trio_dir, tmp_path / "out")
    assert digest(trio_dir) == before
    assert report.copied == ("tokenizer.json", "generation_config.json")
    direct, stored = read_trio(trio_dir), read_trio(tmp_path / "out")
    assert stored.tokenizer == tmp_path / "out" / "tokenizer.json"
    assert stored.tokenizer.read_bytes() == TOKENIZER.read_bytes()
    assert stored.eos_token_ids == direct.eos_token_ids == (508,)
    for name in ("verifier", "drafter", "weaver"):
        assert getattr(stored, name).config == getattr(direct, name).config
        assert_same(getattr(stored, name).params, getattr(direct, name).params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


@pytest.mark.parametrize(
    "file", ["weaver.pth", "weaver.safetensors", "weaver_fused_qkv.safetensors"]
)
def test_parts_from_other_places(fixtures, verifier_dir, drafter_dir, tmp_path, file):
    weaver = fixtures / "weaver_tiny" / "learned_gelu" / file
    convert(verifier_dir, tmp_path / "out", drafter=drafter_dir, weaver=weaver)
    stored = read_trio(tmp_path / "out")
    expected = open_weaver(fixtures / "weaver_tiny" / "learned_gelu" / "weaver.safetensors")
    assert stored.weaver is not None
    assert stored.weaver.config == expected.config
    assert_same(stored.weaver.params, expected.load())


def test_converting_twice_and_converting_the_result_change_nothing(trio_dir, tmp_path):
    convert(trio_dir, tmp_path / "one", dtype="bfloat16")
    convert(trio_dir, tmp_path / "two", dtype="bfloat16")
    convert(tmp_path / "one", tmp_path / "three", dtype="bfloat16")
    one = read_trio(tmp_path / "one")
    for other in (read_trio(tmp_path / "two"), read_trio(tmp_path / "three")):
        for name in ("verifier", "drafter", "weaver"):
            assert getattr(one, name).config == getattr(other, name).config
            assert_same(getattr(one, name).params, getattr(other, name).params)
    kept = one.verifier.params["layers.0.linear_attn.A_log"]
    assert kept.dtype == np.float32


def test_an_existing_directory_is_kept_unless_asked(trio_dir, tmp_path):
    target = tmp_path / "out"
    convert(trio_dir, target)
    before = digest(target)
    with pytest.raises(CheckpointError, match="exists; overwrite"):
        convert(trio_dir, target)
    assert digest(target) == before
    convert(trio_dir, target, dtype="bfloat16", overwrite=True)
    assert read_trio(target).verifier.params["norm.weight"].dtype == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_only_conversions_are_overwritten(trio_dir, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="was not made by a conversion"):
        convert(trio_dir, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    for target in (trio_dir, tmp_path):
        with pytest.raises(CheckpointError, match="replace its own source"):
            convert(trio_dir, target, overwrite=True)


@pytest.mark.parametrize("part", ["drafter", "weaver"])
def test_a_conversion_does_not_replace_what_it_reads(trio_dir, tmp_path, part):
    target = tmp_path / "out"
    convert(trio_dir, target)
    inside = target / "run" / part
    shutil.copytree(trio_dir / {"drafter": "dflash", "weaver": "weaver"}[part], inside)
    before = digest(tmp_path)
    with pytest.raises(CheckpointError, match=f"would replace its own source {inside}"):
        convert(trio_dir, target, overwrite=True, **{part: inside})
    assert digest(tmp_path) == before


@pytest.mark.parametrize("name", ["mine.txt", "weights/mine.txt", "tokenizer.json", "a/b/link"])
def test_a_conversion_with_other_files_is_not_replaced(verifier_dir, tmp_path, name):
    target = tmp_path / "out"
    convert(verifier_dir, target)
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("link"):
        (target / name).symlink_to(verifier_dir)
    else:
        shutil.copyfile(TOKENIZER, target / name)
    before = digest(tmp_path)
    with pytest.raises(CheckpointError, match=f"did not write, it is not replaced: {name}$"):
        convert(verifier_dir, target, overwrite=True)
    assert digest(tmp_path) == before


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_not_replaced(verifier_dir, tmp_path, dangling):
    if not dangling:
        convert(verifier_dir, tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="link is a link; name the directory itself"):
        convert(verifier_dir, tmp_path / "link", overwrite=True)
    assert sorted(tmp_path.iterdir()) == before


def test_a_broken_tokenizer_writes_nothing(verifier_dir, tmp_path):
    (verifier_dir / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        convert(verifier_dir, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_directory_or_dead_link_is_no_text_file(verifier_dir, tmp_path, name, make):
    (verifier_dir / name).unlink(missing_ok=True)
    make(verifier_dir / name)
    for read in (read_trio, lambda source: convert(source, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=f"{name} is no file"):
            read(verifier_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_while_writing_leaves_everything_as_it_was(
    trio_dir, tmp_path, monkeypatch, overwrite
):
    target = tmp_path / "out"
    if overwrite:
        convert(trio_dir, target)
    before = digest(tmp_path)

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="no space"):
        convert(trio_dir, target, overwrite=overwrite)
    assert digest(tmp_path) == before
    assert target.exists() == overwrite


def test_a_failed_rename_brings_the_old_directory_back(trio_dir, tmp_path, monkeypatch):
    target = tmp_path / "out"
    convert(trio_dir, target)
    before = digest(tmp_path)
    rename = Path.rename

    def refuse_partial(self, new):
        if ".partial-" in self.name:
            raise OSError("the disk is gone")
        return rename(self, new)

    monkeypatch.setattr(Path, "rename", refuse_partial)
    with pytest.raises(OSError, match="disk is gone"):
        convert(trio_dir, target, overwrite=True)
    assert digest(tmp_path) == before


def test_a_bad_source_writes_nothing(trio_dir, tmp_path, edit):
    edit(trio_dir / "weaver" / "model.safetensors", lambda t: t.pop("token_in.bias"))
    with pytest.raises(CheckpointError, match=r"token_in\.bias is missing"):
        convert(trio_dir, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_mismatched_trio_writes_nothing(fixtures, verifier_dir, tmp_path):
    with pytest.raises(CheckpointError, match="num_target_layers is 12"):
        convert(verifier_dir, tmp_path / "out", drafter=fixtures / "dflash_tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_opening_a_conversion_reads_no_weight_and_loading_reads_all_once(
    trio_dir, tmp_path, monkeypatch
):
    convert(trio_dir, tmp_path / "out")
    restore, reads = ocp.Checkpointer.restore, []

    def counted(self, *args, **options):
        reads.append(args)
        return restore(self, *args, **options)

    monkeypatch.setattr(ocp.Checkpointer, "restore", counted)
    opened = open_trio(tmp_path / "out")
    assert not reads
    direct = read_trio(trio_dir)
    for name, part in opened.parts().items():
        assert_same(part.load(), getattr(direct, name).params)
    assert len(reads) == 1


def test_a_damaged_conversion_is_refused(verifier_dir, tmp_path, edit):
    target = tmp_path / "out"
    convert(verifier_dir, target)
    whole = tmp_path / "whole"
    shutil.copytree(target, whole)

    largest = max((target / "weights").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    data = largest.read_bytes()
    largest.write_bytes(data[:-100])
    message = f"{largest.name} has {len(data) - 100} bytes, {len(data)} were written"
    with pytest.raises(CheckpointError, match=message):
        read_trio(target)

    largest.write_bytes(data)
    assert read_trio(target).drafter is None
    metadata = target / "weights" / "_METADATA"
    metadata.write_bytes(b"{" * metadata.stat().st_size)
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        read_trio(target)

    shutil.rmtree(target / "weights")
    with pytest.raises(CheckpointError, match=r"manifest\.ocdbt is not there"):
        read_trio(target)

    edit(whole / "config.json", lambda config: config["verifier"].update(intermediate_size=96))
    with pytest.raises(CheckpointError, match=r"is \[128, 64\], expected \[96, 64\]"):
        read_trio(whole)

    edit(whole / "config.json", lambda config: config.update(version=99))
    with pytest.raises(CheckpointError, match="has version 99"):
        read_trio(whole)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("verifier", None, "verifier must be an object, got None"),
        ("verifier", [], r"verifier must be an object, got \[\]"),
        ("drafter", "4", "drafter must be an object, got '4'"),
        ("weaver", None, "weaver must be an object, got None"),
        ("files", [1], r"files must be an object of sizes by name, got \[1\]"),
    ],
)
def test_a_changed_description_is_refused(verifier_dir, tmp_path, edit, key, value, message):
    convert(verifier_dir, tmp_path / "out")
    edit(tmp_path / "out" / "config.json", lambda config: config.update({key: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read_trio(tmp_path / "out")


def test_a_changed_list_of_copies_is_refused(verifier_dir, tmp_path, edit):
    convert(verifier_dir, tmp_path / "out")
    edit(tmp_path / "out" / "config.json", lambda config: config.update(copied=4))
    with pytest.raises(CheckpointError, match=r"config\.json: copied must be a list .* got 4"):
        convert(verifier_dir, tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("missing", ["src", "drafter", "weaver"])
def test_paths_that_do_not_exist(verifier_dir, tmp_path, missing):
    nowhere = tmp_path / "nowhere"
    options = {} if missing == "src" else {missing: nowhere}
    source = nowhere if missing == "src" else verifier_dir
    with pytest.raises(CheckpointError, match=f"{nowhere}: no such"):
        convert(source, tmp_path / "out", **options)


def test_the_command_says_what_it_did(sharded_dir, tmp_path, capsys):
    assert main(["convert", str(sharded_dir), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "read     verifier: 109 parameters, 3 files" in out
    assert "skipped  21 tensors model.visual.*" in out
    assert "skipped  15 tensors mtp.*" in out
    assert f"written  {tmp_path / 'out'}: config.json, weights/" in out


def test_the_script_fails_in_one_line(tmp_path):
    script = ROOT / "scripts" / "convert_weights.py"
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "none"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.strip().startswith(f"error: {tmp_path / 'none'}: no such directory")
