"""Results as JSON files: whole or not at all, one row of a table a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tfm_jax.files import whole_file


def store(path: Path, result: dict[str, Any]) -> None:
    """Writes `result`; lists of rows get a line for each row, also those in a dictionary."""
    parts = [f" {json.dumps(name)}: {_lines(value)}" for name, value in result.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")


def device_file(folder: Path, name: str) -> Path:
    """Where a result of the default device goes: `<name>_<device>.json`."""
    return folder / f"{name}_{jax.devices()[0].device_kind.replace(' ', '_').lower()}.json"


def _lines(value: Any, indent: str = " ") -> str:
    if isinstance(value, dict) and any(map(_is_rows, value.values())):
        parts = [f"{indent} {json.dumps(k)}: {_lines(v, indent + ' ')}" for k, v in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if _is_rows(value):
        rows = f",\n{indent} ".join(json.dumps(row) for row in value)
        return f"[\n{indent} {rows}\n{indent}]"
    return json.dumps(value)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def rounded(x: np.ndarray | np.floating) -> Any:
    """A figure or an array of them as it is stored: a number or lists, to four places."""
    return np.round(np.asarray(x, np.float64), 4).tolist()
