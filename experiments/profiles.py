"""What a profile of the device says: how much of the time it works, and on what."""

import collections
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
    """The share of the time between first and last kernel in which any runs, and their count."""
    events, gaps = _gaps(folder)
    return 1 - sum(gaps) / _length(events), len(events)


def waiting(folder: str | pathlib.Path, least: float) -> float:
    """The share of that time in gaps of `least` nanoseconds or more: the device waits for a host.

    A profiler lengthens such gaps, so the share is an upper bound.
    """
    events, gaps = _gaps(folder)
    return sum(gap for gap in gaps if gap >= least) / _length(events)


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


def by_name(folder: str | pathlib.Path) -> list[tuple[str, float, int]]:
    """(name, microseconds, count) of every kind of kernel, longest first."""
    total: dict[str, float] = collections.defaultdict(float)
    count: collections.Counter[str] = collections.Counter()
    for start, end, name in kernels(folder):
        total[name] += (end - start) / 1e3
        count[name] += 1
    return sorted(((n, t, count[n]) for n, t in total.items()), key=lambda x: -x[1])
