"""How far a long run is, on stderr."""

import sys
import time


def log(line: str, since: float | None = None) -> None:
    """Prints a line, with the seconds since a moment of `time.monotonic` if one is given."""
    passed = "" if since is None else f", {time.monotonic() - since:.0f} s"
    print(f"{line}{passed}", file=sys.stderr, flush=True)
