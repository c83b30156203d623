"""What commands print: one JSON object, or tables and lines."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

from rich.console import Console as RichConsole
from rich.console import RenderableType


class Console(RichConsole):
    """A console that leaves a closed pipe to `main`."""

    def on_broken_pipe(self) -> NoReturn:
        raise  # the BrokenPipeError that rich is handling


def print_json(value: dict[str, Any]) -> None:
    """Prints one object, in ASCII, so that any terminal and any encoding can carry it."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def show(*parts: RenderableType) -> None:
    """Prints tables, trees and texts on standard output; strings are taken as they are."""
    Console(highlight=False, markup=False, emoji=False).print(*parts, soft_wrap=False)


def progress(message: str):
    """A spinner on standard error for as long as the block runs; nothing if it is no terminal."""
    return RichConsole(stderr=True).status(message)
