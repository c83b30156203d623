"""Results as JSON files: whole or not at all, one row of a table a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np


def store(path: Path, result: dict[str, Any]) -> None:
    """Writes `result`; entries that are lists of rows get a line for each row."""
    parts = []
    for name, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    partial.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")
    partial.replace(path)


def rounded(x: np.ndarray | np.floating) -> Any:
    """A figure or an array of them as it is stored: a number or lists, to four places."""
    return np.round(np.asarray(x, np.float64), 4).tolist()
