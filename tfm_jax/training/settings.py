"""Settings of the stages of training: from a file as `configs/pocket.json`, or built in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfm_jax.config import ConfigError

# A run of minutes for small models, also on a CPU. There a verifier writes slowly, and a Weaver
# learns more from new text than from the same again: most rows are text as it is.
SHORT: Mapping[str, Mapping[str, Any]] = {
    "verifier": {
        "rows": 8,
        "length": 256,
        "log_every": 10,
        "optimiser": {"steps": 200, "matrix_rate": 0.02, "other_rate": 0.003},
    },
    "continuations": {
        "rows": 64,
        "total": 96,
        "prompt": 24,
        "shortest": 8,
        "batches": 1,
        "greedy_share": 0.5,
        "given": 2048,
    },
    "dflash": {
        "log_every": 10,
        "recipe": {"rows": 8, "anchors": 16},
        "optimiser": {"steps": 200, "matrix_rate": 0.02, "other_rate": 0.003},
    },
    "weaver": {
        "log_every": 10,
        "recipe": {"rows": 8, "anchors": 12},
        "optimiser": {"steps": 150, "matrix_rate": 0.01, "other_rate": 0.002},
    },
}
_OPTIONAL = {"continuations": {"given", "most_copied"}}  # and "seconds", of every stage


def read_settings(path: Path) -> dict[str, Any]:
    """A configuration file: sizes of networks, and `stages`, each part optional.

    Raises:
      ConfigError: no JSON object, or a stage or an entry of a stage that is not known.
      OSError: the file cannot be read.
    """
    try:
        settings = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    stages = settings.get("stages", {}) if isinstance(settings, dict) else None
    if not isinstance(stages, dict) or not all(isinstance(s, dict) for s in stages.values()):
        raise ConfigError(f"{path}: expected an object whose `stages` are objects")
    problems = [f"no stage is called {name}" for name in stages if name not in SHORT]
    for stage in (name for name in stages if name in SHORT):
        given, known = set(stages[stage]), set(SHORT[stage])
        optional = {"seconds"} | _OPTIONAL.get(stage, set())
        problems += [f"unknown {stage}.{name}" for name in sorted(given - known - optional)]
        problems += [f"{stage}.{name} is missing" for name in sorted(known - given - optional)]
    if problems:
        raise ConfigError(f"{path}: {', '.join(problems)}")
    return settings


def check_seconds(name: str, value: float) -> None:
    """Raises ValueError if a length of time is not finite and positive."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and positive, got {value}")


def stage_settings(settings: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Entries of one stage; those of a short run if the file has none of it."""
    return dict(settings.get("stages", {}).get(stage, SHORT[stage]))
