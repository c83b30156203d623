"""Exported networks have the published names and shapes and read back to the same values."""

import dataclasses
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tfm_jax.checkpoints import (
    CheckpointError,
    build_verifier,
    module_params,
    read_trio,
    write_hf,
)
from tfm_jax.checkpoints.opened import open_drafter, open_verifier, open_weaver


def test_a_verifier_is_exported_as_published(fixtures, tmp_path):
    source = fixtures / "qwen36_tiny" / "text_f32"
    opened = open_verifier(source)
    params = module_params(build_verifier(opened.config, opened.load()))
    write_hf(tmp_path, opened.config, params)
    expected, exported = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert exported.keys() == expected.keys()
    for name, array in exported.items():
        assert array.shape == expected[name].shape
        assert np.array_equal(array, expected[name]), name
    assert open_verifier(tmp_path).config == opened.config


def test_a_tied_verifier_has_no_head(verifier_dir, tmp_path, edit):
    edit(verifier_dir / "config.json", lambda config: config.update(tie_word_embeddings=True))
    edit(verifier_dir / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    opened = open_verifier(verifier_dir)
    write_hf(tmp_path / "out", opened.config, opened.load())
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert open_verifier(tmp_path / "out").config.tie_word_embeddings


def test_a_trio_is_exported_in_bfloat16(trio_dir, tmp_path):
    trio = read_trio(trio_dir)
    for folder, part in (
        ("verifier", trio.verifier),
        ("dflash", trio.drafter),
        ("weaver", trio.weaver),
    ):
        write_hf(
            tmp_path / "out" / folder,
            *part,
            dtype="bfloat16",
            extra={"note": "trained"},
            metadata={"licence": "Apache-2.0"},
        )
        config = json.loads((tmp_path / "out" / folder / "config.json").read_text())
        assert config["note"] == "trained"
        assert config["dtype"] == "bfloat16"
        with safe_open(tmp_path / "out" / folder / "model.safetensors", "numpy") as file:
            assert file.metadata() == {"format": "pt", "licence": "Apache-2.0"}
    again = read_trio(tmp_path / "out")
    for name in ("verifier", "drafter", "weaver"):
        before, after = getattr(trio, name), getattr(again, name)
        assert before.config == after.config
        for path, array in after.params.items():
            exact = path.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))
            assert array.dtype == (np.float32 if exact else ml_dtypes.bfloat16), path
            assert np.array_equal(array, before.params[path].astype(array.dtype)), path


def test_equal_input_gives_equal_bytes(fixtures, tmp_path):
    opened = open_drafter(fixtures / "dflash_tiny")
    params = opened.load()
    write_hf(tmp_path / "one", opened.config, params)
    write_hf(tmp_path / "two", opened.config, dict(reversed(params.items())))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("variant", ["learned_gelu", "rope_swiglu"])
def test_a_weaver_is_exported_in_its_own_layout(fixtures, tmp_path, variant):
    source = fixtures / "weaver_tiny" / variant / "weaver.safetensors"
    opened = open_weaver(source)
    write_hf(tmp_path, opened.config, opened.load())
    expected, exported = load_file(source), load_file(tmp_path / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(np.array_equal(exported[name], expected[name]) for name in expected)
    assert open_weaver(tmp_path).config == opened.config


def test_existing_files_and_wrong_parameters_are_refused(fixtures, tmp_path):
    opened = open_drafter(fixtures / "dflash_tiny")
    params = opened.load()
    with pytest.raises(CheckpointError, match=r"fc\.weight is missing"):
        write_hf(tmp_path, opened.config, {k: v for k, v in params.items() if k != "fc.weight"})
    assert list(tmp_path.iterdir()) == []
    shutil.copyfile(fixtures / "dflash_tiny" / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="exists; pass overwrite"):
        write_hf(tmp_path, opened.config, params)
    write_hf(tmp_path, opened.config, params, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_other_weights_are_not_left_beside_new_ones(fixtures, sharded_dir, tmp_path):
    opened = open_drafter(fixtures / "dflash_tiny")
    before = (sharded_dir / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"holds other weights, model\.safetensors-00001-of"):
        write_hf(sharded_dir, opened.config, opened.load(), overwrite=True)
    assert (sharded_dir / "config.json").read_bytes() == before
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json exists; pass overwrite"):
        write_hf(tmp_path / "alone", opened.config, opened.load())


def killed_at(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of that number to what changes files ends the process, as far as a test can."""
    calls = iter(range(100))

    def counted(original):
        def call(*arguments, **options):
            if next(calls) == place:
                raise KeyboardInterrupt
            return original(*arguments, **options)

        return call

    for name in ("replace", "unlink", "write_text", "write_bytes"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))


def test_a_kill_leaves_one_network_or_a_folder_that_nothing_loads(fixtures, tmp_path, monkeypatch):
    opened = open_drafter(fixtures / "dflash_tiny")
    params = opened.load()
    networks = {
        b"old": (opened.config, params),
        b"new": (
            dataclasses.replace(opened.config, rope_theta=2 * opened.config.rope_theta),
            {name: 2 * array for name, array in params.items()},
        ),
    }
    left = []
    for place in range(14):
        folder = tmp_path / str(place)
        write_hf(folder, *networks[b"old"], beside={"tokenizer.json": b"old"})
        with monkeypatch.context() as patched:
            killed_at(place, patched)
            try:
                write_hf(
                    folder, *networks[b"new"], beside={"tokenizer.json": b"new"}, overwrite=True
                )
            except KeyboardInterrupt:
                left.append("killed")
        if not (folder / "config.json").exists():
            with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
                open_drafter(folder)
            left[-1] = "refused"
            continue
        found = open_drafter(folder)
        config, expected = networks[(folder / "tokenizer.json").read_bytes()]
        assert found.config == config
        assert all(np.array_equal(found.load()[name], expected[name]) for name in expected)
    assert left.count("killed") >= 4
    assert left.count("refused") >= 3
