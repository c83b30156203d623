"""Settings of the stages of training: from a file as `configs/pocket.json`, or built in."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tfm_jax.config import ConfigError, as_int
from tfm_jax.files import read_json

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
    "pair": {
        "log_every": 10,
        "recipe": {"rows": 8, "drafter": {"anchors": 16}, "weaver": {"anchors": 12}},
        # A trained pair loses more at high rates than a short run gives back.
        "optimiser": {"steps": 60, "matrix_rate": 0.001, "other_rate": 0.0002, "decay": 0.8},
    },
}
# And "seconds", of every stage.
_OPTIONAL = {"verifier": {"mixture"}, "continuations": {"given", "most_copied"}}
_SIZES = ("verifier", "drafter", "weaver")


def read_settings(path: Path) -> dict[str, Any]:
    """A configuration file: sizes of networks, and `stages`, each part optional.

    Raises:
      ConfigError: no JSON object, an entry that is not known, or one of the wrong kind or out of
        range.
      OSError: the file cannot be read.
    """
    settings = read_json(path)
    stages = settings.get("stages", {}) if isinstance(settings, dict) else None
    if not isinstance(stages, dict) or not all(isinstance(s, dict) for s in stages.values()):
        raise ConfigError(f"{path}: expected an object whose `stages` are objects")
    problems = [
        f"{name} must be an object, got {settings[name]!r}"
        for name in _SIZES
        if not isinstance(settings.get(name, {}), dict)
    ]
    problems += [f"no stage is called {name}" for name in stages if name not in SHORT]
    for stage in (name for name in stages if name in SHORT):
        given, known = set(stages[stage]), set(SHORT[stage])
        optional = {"seconds"} | _OPTIONAL.get(stage, set())
        problems += [f"unknown {stage}.{name}" for name in sorted(given - known - optional)]
        problems += [f"{stage}.{name} is missing" for name in sorted(known - given - optional)]
        problems += _misfits(stage, stages[stage])
    if problems:
        raise ConfigError(f"{path}: {', '.join(problems)}")
    return settings


def check_seconds(name: str, value: float) -> None:
    """Raises ValueError if a length of time is not finite and positive."""
    if not (_is_number(value) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and positive, got {value!r}")


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raises ValueError if a number of things is no integer of at least `least`."""
    count = as_int(value)
    if count is None:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if count < least:
        bound = "positive" if least == 1 else f"at least {least}"
        raise ValueError(f"{name} must be {bound}, got {count}")


def check_number(name: str, value: float) -> None:
    """Raises ValueError if a rate or a weight is not finite and at least 0."""
    if not (_is_number(value) and 0 <= value < math.inf):
        raise ValueError(f"{name} must be finite and at least 0, got {value!r}")


def check_share(name: str, value: float) -> None:
    """Raises ValueError if a share does not lie in 0..1."""
    if not (_is_number(value) and 0 <= value <= 1):
        raise ValueError(f"{name} must lie in 0..1, got {value!r}")


def check_mixture(name: str, value: Mapping[str, float]) -> None:
    """Raises ValueError if shares of domains are no object of weights, not all of them 0."""
    _check_object(name, value)
    for domain, weight in value.items():
        check_number(f"{name}.{domain}", weight)
    if not any(value.values()):
        raise ValueError(f"{name} must have a weight above 0, got {value!r}")


def check_lengths(options: Mapping[str, Any], depth: int, where: str) -> None:
    """Refuses sizes of continuations that leave no room for what is learned along them.

    Args:
      options: of the stage "continuations".
      depth: tokens after an anchor.
      where: what messages call the stage's settings.

    Raises:
      ConfigError: `prompt` or `shortest` is out of range, or texts are too short.
    """
    total, prompt, shortest = (options[name] for name in ("total", "prompt", "shortest"))
    if not 2 <= prompt <= total:
        raise ConfigError(f"{where}: prompt must lie in 2..total, got {prompt} of {total}")
    if shortest > prompt:
        raise ConfigError(f"{where}: shortest must be at most prompt, got {shortest} of {prompt}")
    if options.get("given") and shortest < 2:
        raise ConfigError(f"{where}: given texts need a shortest of at least 2, got {shortest}")
    if max(shortest, 2) - 1 + depth >= total:
        raise ConfigError(
            f"{where} of {total} tokens have no room for a prompt of {shortest} and {depth} "
            "tokens after it"
        )


def refuse_given(options: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError if a stage "continuations" adds windows where nothing takes them."""
    if options.get("given"):
        raise ConfigError(
            f"{where}: continuations.given is for `tfm train` alone, got {options['given']}: "
            "continuations.given adds windows of the corpus to what that trains on"
        )


def check_seed(seed: int) -> None:
    """Raises ValueError if a seed is no unsigned integer of 32 bits."""
    value = as_int(seed)
    if value is None or not 0 <= value < 2**32:
        raise ValueError(f"seed must lie in 0..{2**32 - 1}, got {seed!r}")


def _misfits(stage: str, entries: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the values of a stage's known entries."""
    known = {"seconds", *SHORT[stage], *_OPTIONAL.get(stage, ())}
    for name in sorted(known & entries.keys()):
        try:
            _CHECKS.get(name, check_count)(f"{stage}.{name}", entries[name])
        except ValueError as error:
            yield str(error)


def stage_settings(settings: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Entries of one stage; those of a short run if the file has none of it."""
    return dict(settings.get("stages", {}).get(stage, SHORT[stage]))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_time(name: str, value: float | None) -> None:
    if value is not None:
        check_seconds(name, value)


def _check_object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {value!r}")


# All other entries of stages are numbers of things.
_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "seconds": _check_time,
    "greedy_share": check_share,
    "most_copied": check_share,
    "given": functools.partial(check_count, least=0),
    "mixture": check_mixture,
    "recipe": _check_object,
    "optimiser": _check_object,
}
