"""Figures of a training log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_jax.files import whole_file
from tfm_jax.training.report import read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LENGTHS = {
    "length_greedy": "T = 0",
    "length_greedy_marginals": "T = 0, marginals",
    "length_sampled": "T = 1",
    "length_sampled_marginals": "T = 1, marginals",
}
_SHARES = ("pool_recall", "pool_mass")


def plot_training(log: str | Path, out: str | Path) -> None:
    """Draws the log of training, a row for each network; the suffix of `out` gives the format.

    Panels: loss; expected accepted length; the last record by depth (total variation of a Weaver,
    accuracy of a drafter); gradient norm and pool recall.

    Raises:
      ImportError: there is no matplotlib.
      ValueError: the log has no record, or the suffix names no format.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    out = Path(out)
    if not out.suffix:
        raise ValueError(f"{out} has no suffix such as .svg: it gives the format of the figure")
    records = [record for record in read_log(Path(log)) if "step" in record]
    if not records:
        raise ValueError(f"{log} has no record of training to draw")
    titles = list(dict.fromkeys(record["title"] for record in records))
    figure = Figure(figsize=(14, 3.2 * len(titles)), layout="constrained")
    grid = figure.subplots(len(titles), 4, squeeze=False)
    for row, title in zip(grid, titles, strict=True):
        _row(list(row), title, [record for record in records if record["title"] == title])
    with whole_file(out) as partial:
        figure.savefig(partial, format=out.suffix.removeprefix("."))


def require_matplotlib() -> None:
    """Raises ImportError, with what to install, if there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib") from None


def _row(axes: list[Axes], title: str, records: list[dict[str, Any]]) -> None:
    _lines(axes[0], records, {"loss": "loss"}, f"{title}: loss")
    _lines(axes[1], records, _LENGTHS, "expected accepted length of a chain")
    last = records[-1]
    depths = {name: last[name] for name in ("tv", "tv_marginals", "accuracy") if name in last}
    for name, values in depths.items():
        axes[2].plot(range(1, len(values) + 1), values, label=name.replace("_", ", "))
    axes[2].set(title=f"by depth, step {last['step']}", xlabel="depth", ylim=(0, 1))
    _legend(axes[2])
    shares = {name: name.replace("_", " ") for name in _SHARES}
    _lines(axes[3], records, {"gradient_norm": "gradient norm", **shares}, "gradient, pools")


def _lines(axes: Axes, records: list[dict[str, Any]], names: dict[str, str], title: str) -> None:
    for name, label in names.items():
        # A length of 0 says that the batch had no text of that temperature.
        shown = [record for record in records if record.get(name, 0) or name not in _LENGTHS]
        points = [(record["step"], record[name]) for record in shown if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set(title=title, xlabel="step")
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False, fontsize="small")
