"""Logs are read back, drawn, and handed to TensorBoard."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from tfm_jax.training.plots import plot_training
from tfm_jax.training.report import read_log
from tfm_jax.training.tensorboard import TensorBoard, require_tensorboard

RECORDS = [
    {"title": "verifier", "step": 2, "loss": 3.0, "gradient_norm": 1.0},
    {"title": "dflash", "step": 2, "loss": 2.0, "accuracy": [0.5, 0.25], "length_greedy": 1.5},
    *(
        {
            "title": "weaver",
            "step": step,
            "loss": 1.0 / step,
            "tv": [0.5, 0.75],
            "tv_marginals": [0.75, 1.0],
            "length_greedy": 2.0 + step,
            "length_greedy_marginals": 2.0,
            "pool_recall": 0.9,
        }
        for step in (2, 4)
    ),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "training.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return file


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_a_row_of_panels_for_each_network(log: Path, name: str) -> None:
    out = log.with_name(name)
    plot_training(log, out)
    assert out.stat().st_size > 5000
    if name == "a.svg":
        text = out.read_text()
        for title in ("verifier: loss", "dflash: loss", "weaver: loss", "by depth, step 4"):
            assert f"<!-- {title} -->" in text


def test_a_line_that_was_cut_off_is_left_out_and_another_refused(log: Path) -> None:
    with log.open("a") as lines:
        lines.write('{"title": "weav')
    assert read_log(log) == RECORDS
    log.write_text("no JSON\n")
    with pytest.raises(ValueError, match="is not a log of training"):
        plot_training(log, log.with_name("a.svg"))
    log.write_text("")
    with pytest.raises(ValueError, match="no record of training"):
        plot_training(log, log.with_name("a.svg"))


def test_a_figure_is_drawn_whole_or_not_at_all(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"figure has no suffix such as \.svg"):
        plot_training(log, log.with_name("figure"))
    old = log.with_name("a.svg")
    old.write_text("of before")

    def stop(figure: Figure, file: Path, **_: object) -> None:
        file.write_text("half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", stop)
    with pytest.raises(KeyboardInterrupt):
        plot_training(log, old)
    assert old.read_text() == "of before"
    assert sorted(path.name for path in log.parent.iterdir()) == ["a.svg", log.name]


def test_an_extra_installs_what_tensorboard_files_need(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    assert [name.split(">=")[0] for name in extras["tensorboard"]] == ["tensorboardX"]
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ImportError, match=r"need tensorboardX: pip install 'tfm-jax\[tensorboard\]'"
    ):
        require_tensorboard()


def test_records_go_to_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    added = []

    class SummaryWriter:
        def __init__(self, folder: str, *, purge_step: int | None) -> None:
            added.append((folder, purge_step))

        def add_scalar(self, *scalar: object) -> None:
            added.append(scalar)

        def close(self) -> None:
            added.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
    with TensorBoard(tmp_path, 3):
        pass
    assert added == []  # nothing is hidden before there is something in its place
    with TensorBoard(tmp_path, 3) as board:
        board.add({"title": "weaver", "step": 4, "steps": 9, "loss": 0.5, "tv": [0.5, 0.75]})
    assert added == [
        (str(tmp_path), 3),
        ("weaver/loss", 0.5, 4),
        ("weaver/tv/1", 0.5, 4),
        ("weaver/tv/2", 0.75, 4),
        "closed",
    ]
