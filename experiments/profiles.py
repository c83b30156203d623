"""What a profile of the device says: how much of the time it works, and on what."""

import dataclasses
import pathlib

import jax


def kernels(folder: str | pathlib.Path) -> list[tuple[float, float, str]]:
    """Every kernel and copy of a trace: (start, end, name), in nanoseconds, in order of start."""
    found = []
    for path in pathlib.Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    found += [(e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events]
    return sorted(found)


def busy(folder: str | pathlib.Path) -> tuple[float, int]:
    """Nanoseconds in which any kernel or copy runs, and how many there are."""
    events, gaps = _gaps(folder)
    return _length(events) - sum(gaps), len(events)


def _gaps(folder: str | pathlib.Path) -> tuple[list[tuple[float, float, str]], list[float]]:
    """All events, and the nanoseconds between one that ends last so far and the next."""
    events = kernels(folder)
    if not events:
        raise ValueError(f"{folder} holds no device events")
    gaps, reached = [], events[0][0]
    for start, end, _ in events:
        gaps.append(max(0.0, start - reached))
        reached = max(reached, end)
    return events, gaps


def _length(events: list[tuple[float, float, str]]) -> float:
    return max(end for _, end, _ in events) - events[0][0]


@dataclasses.dataclass(kw_only=True)
class Kind:
    """All kernels of one name: microseconds that they run, that the device idles before them."""

    name: str
    us: float = 0.0
    idle_us: float = 0.0
    count: int = 0


def by_name(folder: str | pathlib.Path) -> list[Kind]:
    """Every kind of kernel, the longest first."""
    found: dict[str, Kind] = {}
    for (start, end, name), gap in zip(*_gaps(folder), strict=True):
        kind = found.setdefault(name, Kind(name=name))
        kind.us += (end - start) / 1e3
        kind.idle_us += gap / 1e3
        kind.count += 1
    return sorted(found.values(), key=lambda kind: -kind.us)
