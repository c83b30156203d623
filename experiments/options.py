"""What the experiments check of their options before they compute."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def refusing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turns what a check raises into the parser's one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        parser.error(str(error))


def check_positive(**numbers: int) -> None:
    """Raises ValueError if one of these numbers is below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
