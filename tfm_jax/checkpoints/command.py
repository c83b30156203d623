"""The conversion as a command: arguments, progress, a summary, one line on an error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tfm_jax.checkpoints.convert import Report, convert


def convert_command(
    src: Annotated[Path, tyro.conf.arg(metavar="SRC")],
    dst: Annotated[Path, tyro.conf.arg(metavar="DST")],
    /,
    drafter: Path | None = None,
    weaver: Path | None = None,
    dtype: Literal["bfloat16", "float32"] | None = None,
    strict: bool = True,
    overwrite: bool = False,
) -> None:
    """Convert published safetensors into one directory that tfm_jax.load reads.

    Exits with status 2 and one line on standard error if anything does not fit.

    Args:
      src: A verifier in the Hugging Face layout, or a directory with verifier/, dflash/, weaver/.
      dst: Directory to make.
      drafter: Directory of the DFlash drafter, if not in SRC.
      weaver: Directory, .pth or .safetensors file of the Weaver, if not in SRC.
      dtype: Store weights in this type. A_log, dt_bias and the gated norm are never narrowed.
      strict: Refuse tensors that no network has a place for.
      overwrite: Replace DST if it was made by a conversion.
    """
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    try:
        with progress:
            task = progress.add_task("starting", total=None)
            report = convert(
                src,
                dst,
                drafter=drafter,
                weaver=weaver,
                dtype=dtype,
                strict=strict,
                overwrite=overwrite,
                on_stage=lambda stage: progress.update(task, description=stage),
            )
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join(summary(report, dst)))


def summary(report: Report, dst: Path) -> list[str]:
    """What was read, skipped and written, a line each."""
    lines = [
        f"read     {name}: {tensors} parameters, {files} file{'s' * (files > 1)}, {source}"
        for name, (source, files, tensors) in report.read.items()
    ]
    for pattern, count in report.skipped.items():
        lines.append(f"skipped  {count} tensors {_plain(pattern)}")
    lines += [f"unknown  {name}" for name in report.unknown]
    files = ", ".join(("config.json", *report.copied, "weights/"))
    return [*lines, f"written  {dst}: {files} ({report.size / 1e6:.1f} MB)"]


def _plain(pattern: str) -> str:
    return pattern.replace(".*", "*").replace("\\", "")
