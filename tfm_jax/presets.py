"""Geometries of known trios by name, and models of those shapes with random weights.

Weights of a checkpoint always come with their own configuration; a preset serves where there is
no checkpoint: to measure time and memory, which do not depend on values, and to train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfm_jax.checkpoints.errors import CheckpointError
from tfm_jax.checkpoints.pairing import check_pair
from tfm_jax.config import (
    ConfigError,
    DrafterConfig,
    VerifierConfig,
    WeaverConfig,
    as_object,
    made,
)
from tfm_jax.files import read_json

# In a checkout, and in an installed package.
_FOLDERS = (Path(__file__).parents[1] / "configs", Path(__file__).parent / "configs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of a verifier and the drafter and Weaver that go with it."""

    verifier: VerifierConfig
    drafter: DrafterConfig
    weaver: WeaverConfig


def preset_names() -> tuple[str, ...]:
    """Names that `geometry` knows."""
    return tuple(sorted(path.stem for path in _folder().glob("*.json")))


def preset_file(name: str) -> Path:
    """Where the file of a preset lies, or would lie: in a checkout, or in an installed package."""
    return _folder() / f"{name}.json"


def geometry(name: str | Path) -> Geometry:
    """The sizes of a preset, or of a JSON file with the parts `verifier`, `drafter`, `weaver`.

    Raises:
      ConfigError: an unknown name, a file without those parts, or sizes that do not fit.
    """
    path = Path(name) if str(name).endswith(".json") else preset_file(str(name))
    if not path.is_file():
        raise ConfigError(
            f"{name}: no such preset or file; presets are {', '.join(preset_names())}"
        )
    return parse_geometry(read_json(path), str(path))


def parse_geometry(settings: Mapping[str, Any], source: str) -> Geometry:
    """The sizes in `settings`, which was read from `source`."""
    parts = {"verifier": VerifierConfig, "drafter": DrafterConfig, "weaver": WeaverConfig}
    as_object(settings, source)
    missing = [part for part in parts if part not in settings]
    if missing:
        raise ConfigError(f"{source} has no {' and no '.join(missing)}")
    found = Geometry(
        **{part: made(kind, settings[part], f"{source}: {part}") for part, kind in parts.items()}
    )
    try:
        check_pair(found.verifier, found.drafter, found.weaver)
    except CheckpointError as error:
        raise ConfigError(f"{source}: {error}") from None
    return found


def _folder() -> Path:
    return next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[-1])
