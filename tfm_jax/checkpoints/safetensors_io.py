"""Safetensors files as arrays that stay on disk until they are used."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tfm_jax.checkpoints.errors import CheckpointError, refuse

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LARGEST_HEADER = 100_000_000  # the limit of the format's own library
_POINTER = b"version https://git-lfs"


def read_directory(directory: Path) -> tuple[dict[str, np.ndarray], tuple[Path, ...]]:
    """Arrays by name, and the files they come from.

    With an index (`*.safetensors.index.json`) exactly the files it names are read; without one
    there must be a single `*.safetensors`. Raises CheckpointError with every absent or broken
    file and every indexed tensor that is not in its file.
    """
    indices = sorted(directory.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise CheckpointError(f"{directory}: several indices: {_names(indices)}")
    if indices:
        return _read_indexed(directory, indices[0])
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors file and no index")
    if len(files) > 1:
        raise CheckpointError(
            f"{directory}: several files and no index that names the right ones: {_names(files)}"
        )
    return read_file(files[0]), (files[0],)


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Read-only arrays by name, views of the mapped file: nothing is read before it is used.

    Raises CheckpointError naming the file and the likely cause where it is empty, cut off, a
    pointer to the real file, or not of this format.
    """
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError(f"{path} is empty: its download or copy did not start")
    data = np.memmap(path, np.uint8, mode="r")
    if data[: len(_POINTER)].tobytes() == _POINTER:
        raise CheckpointError(f"{path} is a Git LFS pointer: fetch the real file (git lfs pull)")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if size < 8 or length > _LARGEST_HEADER:
        raise CheckpointError(f"{path} is not a safetensors file, or its start is damaged")
    if 8 + length > size:
        raise CheckpointError(
            f"{path} is cut off inside its header: {size} bytes, the header alone needs "
            f"{8 + length}; copy or download it again"
        )
    entries = _parse_header(path, data[8 : 8 + length].tobytes())
    body = size - 8 - length
    promised = max((end for _, _, _, end in entries.values()), default=0)
    if promised > body:
        raise CheckpointError(
            f"{path} is cut off: {size} bytes, its header promises {8 + length + promised}; "
            "copy or download it again"
        )
    if promised < body:
        raise CheckpointError(f"{path} is damaged: {body - promised} bytes after its last tensor")
    values = np.asarray(data[8 + length :])
    return {
        name: values[begin:end].view(dtype).reshape(shape)
        for name, (dtype, shape, begin, end) in entries.items()
    }


def _read_indexed(directory: Path, index: Path) -> tuple[dict[str, np.ndarray], tuple[Path, ...]]:
    try:
        names = json.loads(index.read_text("utf-8"))["weight_map"]
        files = sorted({str(file) for file in names.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index with a weight_map: {error!r}") from None
    problems: list[str] = []
    shards: dict[str, dict[str, np.ndarray]] = {}
    for file in files:
        path = directory / file
        if Path(file).name != file:
            problems.append(f"{index.name} names {file!r}, which is not a file name")
        elif not path.is_file():
            count = sum(shard == file for shard in names.values())
            problems.append(f"{file}, named by the index for {count} tensors, is not there")
        else:
            try:
                shards[file] = read_file(path)
            except CheckpointError as error:
                problems.append(str(error))
    tensors: dict[str, np.ndarray] = {}
    for file, shard in shards.items():
        # A tensor that the index places elsewhere is taken from there.
        tensors |= {name: array for name, array in shard.items() if names.get(name, file) == file}
        absent = [name for name, home in names.items() if home == file and name not in shard]
        problems += [f"{name} is not in {file}, where the index places it" for name in absent]
    refuse(directory, problems)
    return tensors, tuple(directory / file for file in files)


def _parse_header(
    path: Path, header: bytes
) -> dict[str, tuple[np.dtype, tuple[int, ...], int, int]]:
    try:
        listed = json.loads(header)
        listed.pop("__metadata__", None)
        entries = {name: _parse_entry(entry) for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from None
    position = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != position:
            raise CheckpointError(f"{path} has a damaged header: a gap or overlap before {name}")
        position = end
    return entries


def _parse_entry(entry: dict[str, Any]) -> tuple[np.dtype, tuple[int, ...], int, int]:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"tensors stored as {entry['dtype']} are not supported")
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"impossible sizes {entry}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for {entry['dtype']} {list(shape)}")
    return dtype, shape, begin, end


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)
