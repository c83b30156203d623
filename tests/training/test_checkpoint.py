"""A run that was killed goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.trainer import OptimiserConfig, TrainState, fit

ROOT = Path(__file__).parents[2]
CONFIG = OptimiserConfig(steps=9, warmup=0.3, decay=0.3)


class StopError(Exception):
    """Stands for a kill between two steps."""


@pytest.fixture(scope="module", autouse=True)
def kept_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every run compiles the same step; all but the first read it from the disk."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    values = (str(tmp_path_factory.mktemp("programs")), 0)
    for name, value in zip(names, values, strict=True):
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
        os.environ.pop(name.upper())
    compilation_cache.reset_cache()


def params() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    shapes = {"a.weight": (8, 4), "b.weight": (8, 4), "scale": (5,)}
    return {k: jnp.asarray(random.standard_normal(s), jnp.float32) for k, s in shapes.items()}


def loss(params, batch, key):
    noise = jax.random.normal(key, (5,))
    value = sum(jnp.sum(jnp.square(x.astype(jnp.float32) - batch)) for x in params.values())
    return value + params["scale"] @ noise, {}


def train(folder: Path | None, stop: int | None = None, **options) -> TrainState:
    """Nine steps on batches of a known order; `stop` ends the run before that step."""
    seen: list[int] = []

    def batch(step: int) -> np.float32:
        if step == stop:
            raise StopError
        seen.append(step)
        return np.random.default_rng(step).standard_normal(1).astype(np.float32)[0]

    if folder is None:
        return fit(params(), loss, batch, CONFIG, log_every=100, **options)
    with Checkpoints(folder / "states", {"seed": 0}, every=0) as checkpoints:
        return fit(params(), loss, batch, CONFIG, log_every=2, checkpoints=checkpoints, **options)


def same(one: TrainState, two: TrainState) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_run_stopped_twice_ends_in_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole = train(None)
    log = tmp_path / "log.jsonl"
    for stop in (1, 5):
        with pytest.raises(StopError):
            train(tmp_path, stop, log=log)
    same(train(tmp_path, log=log), whole)
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == [2, 4, 6, 8, 9]
    # A finished run has nothing left to do, and the newest states alone are kept.
    same(train(tmp_path, stop=9, log=log), whole)
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["8", "9"]


def test_records_of_steps_that_were_lost_are_written_anew(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(StopError):
        train(tmp_path, 5, log=log)
    ahead = json.dumps({"title": "training", "step": 8, "loss": 1.0})
    other = json.dumps({"title": "another", "step": 8})
    log.write_text(f'{log.read_text()}{other}\n{ahead}\n{{"title": "train')
    train(tmp_path, log=log)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    ours = [record["step"] for record in records if record["title"] == "training"]
    assert ours == [2, 4, 6, 8, 9]
    assert len(records) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 1}, "seed was 0, now 1"), ({"seed": 0, "rows": 4}, "rows was null, now 4")],
)
def test_another_run_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    with Checkpoints(tmp_path, {"seed": 0}) as checkpoints:
        checkpoints.save(3, {"x": jnp.ones(2)}, 1.5)
    with Checkpoints(tmp_path, change) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.restore({"x": jnp.ones(2)})


def test_settings_are_checked(tmp_path: Path) -> None:
    for keep, every in ((0, 60.0), (2, -1.0), (2, float("nan"))):
        with pytest.raises(ValueError, match="keep must be positive and every at least 0"):
            Checkpoints(tmp_path, {}, keep=keep, every=every)
    with Checkpoints(tmp_path, {}) as checkpoints:
        assert checkpoints.restore({"x": jnp.ones(2)}) is None
        assert not checkpoints.due


def python(code: str, *arguments: object, devices: int = 1) -> subprocess.CompletedProcess:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


KILLED = """
import os, signal, sys
from pathlib import Path
import orbax.checkpoint as ocp
from tests.training.test_checkpoint import train

saved = 0
original = ocp.JsonCheckpointHandler.async_save

async def save(self, *arguments, **options):
    global saved
    saved += 1
    if saved == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return await original(self, *arguments, **options)

ocp.JsonCheckpointHandler.async_save = save
train(Path(sys.argv[1]))
"""


def test_a_kill_in_the_middle_of_saving(tmp_path: Path) -> None:
    done = python(KILLED, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = sorted(path.name for path in (tmp_path / "states").iterdir())
    assert names[:2] == ["3", "4"]
    assert [name.split(".")[0] for name in names[2:]] == ["5"]
    with Checkpoints(tmp_path / "states", {"seed": 0}) as checkpoints:
        assert checkpoints.latest == 4
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["3", "4"]
    same(train(tmp_path), train(None))


SHARDED = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tfm_jax.training.checkpoint import Checkpoints

assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("data",))
places = NamedSharding(mesh, P("data"))
like = {
    "a": jax.device_put(jnp.zeros((8, 3)), places),
    "step": jax.device_put(jnp.int32(0), NamedSharding(mesh, P())),
}
with Checkpoints(Path(sys.argv[1]), {}) as checkpoints:
    state, seconds = checkpoints.restore(like)
    assert seconds == 7.0
    assert state["a"].sharding == places
    assert [s.data.shape for s in state["a"].addressable_shards] == [(2, 3)] * 4
    np.testing.assert_array_equal(state["a"], np.arange(24.0).reshape(8, 3))
    changed = jax.tree.map(lambda x: x + 1, state)
    checkpoints.save(2, changed, 8.0)
"""


def test_checkpoints_move_between_numbers_of_devices(tmp_path: Path) -> None:
    state = {"a": jnp.arange(24.0).reshape(8, 3), "step": jnp.int32(4)}
    with Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.save(1, state, 7.0)
    done = python(SHARDED, tmp_path, devices=4)
    assert done.returncode == 0, done.stderr
    with Checkpoints(tmp_path, {}) as checkpoints:
        found = checkpoints.restore(state)
    assert found is not None
    back, seconds = found
    assert seconds == 8.0
    assert back["a"].sharding == state["a"].sharding
    np.testing.assert_array_equal(back["a"], state["a"] + 1)
    assert int(back["step"]) == 5
