"""Checkpoints on disk that tests may damage, made from the published-layout fixtures."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tfm_jax.checkpoints.safetensors_io import read_file

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def fixtures() -> Path:
    return FIXTURES


@pytest.fixture
def verifier_dir(tmp_path: Path) -> Path:
    """A writable flat float32 verifier."""
    return _copy(FIXTURES / "qwen36_tiny" / "text_f32", tmp_path / "src" / "verifier")


@pytest.fixture
def sharded_dir(tmp_path: Path) -> Path:
    """A writable nested bfloat16 verifier in three shards."""
    return _copy(FIXTURES / "qwen36_tiny" / "hub_bf16_sharded", tmp_path / "src" / "sharded")


@pytest.fixture
def drafter_dir(tmp_path: Path) -> Path:
    """A writable drafter that fits the verifier: 8 target layers instead of 12."""
    target = tmp_path / "src" / "dflash"
    target.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / "dflash_tiny" / name, target / name)

    def fit(config: dict) -> None:
        config["num_target_layers"] = 8
        config["dflash_config"]["target_layer_ids"] = [1, 3, 6]

    edit_json(target / "config.json", fit)
    return target


@pytest.fixture
def trio_dir(verifier_dir: Path, drafter_dir: Path) -> Path:
    """A writable trio."""
    root = verifier_dir.parent
    (root / "weaver").mkdir()
    weaver = FIXTURES / "weaver_tiny" / "rope_swiglu"
    shutil.copyfile(weaver / "weaver.safetensors", root / "weaver" / "model.safetensors")
    shutil.copyfile(weaver / "config.json", root / "weaver" / "config.json")
    return root


@pytest.fixture
def edit():
    """`edit(path, change)` changes a JSON file or the tensors of a safetensors file in place."""

    def apply(path: Path, change) -> None:
        if path.suffix == ".json":
            edit_json(path, change)
        else:
            # The library's own NumPy reader does not know 8-bit floats.
            tensors = {name: array.copy() for name, array in read_file(path).items()}
            change(tensors)
            save_file(tensors, path)

    return apply


def edit_json(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def _copy(source: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
    return target
