"""What commands print: one JSON object, or tables and lines."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.status import Status
from rich.table import Table


class Console(RichConsole):
    """A console that leaves a closed pipe to `main`."""

    def on_broken_pipe(self) -> NoReturn:
        raise  # the BrokenPipeError that rich is handling


def print_json(value: dict[str, Any]) -> None:
    """Prints one object, in ASCII, so that any terminal and any encoding can carry it."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def show(*parts: RenderableType) -> None:
    """Prints parts on standard output: tables fit the terminal, all other lines stay whole."""
    console = Console(highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=not isinstance(part, Table))


def progress(message: str) -> Status:
    """A spinner on standard error for as long as the block runs; nothing if it is no terminal."""
    return RichConsole(stderr=True).status(message)
