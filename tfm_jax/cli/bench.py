"""`tfm bench`: the repository's timing scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

ROOT = Path(__file__).parents[2]


def bench(
    what: Annotated[Literal["kernels", "step"], tyro.conf.arg(metavar="{kernels,step}")],
    /,
    *,
    ops: tuple[str, ...] | None = None,
    sweep: bool = False,
    compile_seconds: float | None = None,
    preset: str | None = None,
    methods: tuple[str, ...] | None = None,
    budgets: tuple[int, ...] | None = None,
    contexts: tuple[int, ...] | None = None,
    prefill: tuple[int, ...] | None = None,
    accepted: tuple[float, ...] | None = None,
    all_contexts: bool = False,
    no_phases: bool = False,
    no_profile: bool = False,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Time kernels, or whole decoding rounds, on this GPU. Needs a checkout.

    Without a GPU `kernels` checks results on tiny shapes, interpreted, and `step` runs on the
    pocket model: neither says anything about speed.

    Args:
      what: What to time.
      ops: Operations (kernels); all if not given.
      sweep: Time more kernel configurations (kernels).
      compile_seconds: Leave out what takes longer to compile (kernels).
      preset: Sizes of the model, see configs/ (step).
      methods: What to compare with plain decoding (step); all if not given.
      budgets: Drafted nodes (step).
      contexts: Lengths of the committed text (step).
      prefill: Lengths of prompts (step).
      accepted: Mean accepted lengths to state speed-ups for (step).
      all_contexts: Time every budget at all contexts (step).
      no_phases: Time whole rounds only (step).
      no_profile: Skip the device profile (step).
      out: Folder of the report; experiments/results if not given.
      json: Print the report instead of tables.
    """
    script = ROOT / "experiments" / f"{what}.py"
    if not script.is_file():
        raise FileNotFoundError(f"{script}: timing scripts come with the repository alone")
    mine = {
        "kernels": {"ops": ops, "sweep": sweep or None, "compile-seconds": compile_seconds},
        "step": {
            "preset": preset,
            "methods": methods,
            "budgets": budgets,
            "contexts": contexts,
            "prefill": prefill,
            "accepted": accepted,
            "all-contexts": all_contexts or None,
            "no-phases": no_phases or None,
            "no-profile": no_profile or None,
        },
    }
    for other, names in mine.items():
        foreign = [name for name, value in names.items() if value is not None and other != what]
        if foreign:
            raise ValueError(f"--{foreign[0]} belongs to `tfm bench {other}`, not to {what}")
    given = {**mine[what], "out": out, "json": json or None}
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{what}", *_flags(given)], cwd=ROOT, check=False
    ).returncode


def _flags(options: dict) -> list[str]:
    flags = []
    for name, value in options.items():
        if value is None:
            continue
        flags.append(f"--{name}")
        if isinstance(value, tuple):
            flags += map(str, value)
        elif isinstance(value, Path):
            flags.append(str(value.absolute()))
        elif value is not True:
            flags.append(str(value))
    return flags
