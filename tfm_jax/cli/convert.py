"""`tfm convert`: published weights into one directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tfm_jax.cli.output import progress

if TYPE_CHECKING:
    from tfm_jax.checkpoints import Report


def convert(
    src: Annotated[Path, tyro.conf.arg(metavar="SRC")],
    dst: Annotated[Path, tyro.conf.arg(metavar="DST")],
    /,
    drafter: Path | None = None,
    weaver: Path | None = None,
    dtype: Literal["bfloat16", "float32"] | None = None,
    allow_unknown: bool = False,
    overwrite: bool = False,
) -> None:
    """Convert published weights into one directory that the other commands read.

    Args:
      src: A verifier in the Hugging Face layout, or a directory with verifier/, dflash/, weaver/.
      dst: Directory to make.
      drafter: Directory of the DFlash drafter, if not in SRC.
      weaver: Directory, .pth or .safetensors file of the Weaver, if not in SRC.
      dtype: Store weights in this type. A_log, dt_bias and the gated norm are never narrowed.
      allow_unknown: Go on, and list them, where tensors have no place in any network.
      overwrite: Replace DST if it holds what a conversion wrote, and nothing else.
    """
    from tfm_jax.checkpoints import convert as convert_checkpoints

    with progress(f"converting {src}"):
        report = convert_checkpoints(
            src,
            dst,
            drafter=drafter,
            weaver=weaver,
            dtype=dtype,
            strict=not allow_unknown,
            overwrite=overwrite,
        )
    print("\n".join(summary(report, dst)))


def summary(report: Report, dst: Path) -> list[str]:
    """What was read, skipped and written, a line each."""
    lines = [
        f"read     {name}: {tensors} parameters, {files} file{'s' * (files > 1)}, {source}"
        for name, (source, files, tensors) in report.read.items()
    ]
    for pattern, count in report.skipped.items():
        lines.append(f"skipped  {count} tensors {_plain(pattern)}")
    lines += [f"unknown  {name}, left out" for name in report.unknown]
    files = ", ".join(("config.json", *report.copied, "weights/"))
    return [*lines, f"written  {dst}: {files} ({report.size / 1e6:.1f} MB)"]


def _plain(pattern: str) -> str:
    return pattern.replace(".*", "*").replace("\\", "")
