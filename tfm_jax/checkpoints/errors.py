"""The error of this package, with every problem of a checkpoint in one message."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(ValueError):
    """Files that are not the checkpoint they should be, or that do not belong together."""


def refuse(where: object, problems: Sequence[str]) -> None:
    """Raises one CheckpointError that lists all `problems`; returns if there are none."""
    if problems:
        count = f"{len(problems)} problems: " if len(problems) > 1 else ""
        raise CheckpointError(f"{where}: {count}{'; '.join(problems)}")
