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
    events = kernels(folder)
    if not events:
        raise ValueError(f"{folder} holds no device events")
    covered, reached = 0.0, events[0][0]
    for start, end, _ in events:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - events[0][0]), len(events)


def by_name(folder: str | pathlib.Path) -> list[tuple[str, float, int]]:
    """(name, microseconds, count) of every kind of kernel, longest first."""
    total: dict[str, float] = collections.defaultdict(float)
    count: collections.Counter[str] = collections.Counter()
    for start, end, name in kernels(folder):
        total[name] += (end - start) / 1e3
        count[name] += 1
    return sorted(((n, t, count[n]) for n, t in total.items()), key=lambda x: -x[1])
