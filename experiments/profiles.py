"""What a profile of the device says: how much of the time it works, and on what."""

import dataclasses
import pathlib

import jax

Event = tuple[float, float, str]  # start and end in nanoseconds, name


def kernels(folder: str | pathlib.Path) -> list[Event]:
    """Every kernel and copy of a trace, in order of start.

    Raises:
      ValueError: there is none.
    """
    found = []
    for path in pathlib.Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    found += [(e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events]
    if not found:
        raise ValueError(f"{folder} holds no device events")
    return sorted(found)


def busy(events: list[Event]) -> tuple[float, int]:
    """Nanoseconds in which any kernel or copy runs, and how many there are."""
    length = max(end for _, end, _ in events) - events[0][0]
    return length - sum(_gaps(events)), len(events)


def _gaps(events: list[Event]) -> list[float]:
    """Nanoseconds between what ends last so far and each event."""
    gaps, reached = [], events[0][0]
    for start, end, _ in events:
        gaps.append(max(0.0, start - reached))
        reached = max(reached, end)
    return gaps


@dataclasses.dataclass(kw_only=True)
class Kind:
    """All kernels of one name: microseconds that they run, that the device idles before them."""

    name: str
    us: float = 0.0
    idle_us: float = 0.0
    count: int = 0


def by_name(events: list[Event]) -> list[Kind]:
    """Every kind of kernel, the longest first."""
    found: dict[str, Kind] = {}
    for (start, end, name), gap in zip(events, _gaps(events), strict=True):
        kind = found.setdefault(name, Kind(name=name))
        kind.us += (end - start) / 1e3
        kind.idle_us += gap / 1e3
        kind.count += 1
    return sorted(found.values(), key=lambda kind: -kind.us)
