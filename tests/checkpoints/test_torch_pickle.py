"""Torch files are read without torch, and hostile or damaged ones are refused."""

import collections
import io
import os
import pickle
import sys
import types
import zipfile

import ml_dtypes
import numpy as np
import pytest

from tfm_jax.checkpoints import CheckpointError
from tfm_jax.checkpoints.torch_pickle import read_torch_file


class Tensor:
    """Pickled as torch pickles a tensor: a view of a storage."""

    def __init__(self, key, storage, offset, size, stride):
        self.key, self.storage = key, storage
        self.offset, self.size, self.stride = offset, size, stride


def torch_names(monkeypatch):
    """Stand-ins that pickle under torch's names."""

    def _rebuild_tensor_v2(*args):
        raise AssertionError

    package, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = (
        "torch._utils",
        "_rebuild_tensor_v2",
    )
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    for name in ("FloatStorage", "BFloat16Storage", "HalfStorage", "LongStorage"):
        setattr(package, name, type(name, (), {"__module__": "torch"}))
    package._utils = utils
    monkeypatch.setitem(sys.modules, "torch", package)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    return package


@pytest.fixture
def write(monkeypatch, tmp_path):
    """`write(content, ...)` makes a torch zip file and returns its path."""
    torch = torch_names(monkeypatch)

    class Storage:
        def __init__(self, kind, key, count):
            self.id = ("storage", getattr(torch, kind), key, "cpu", count)

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return obj.id if isinstance(obj, Storage) else None

        def reducer_override(self, obj):
            if not isinstance(obj, Tensor):
                return NotImplemented
            kind, array = obj.storage
            storage = Storage(kind, obj.key, array.size)
            hooks = collections.OrderedDict()
            return torch._utils._rebuild_tensor_v2, (
                storage,
                obj.offset,
                obj.size,
                obj.stride,
                False,
                hooks,
            )

    def make(content, storages=(), compression=zipfile.ZIP_STORED, byteorder=b"little"):
        buffer = io.BytesIO()
        Pickler(buffer, protocol=2).dump(content)
        path = tmp_path / "weaver.pth"
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("weaver/data.pkl", buffer.getvalue())
            archive.writestr("weaver/byteorder", byteorder)
            for key, array in storages:
                archive.writestr(f"weaver/data/{key}", array.tobytes())
        return path

    return make


FLAT = np.arange(12, dtype=np.float32)


def file_of(**tensors):
    return {"config": {"K": 7}, "state_dict": collections.OrderedDict(tensors)}


def test_views_offsets_strides_and_dtypes(write):
    half = FLAT.astype(ml_dtypes.bfloat16)
    content = file_of(
        whole=Tensor("0", ("FloatStorage", FLAT), 0, (3, 4), (4, 1)),
        transposed=Tensor("0", ("FloatStorage", FLAT), 0, (4, 3), (1, 4)),
        tail=Tensor("0", ("FloatStorage", FLAT), 8, (4,), (1,)),
        half=Tensor("1", ("BFloat16Storage", half), 2, (2,), (3,)),
        scalar=Tensor("0", ("FloatStorage", FLAT), 5, (), ()),
        empty=Tensor("0", ("FloatStorage", FLAT), 0, (0, 4), (4, 1)),
    )
    config, tensors = read_torch_file(write(content, [("0", FLAT), ("1", half)]))
    grid = FLAT.reshape(3, 4)
    assert config == {"K": 7}
    assert np.array_equal(tensors["whole"], grid)
    assert np.array_equal(tensors["transposed"], grid.T)
    assert tensors["tail"].tolist() == [8, 9, 10, 11]
    assert tensors["half"].dtype == ml_dtypes.bfloat16
    assert tensors["half"].astype(float).tolist() == [2, 5]
    assert tensors["scalar"].shape == ()
    assert tensors["scalar"] == 5
    assert tensors["empty"].shape == (0, 4)


class Attack:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_pickle_cannot_run_anything(write, tmp_path):
    marker = tmp_path / "ran"
    path = write(file_of(a=Attack(f"touch {marker}")))
    with pytest.raises(CheckpointError, match=r"refused: the pickle asks for posix\.system"):
        read_torch_file(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "value", [print, getattr, collections.Counter, np.zeros(2)], ids=lambda v: str(type(v))
)
def test_every_other_name_is_refused(write, value):
    with pytest.raises(CheckpointError, match="refused: the pickle asks for"):
        read_torch_file(write(file_of(a=value)))


def test_other_storages_are_refused(write):
    content = file_of(a=Tensor("0", ("LongStorage", FLAT), 0, (2,), (1,)))
    with pytest.raises(CheckpointError, match=r"torch\.LongStorage"):
        read_torch_file(write(content, [("0", FLAT)]))


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (0, (13,), (1,)),
        (10, (3,), (1,)),
        (0, (4, 4), (4, 1)),
        (0, (1 << 40,), (0,)),
        (-1, (2,), (1,)),
        (5, (3,), (-1,)),
        (0, (2, 2), (1,)),
    ],
)
def test_a_view_cannot_leave_its_storage(write, offset, size, stride):
    content = file_of(a=Tensor("0", ("FloatStorage", FLAT), offset, size, stride))
    with pytest.raises(CheckpointError, match=r"outside its storage|impossible tensor"):
        read_torch_file(write(content, [("0", FLAT)]))


def test_a_short_storage_is_refused(write):
    content = file_of(a=Tensor("0", ("FloatStorage", FLAT), 0, (12,), (1,)))
    with pytest.raises(CheckpointError, match="storage 0 has 44 bytes"):
        read_torch_file(write(content, [("0", FLAT[:-1])]))


@pytest.mark.parametrize(
    "content",
    [[1, 2], {"state_dict": {}}, {"config": {}, "state_dict": [1]}, file_of(a=3)],
    ids=["list", "no-config", "no-tensors", "number"],
)
def test_other_contents_are_refused(write, content):
    with pytest.raises(CheckpointError, match=r"config|tensors"):
        read_torch_file(write(content))


@pytest.mark.parametrize(
    "options", [{"compression": zipfile.ZIP_DEFLATED}, {"byteorder": b"big"}], ids=str
)
def test_foreign_containers_are_refused(write, options):
    with pytest.raises(CheckpointError, match=r"compressed|byte order"):
        read_torch_file(write(file_of(), **options))


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.99])
def test_cut_files_are_refused(fixtures, tmp_path, kept):
    data = (fixtures / "weaver_tiny" / "learned_gelu" / "weaver.pth").read_bytes()
    path = tmp_path / "weaver.pth"
    path.write_bytes(data[: int(kept * len(data)) if kept < 1 else kept])
    with pytest.raises(CheckpointError, match=r"weaver\.pth"):
        read_torch_file(path)


def test_a_flipped_bit_is_refused(fixtures, tmp_path):
    data = bytearray((fixtures / "weaver_tiny" / "learned_gelu" / "weaver.pth").read_bytes())
    data[len(data) // 2] ^= 1
    path = tmp_path / "weaver.pth"
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="damaged"):
        read_torch_file(path)
