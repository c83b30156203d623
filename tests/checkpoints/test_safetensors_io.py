"""Damaged, absent and misplaced files are refused with their name and the likely cause."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tfm_jax.checkpoints import CheckpointError
from tfm_jax.checkpoints.opened import open_verifier
from tfm_jax.checkpoints.safetensors_io import read_directory, read_file

SHARD = "model.safetensors-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def raw_file(path, header: dict, body: bytes):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:5], "not a safetensors file"),
        (lambda data: data[:300], "cut off inside its header"),
        (lambda data: data[:-1], "is cut off: .* its header promises"),
        (lambda data: data[: len(data) // 2], "is cut off: .* its header promises"),
        (lambda data: data + b"\0" * 8, "8 bytes after its last tensor"),
        (lambda data: b"<!doctype html>" + data, "not a safetensors file"),
        (lambda data: data[:8] + b"}" + data[9:], "damaged header"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
    ids=["empty", "stub", "header", "byte", "half", "longer", "html", "json", "pointer"],
)
def test_damaged_files_are_refused(sharded_dir, damage, cause):
    path = sharded_dir / SHARD
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=cause) as caught:
        open_verifier(sharded_dir)
    assert SHARD in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes for F32"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "impossible sizes"),
        ({"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}, "F4 are not supported"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "gap or overlap before a"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
        (7, "damaged header"),
    ],
)
def test_impossible_headers_are_refused(tmp_path, entry, cause):
    path = raw_file(tmp_path / "x.safetensors", {"a": entry}, b"\0" * 8)
    with pytest.raises(CheckpointError, match=cause):
        read_file(path)


def test_a_deeply_nested_header_is_refused(tmp_path):
    header = b"[" * 100_000
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"x\.safetensors has a damaged header"):
        read_file(path)


def test_overlapping_tensors_are_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path = raw_file(tmp_path / "x.safetensors", {"a": entry, "b": entry}, b"\0" * 8)
    with pytest.raises(CheckpointError, match="overlap before b"):
        read_file(path)


def test_scalars_empty_tensors_and_odd_alignment(tmp_path):
    arrays = {
        "flag": np.array([True, False, True]),
        "nothing": np.zeros((0, 3), np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    path = tmp_path / "x.safetensors"
    save_file(arrays, path)
    for name, array in read_file(path).items():
        assert array.shape == arrays[name].shape
        assert np.array_equal(array, arrays[name])

    header = {
        "flag": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
        "value": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    odd = raw_file(tmp_path / "odd.safetensors", header, b"\1" + np.float32([3, 4]).tobytes())
    assert read_file(odd)["value"].tolist() == [3, 4]


def test_absent_shards_are_all_named(sharded_dir):
    (sharded_dir / SHARD).unlink()
    (sharded_dir / SHARD.replace("00002-of", "00003-of")).unlink()
    with pytest.raises(CheckpointError) as caught:
        open_verifier(sharded_dir)
    assert "2 problems" in str(caught.value)
    assert f"{SHARD}, named by the index for" in str(caught.value)


def test_a_tensor_absent_from_its_shard_is_named(sharded_dir, edit):
    gone = sorted(load_file(sharded_dir / SHARD))[0]
    edit(sharded_dir / SHARD, lambda tensors: tensors.pop(gone))
    with pytest.raises(CheckpointError, match=f"{gone} is not in {SHARD}"):
        open_verifier(sharded_dir)


def test_only_files_of_the_index_are_read(sharded_dir):
    expected = open_verifier(sharded_dir).load()
    (sharded_dir / "model.safetensors").write_bytes(b"left over")
    for i, old in enumerate(sorted(sharded_dir.glob("*-of-00003.safetensors"))):
        new = f"layers-{i}.safetensors"
        old.rename(sharded_dir / new)
        index = sharded_dir / INDEX
        index.write_text(index.read_text().replace(old.name, new))
    params = open_verifier(sharded_dir).load()
    assert all(np.array_equal(params[path], expected[path]) for path in expected)


def test_a_tensor_in_two_shards_comes_from_the_one_indexed(sharded_dir, edit):
    name = "model.language_model.norm.weight"
    home = json.loads((sharded_dir / INDEX).read_text())["weight_map"][name]
    expected = load_file(sharded_dir / home)[name]
    for file in sharded_dir.glob("*-of-00003.safetensors"):
        if file.name != home:
            edit(file, lambda tensors: tensors.update({name: np.zeros_like(expected)}))
    assert np.array_equal(open_verifier(sharded_dir).load()["norm.weight"], expected)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname"])
def test_an_index_cannot_point_outside(sharded_dir, edit, name):
    edit(sharded_dir / INDEX, lambda index: index["weight_map"].update({HEAD: name}))
    with pytest.raises(CheckpointError, match="is not a file name"):
        read_directory(sharded_dir)


HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}']
)
def test_a_damaged_index(sharded_dir, text):
    (sharded_dir / INDEX).write_text(text)
    with pytest.raises(CheckpointError):
        read_directory(sharded_dir)


def test_without_an_index_there_must_be_one_file(verifier_dir):
    save_file({"a": np.zeros(1, np.float32)}, verifier_dir / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors, other\.safetensors"):
        read_directory(verifier_dir)
    for file in verifier_dir.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file and no index"):
        read_directory(verifier_dir)
