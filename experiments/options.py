"""What the experiments check of their options before they compute."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def refusing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turns what a check raises into the parser's one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        parser.error(str(error))


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raises ValueError if one of these numbers is below 1."""
    for name in names:
        value = getattr(options, name)
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_place(path: Path) -> None:
    """Makes the folder of a result, which is lost if it cannot be written in the end.

    Raises:
      OSError: `path` is a folder, or its own folder cannot be made or written to.
    """
    if path.is_dir():
        raise IsADirectoryError(f"the result is a file, {path} is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path.parent} cannot be written to")
