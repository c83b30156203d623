"""`tfm train`: one network against frozen ones, or drafter and Weaver together."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from tfm_jax.cli.output import print_json, show

_LENGTH = "expected accepted length, T = "
_LABELS = {
    "length_greedy": f"{_LENGTH}0",
    "length_greedy_marginals": f"{_LENGTH}0, marginals",
    "length_sampled": f"{_LENGTH}1",
    "length_sampled_marginals": f"{_LENGTH}1, marginals",
    "loss_drafter": "loss of the drafter",
    "loss_weaver": "loss of the Weaver",
    "kl": "KL from the verifier",
    "pool_mass": "verifier's mass in the pools",
    "pool_recall": "tokens in the pools",
}
_UNSHOWN = ("idle_rows",)
_OPTIONS = {"dflash": "drafter"}  # of `tfm convert`


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every network has in common.

    Attributes:
      out: Folder to write: checkpoints, log, the network itself.
      config: JSON file of sizes and stages, as configs/pocket.json. [default: the model's own
        sizes and a short run]
      corpus: Folder made by `tfm data corpus`.
      text: Folders of your own text files. [default: parts of Python's library]
      steps: Optimiser steps, in place of the configuration's.
      seconds: Time for training; the number of steps is fitted to it.
      seed: Equal seeds give equal runs.
      dtype: Type to compute in; parameters are float32. [default: float32 on a CPU, else bfloat16]
      resume: Go on from the newest checkpoint in --out.
      save_every: Seconds between checkpoints.
      devices: Split the rows of each step among so many devices.
      tensorboard: Folder for TensorBoard, too; each network has a folder of its own there.
      plot: Draw training.svg from the log.
      json: Print one JSON object and nothing else.
    """

    out: Path
    config: Path | None = None
    corpus: Path | None = None
    text: tuple[Path, ...] = ()
    steps: int | None = None
    seconds: float | None = None
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] | None = None
    resume: bool = False
    save_every: float = 60.0
    devices: int = 1
    tensorboard: Path | None = None
    plot: bool = False
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierOptions(RunOptions):
    """Train a small verifier from scratch on text.

    Attributes:
      model: "pocket", or a directory made by `tfm convert`, whose tokenizer the verifier takes.
        Only without a --corpus that has its own. [default: pocket]
    """

    model: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterOptions(RunOptions):
    """Train a DFlash drafter for the model's verifier.

    Attributes:
      model: "pocket", or a directory made by `tfm convert`: what is frozen.
      texts: Continuations made by `tfm data continuations`. [default: written first]
    """

    model: str = "pocket"
    texts: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeaverOptions(DrafterOptions):
    """Train a Weaver for the model's verifier and drafter.

    Attributes:
      warm_start: A published Weaver to start from, .pth or .safetensors.
    """

    warm_start: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairOptions(DrafterOptions):
    """Train the model's drafter and Weaver further, together: trees accept more.

    The Weaver's loss reaches the drafter's states, which then tell it more; the drafter's marginals
    follow its own loss alone.
    """


def train(
    network: Annotated[VerifierOptions, tyro.conf.subcommand("verifier")]
    | Annotated[DrafterOptions, tyro.conf.subcommand("dflash")]
    | Annotated[WeaverOptions, tyro.conf.subcommand("weaver")]
    | Annotated[PairOptions, tyro.conf.subcommand("pair")],
) -> None:
    """Train a network, or a pair; a run that was stopped goes on with --resume.

    Without --config and text: a short run for small models, some minutes on a CPU.
    """
    from tfm_jax.training.run import Job, Network, train_network

    kinds: dict[type[RunOptions], Network] = {
        VerifierOptions: "verifier",
        DrafterOptions: "dflash",
        WeaverOptions: "weaver",
        PairOptions: "pair",
    }
    options: dict[str, Any] = {
        field.name: getattr(network, field.name)
        for field in dataclasses.fields(network)
        if field.name != "json"
    }
    # What is printed on the way must not stand beside the object.
    target = contextlib.redirect_stdout(sys.stderr) if network.json else contextlib.nullcontext()
    try:
        with target:
            summary = train_network(kinds[type(network)], Job(**options))
    except ImportError as error:
        raise ValueError(str(error)) from None
    if network.json:
        print_json(summary)
        return
    measured = _table(summary) if summary["after"] else "nothing was held back to measure on"
    show(measured, *_closing(summary, network))


def _table(summary: dict[str, Any]) -> Table:
    """Metrics before and after; those of each depth are in the summary file."""
    table = Table("held-back texts" if summary["heldout"] else "texts trained on")
    columns = [when for when in ("before", "after") if when in summary]
    for when in columns:
        table.add_column(when, justify="right")
    for name, value in summary["after"].items():
        if isinstance(value, float) and name not in _UNSHOWN:
            values = (summary[when].get(name, value) for when in columns)
            table.add_row(_LABELS.get(name, name), *(f"{value:.3f}" for value in values))
    return table


def _closing(summary: dict[str, Any], options: RunOptions) -> list[str]:
    from tfm_jax.training.run import written

    done = f"{summary['steps']} steps, {summary['skipped_steps']} skipped, {summary['seconds']} s"
    made = {name: options.out / name for name in written(summary["network"])}
    lines = [f"{done}; written {' and '.join(map(str, made.values()))}"]
    if isinstance(options, DrafterOptions):
        from tfm_jax.model import directory

        parts = (f"--{_OPTIONS.get(name, name)} {folder}" for name, folder in made.items())
        model = directory(options.model)
        what = "it" if len(made) == 1 else "them"
        lines.append(f"to use {what}: tfm convert {model} NEW {' '.join(parts)}; --model NEW")
    return lines
