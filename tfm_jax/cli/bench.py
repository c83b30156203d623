"""`tfm bench`: the repository's timing scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def bench(
    what: Annotated[Literal["kernels"], tyro.conf.arg(metavar="{kernels}")],
    /,
    *,
    sweep: bool = False,
    nodes: tuple[int, ...] = (16, 32, 64, 128),
    out: Path = EXPERIMENTS / "results",
) -> int:
    """Time the kernels on this GPU; without one, check them interpreted. Needs a checkout.

    Args:
      what: What to time.
      sweep: Time many kernel configurations instead of the default one.
      nodes: Sizes of the trees.
      out: Folder of the report.
    """
    script = EXPERIMENTS / f"{what}.py"
    if not script.is_file():
        raise FileNotFoundError(f"{script}: timing scripts come with the repository alone")
    options = ["--nodes", *map(str, nodes), "--out", str(out), *["--sweep"] * sweep]
    # On its own, as it ends its process to be rid of configurations that still compile.
    return subprocess.run([sys.executable, str(script), *options], check=False).returncode
