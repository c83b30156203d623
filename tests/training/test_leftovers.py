"""What lies in a folder is told from what a run there has made."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tfm_jax.checkpoints import convert, module_params, write_hf
from tfm_jax.checkpoints.trio import open_trio
from tfm_jax.decoding.state import Trio
from tfm_jax.training.leftovers import check_results, claim, network_digest

RESULTS = ("weaver", "summary.json")


@pytest.mark.parametrize("name", [*RESULTS, "training.jsonl"])
def test_what_no_run_made_is_not_replaced(tmp_path: Path, name: str) -> None:
    check_results(tmp_path / "new", "weaver", RESULTS)
    (tmp_path / name).write_text("precious")
    for begun in ("nothing", "sources", "checkpoints", "other network"):
        if begun == "sources":
            claim(tmp_path, {"network": "weaver"}, {})
        if begun == "checkpoints":
            (tmp_path / "sources.json").unlink()
            (tmp_path / "checkpoints" / "7").mkdir(parents=True)
        if begun == "other network":
            claim(tmp_path, {"network": "dflash"}, {})
        with pytest.raises(ValueError, match=f"holds {name}, made by no training of a weaver"):
            check_results(tmp_path, "weaver", RESULTS)


def test_a_run_replaces_what_it_has_made(tmp_path: Path) -> None:
    claim(tmp_path, {"network": "weaver"}, {})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "training.jsonl").touch()
    check_results(tmp_path, "weaver", RESULTS)
    (tmp_path / "weaver").mkdir()
    # A network is written after a checkpoint of the last step.
    with pytest.raises(ValueError, match="holds weaver, made by no training"):
        check_results(tmp_path, "weaver", RESULTS)
    (tmp_path / "checkpoints" / "7").mkdir()
    check_results(tmp_path, "weaver", RESULTS)


def test_a_record_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for text in ("[]", "{"):
        (tmp_path / "sources.json").write_text(text)
        with pytest.raises(ValueError, match=r"sources\.json (must be an object|is not JSON)"):
            check_results(tmp_path, "weaver", RESULTS)


def test_a_digest_tells_weights_apart_in_every_layout(tiny_trio: Trio, tmp_path: Path) -> None:
    config = tiny_trio.verifier.config
    params = module_params(tiny_trio.verifier)
    changed = {**params, "norm.weight": params["norm.weight"] + np.float32(1)}
    digests = {}
    for name, values in (("one", params), ("two", changed)):
        write_hf(tmp_path / name, config, values)
        convert(tmp_path / name, tmp_path / f"{name} stored")
        shutil.copytree(tmp_path / f"{name} stored", tmp_path / f"{name} copied")
    for folder in ("one", "two", "one stored", "two stored", "one copied"):
        digests[folder] = network_digest(open_trio(tmp_path / folder).verifier)
    assert digests["one"] != digests["two"]
    assert digests["one stored"] != digests["two stored"]
    assert digests["one stored"] == digests["one copied"]
