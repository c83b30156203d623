"""Torch zip files (`.pth`) read without torch and without executing what they hold.

The format: `<name>/data.pkl` is a pickle, `<name>/data/<key>` the raw little-endian storages.
Tensors in the pickle are calls of `_rebuild_tensor_v2` on a persistent storage id.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tfm_jax.checkpoints.errors import CheckpointError

_STORAGES = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}


class TorchFile(NamedTuple):
    """The two entries of a Weaver file: its configuration and its tensors by name."""

    config: Mapping[str, Any]
    tensors: dict[str, np.ndarray]


def read_torch_file(path: Path) -> TorchFile:
    """Configuration and tensors of a `.pth` file with `config` and `state_dict`.

    Raises CheckpointError where the file is not a torch zip file, is damaged, or its pickle asks
    for any other name than the ones a dictionary of tensors needs.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is not a torch zip file: it is cut off, or saved by torch before 1.6"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            content = _load(archive)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can fail anywhere in the unpickler
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds no dictionary with `config` and `state_dict`")
    config, tensors = content.get("config"), content.get("state_dict")
    if not isinstance(config, Mapping) or not isinstance(tensors, Mapping):
        raise CheckpointError(
            f"{path} must hold the dictionaries `config` and `state_dict`, "
            f"has {sorted(map(str, content))}"
        )
    strange = [name for name, value in tensors.items() if not isinstance(value, np.ndarray)]
    if strange:
        raise CheckpointError(f"{path}: not tensors in state_dict: {strange}")
    return TorchFile(config, dict(tensors))


def _load(archive: zipfile.ZipFile) -> Any:
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"expected one data.pkl inside, found {len(pickles)}")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise CheckpointError("torch files are not compressed, this one is")
    root = pickles[0].removesuffix("data.pkl")
    if root + "byteorder" in archive.namelist():
        order = archive.read(root + "byteorder")
        if order != b"little":
            raise CheckpointError(f"byte order must be little, got {order!r}")
    return _TensorUnpickler(archive, root).load()


class _TensorUnpickler(pickle.Unpickler):
    """Resolves the names of a dictionary of tensors and refuses all others."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(archive.read(root + "data.pkl")))
        self._archive = archive
        self._root = root
        self._storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise CheckpointError(f"refused: the pickle asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise CheckpointError(f"refused: the pickle asks for the object {pid!r}")
        if key not in self._storages:
            raw = self._archive.read(f"{self._root}data/{key}")
            if len(raw) != count * dtype.itemsize:
                raise CheckpointError(f"storage {key} has {len(raw)} bytes, {count} x {dtype} told")
            self._storages[key] = np.frombuffer(raw, dtype)
        return self._storages[key]


def _rebuild(
    storage: np.ndarray,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    metadata: Any = None,
) -> np.ndarray:
    del requires_grad, hooks, metadata
    if len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise CheckpointError(f"impossible tensor of size {size}, stride {stride}, {offset=}")
    if math.prod(size) == 0:
        return np.empty(size, storage.dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= storage.size or math.prod(size) > storage.size:
        raise CheckpointError(f"a tensor of size {size} reaches outside its storage")
    strides = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides, writeable=False)
