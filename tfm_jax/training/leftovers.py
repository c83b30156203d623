"""What a run's folder holds from before, and whether it comes from what the run is given now."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfm_jax.checkpoints.opened import Opened
from tfm_jax.config import as_object
from tfm_jax.files import read_json, whole_file
from tfm_jax.training.texts import digest

SOURCES = "sources.json"
CHECKPOINTS = "checkpoints"
LOG = "training.jsonl"


def check_results(folder: Path, network: str, results: Collection[str]) -> None:
    """Refuses a folder that holds what a run would replace, unless it is that run's own.

    Args:
      folder: of the run.
      network: that the run trains.
      results: names of the files and folders that it writes at its end.

    Raises:
      ValueError: no run that began in the folder accounts for what lies there.
    """
    kept = folder / CHECKPOINTS
    own: set[str] = set()
    if kept.is_dir() and recorded(folder / SOURCES).get("network") == network:
        own.add(LOG)
        if any(path.name.isdigit() for path in kept.iterdir()):
            own.update(results)
    foreign = [name for name in (*results, LOG) if (folder / name).exists() and name not in own]
    if foreign:
        raise ValueError(
            f"{folder} holds {', '.join(foreign)}, made by no training of a {network} that has "
            "its checkpoints there: name another folder"
        )


def network_digest(network: Opened) -> str:
    """SHA-256 of a network's configuration and of its weights as they are stored."""
    tensors = network.values()

    def parts() -> Iterator[bytes | memoryview]:
        yield repr(network.config).encode()
        for name in sorted(tensors):
            yield name.encode()
            yield np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data

    return digest(parts())


def claim(folder: Path, sources: Mapping[str, Any], depends: Mapping[str, Collection[str]]) -> None:
    """Records what a folder's files are made from, before the first of them is made.

    Args:
      folder: of the run.
      sources: entries fit for JSON. Of `{"named": ..., "sha256": ...}` the digest alone counts.
      depends: file or folder that may lie there from before -> the sources that it depends on.

    Raises:
      ValueError: one of them comes from something else, or nobody knows from what.
    """
    there = [name for name in depends if (folder / name).exists()]
    file, now = folder / SOURCES, json.loads(json.dumps(sources))
    if there and not file.is_file():
        raise ValueError(
            f"{folder} holds {', '.join(there)} and no {SOURCES} that says what from: name "
            "another folder"
        )
    if there:
        before = recorded(file)
        names = sorted({name for made in there for name in depends[made]})
        changes = [_change(n, before.get(n), now[n]) for n in names if _differ(before, now, n)]
        if changes:
            raise ValueError(
                f"{folder} holds {', '.join(there)} from other sources: {'; '.join(changes)}; "
                "name another folder"
            )
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as partial:
        partial.write_text(json.dumps(now, indent=1) + "\n", "utf-8")


def recorded(file: Path) -> Mapping[str, Any]:
    """What a run has recorded in a file of a folder; nothing if there is none."""
    return as_object(read_json(file), str(file)) if file.is_file() else {}


def _differ(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    old, new = (
        entry.get("sha256", entry) if isinstance(entry, dict) else entry
        for entry in (before.get(name), now[name])
    )
    return old != new


def _change(name: str, before: Any, now: Any) -> str:
    old, new = (v.get("named", v) if isinstance(v, dict) else v for v in (before, now))
    return f"{name} was {old}, now {new}{' with other content' if old == new else ''}"
