"""Draws the figures of the measured results: python -m experiments.figures

Reads the JSON files in `experiments/results/`, writes SVG files beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "pallas": "Pallas",
    "xla": "XLA",
    "per_branch": "per-branch recurrence",
    "dense": "XLA, whole capacity",
}


def kernel_figure(result: dict[str, Any]) -> Figure:
    """Time of one layer's tree verification against the size of the tree."""
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    rows = result["ops"]["gdn_tree"]
    for kind in ("pallas", "xla", "per_branch"):
        points = [(r["nodes"], r[f"{kind}_us"]) for r in rows if f"{kind}_us" in r]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=NAMES[kind])
    floors = [(r["nodes"], r["floor_us"]) for r in rows if "floor_us" in r]
    axes.plot(*zip(*floors, strict=True), color="grey", linestyle=":", label="floor")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tree nodes",
        ylabel="microseconds a layer",
        title=f"GDN tree verification, Qwen3.6-27B shapes, {result['device']}",
    )
    ticks = [r["nodes"] for r in rows if r["nodes"] & (r["nodes"] - 1) == 0]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def step_figure(result: dict[str, Any]) -> Figure | None:
    """Phases of a round, stacked, for every method and budget; None if no phase was timed."""
    rows = [row for row in result["rounds"] if row.get("phases_ms")]
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    names = [r["method"] + (f"\nB={r['budget']}" if r["budget"] else "") for r in rows]
    bottom = [0.0] * len(rows)
    for part in ("draft", "grow", "verify", "accept+commit"):
        height = [row["phases_ms"].get(part, 0.0) for row in rows]
        axes.bar(names, height, bottom=bottom, label=part, width=0.7)
        bottom = [a + b for a, b in zip(bottom, height, strict=True)]
    axes.plot(names, [r["round_ms"] for r in rows], "k_", markersize=18, label="whole round")
    if result.get("floor_ms"):
        axes.axhline(result["floor_ms"], color="grey", linestyle=":", label="weight floor")
    axes.set(
        ylabel="milliseconds a round",
        title=f"{result['preset']}, {result['device']}, context {rows[0]['context']}",
    )
    axes.legend(frameon=False, ncols=3, fontsize="small")
    axes.set_ylim(0, max(r["round_ms"] for r in rows) * 1.3)
    return figure


def ceiling_figure(result: dict[str, Any]) -> Figure | None:
    """Acceptance probability by depth at T = 1; None if it was not measured there."""
    rows = [r for r in result["rows"] if r["domain"] == "macro" and r["temperature"] == 1]
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    depths = [row["depth"] for row in rows]

    def values(name: str, of: str = "acceptance") -> list[Any]:
        return [row[of][name] for row in rows]

    for name, title, style in (
        ("marginal", "drafter's marginal", "C0-"),
        ("marginal_argmax", "argmax of the marginal", "C0--"),
        ("weaver", "Weaver", "C3-"),
        ("weaver_argmax", "argmax of Weaver", "C3--"),
    ):
        axes.plot(depths, values(name), style, label=title)
        low, high = zip(*values(name, "ci95"), strict=True)
        axes.fill_between(depths, low, high, color=style[:2], alpha=0.12, linewidth=0)
    for low, high, title, color in (
        ("oracle", "oracle_in_sample", "marginal oracle", "black"),
        ("best", "best_in_sample", "best independent draft", "grey"),
    ):
        axes.fill_between(depths, values(low), values(high), color=color, alpha=0.35, label=title)
    axes.set(
        xlabel="depth",
        ylabel="acceptance probability",
        title="One drafted token along the verifier's texts, T = 1",
        ylim=(0, 1),
        xticks=depths,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure


def ablation_figure(result: dict[str, Any]) -> Figure:
    """Accepted length of every setting as a share of the base's, with paired intervals."""
    rows = [row for row in result["rows"] if row["part"] != "base"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure, axes = plt.subplots(figsize=(6.4, 1.2 + 0.28 * len(names)), layout="constrained")
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    for i, temperature in enumerate(temperatures):
        found = [row for row in rows if row["temperature"] == temperature]
        places = [
            names.index(row["name"]) + 0.2 * (i - (len(temperatures) - 1) / 2) for row in found
        ]
        shares = [row["to_base"] for row in found]
        reach = [
            [row["to_base"] - row["to_base_ci95"][0] for row in found],
            [row["to_base_ci95"][1] - row["to_base"] for row in found],
        ]
        axes.errorbar(
            shares, places, xerr=reach, fmt="o", markersize=4, label=f"T = {temperature:g}"
        )
    axes.axvline(1.0, color="grey", linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="mean accepted length, share of the base's")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(frameon=False, fontsize="small")
    return figure


FIGURES: dict[str, Callable[[dict[str, Any]], Figure | None]] = {
    "kernels_nvidia*.json": kernel_figure,
    "step_nvidia*.json": step_figure,
    "ceiling.json": ceiling_figure,
    "ablation.json": ablation_figure,
}


def draw(results: Path = RESULTS) -> Iterator[Path]:
    """Draws every figure that has a result, times only of a GPU; yields the files."""
    for pattern, figure in FIGURES.items():
        for source in sorted(results.glob(pattern)):
            target = source.with_suffix(".svg")
            drawn = figure(json.loads(source.read_text("utf-8")))
            if drawn is None:
                continue
            drawn.savefig(target, metadata={"Date": None})
            plt.close(drawn)
            yield target


if __name__ == "__main__":
    for written in draw():
        print(written)
