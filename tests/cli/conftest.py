"""A tiny random trio on disk, with the real tokenizer, and the command run in this process."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

import tfm_jax
from tests.conftest import DRAFTER, VERIFIER, WEAVER
from tfm_jax.checkpoints import parameter_shapes, write_hf
from tfm_jax.cli import main

TOKENIZER = Path(tfm_jax.__file__).parent / "assets" / "pocket" / "verifier" / "tokenizer.json"
SMALL = ["--budget", "4", "--expand", "2", "--children", "2", "--pool", "8"]


class Result(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


@pytest.fixture(scope="package", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Programs of these tests run for milliseconds: optimising them takes longer than it saves."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[None]:
    """The command sets variables of the process; the next test must not see them."""
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "caches")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`run("info", "--json")` runs a command in this process."""

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        try:
            status = main(list(arguments))
        except SystemExit as stop:  # the parser ends so
            status = int(stop.code or 0)
        return Result(status, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def trio_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trio that drafts three tokens deep, in float32; no test may change it."""
    root = tmp_path_factory.mktemp("trio")
    layers = ("linear_attention", "full_attention")
    verifier = dataclasses.replace(VERIFIER, vocab_size=8192, layer_types=layers)
    drafter = dataclasses.replace(
        DRAFTER,
        vocab_size=8192,
        layer_types=("sliding_attention",),
        target_layer_ids=(0, 1),
        num_target_layers=2,
        mask_token_id=3,
        block_size=4,
    )
    weaver = dataclasses.replace(WEAVER, depth=3)
    rng = np.random.default_rng(0)
    for name, config in (("verifier", verifier), ("dflash", drafter), ("weaver", weaver)):
        shapes = parameter_shapes(config).items()
        params = {path: rng.normal(0, 0.2, shape).astype(np.float32) for path, shape in shapes}
        write_hf(root / name, config, params)
    shutil.copyfile(TOKENIZER, root / "verifier" / "tokenizer.json")
    return root


@pytest.fixture
def damaged(trio_dir: Path, tmp_path: Path) -> Path:
    """A copy of the trio that a test may change."""
    return Path(shutil.copytree(trio_dir, tmp_path / "damaged"))
