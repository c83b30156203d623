"""Files: read as JSON, checked before they are made, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfm_jax.config import ConfigError


def read_json(path: Path) -> Any:
    """What a configuration file holds.

    Raises:
      ConfigError: it is not JSON.
      OSError: it cannot be read.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def check_new_file(path: Path) -> None:
    """Raises OSError if no file can be written there: a result is lost that ends nowhere."""
    if path.is_dir():
        raise IsADirectoryError(f"the result is a file, {path} is a folder: name a file to write")
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise NotADirectoryError(f"cannot write {path}: {place} is no folder that takes files")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`, that takes its place once the body is through."""
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
