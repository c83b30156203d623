"""`tfm convert`: published weights into one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro


def convert(
    src: Annotated[Path, tyro.conf.arg(metavar="SRC")],
    dst: Annotated[Path, tyro.conf.arg(metavar="DST")],
    /,
    drafter: Path | None = None,
    weaver: Path | None = None,
    dtype: Literal["bfloat16", "float32"] | None = None,
    strict: bool = True,
    overwrite: bool = False,
) -> None:
    """Convert published safetensors into one directory that the other commands read.

    Args:
      src: A verifier in the Hugging Face layout, or a directory with verifier/, dflash/, weaver/.
      dst: Directory to make.
      drafter: Directory of the DFlash drafter, if not in SRC.
      weaver: Directory, .pth or .safetensors file of the Weaver, if not in SRC.
      dtype: Store weights in this type. A_log, dt_bias and the gated norm are never narrowed.
      strict: Refuse tensors that no network has a place for.
      overwrite: Replace DST if it was made by a conversion.
    """
    from tfm_jax.checkpoints.command import convert_command

    convert_command(
        src,
        dst,
        drafter=drafter,
        weaver=weaver,
        dtype=dtype,
        strict=strict,
        overwrite=overwrite,
    )
