"""What a run's folder holds from before, and whether it comes from what the run is given now."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tfm_jax.files import whole_file

SOURCES = "sources.json"


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
        before = json.loads(file.read_text("utf-8"))
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


def _differ(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    old, new = (
        entry.get("sha256", entry) if isinstance(entry, dict) else entry
        for entry in (before.get(name), now[name])
    )
    return old != new


def _change(name: str, before: Any, now: Any) -> str:
    old, new = (v.get("named", v) if isinstance(v, dict) else v for v in (before, now))
    return f"{name} was {old}, now {new}{' with other content' if old == new else ''}"
