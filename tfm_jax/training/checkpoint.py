"""Saved states of a run: the newest few, each whole or not there at all."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

Tree = TypeVar("Tree")

_PARTIAL = ".orbax-checkpoint-tmp"  # in the name of a folder that is being written


class Checkpoints:
    """Checkpoints of one run in one folder, `<step>/` each, written beside it and then renamed.

    What a kill leaves half-written is not a checkpoint: it is never restored, and removed when
    the folder is opened again.
    """

    def __init__(
        self,
        directory: Path,
        setting: Mapping[str, Any],
        *,
        keep: int = 2,
        every: float = 60.0,
    ) -> None:
        """Opens or makes the folder.

        Args:
          directory: of the checkpoints.
          setting: whatever decides the run's numbers, fit for JSON; stored with every state.
          keep: how many to keep; older ones are deleted.
          every: seconds between checkpoints; 0 asks for one after each step.

        Raises:
          ValueError: `keep` or `every` is out of range.
        """
        if keep < 1 or not every >= 0:
            raise ValueError(f"keep must be positive and every at least 0, got {keep} and {every}")
        self.directory = directory.absolute()
        self.every = every
        self._setting = json.loads(json.dumps(setting))
        self._saved = time.monotonic()
        _remove_parts(self.directory)
        # Saved in this thread: the next step takes the state's memory over.
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=False
            ),
            item_names=("state", "about"),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    @property
    def due(self) -> bool:
        """Whether it is time for another one."""
        return time.monotonic() - self._saved >= self.every

    def save(self, step: int, state: Any, seconds: float) -> None:
        """Writes a pytree of arrays, unless the step is there already.

        Args:
          step: steps done.
          state: the arrays, on any number of devices.
          seconds: that the run has taken so far.
        """
        if step != self.latest:
            about = {"setting": self._setting, "seconds": seconds}
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_by_path(state)),
                    about=ocp.args.JsonSave(about),
                ),
                force=True,
            )
        self._saved = time.monotonic()

    def restore(self, like: Tree) -> tuple[Tree, float] | None:
        """The newest state and the seconds that the run had taken; None if there is none.

        Args:
          like: arrays of the shapes and types to expect, placed where they shall be placed; how
            many devices the state was saved from does not matter.

        Raises:
          ValueError: the checkpoint belongs to a run with other settings or other shapes.
        """
        step = self.latest
        if step is None:
            return None
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))
        self._check(step, about["about"]["setting"])
        named = _by_path(like)
        wanted = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for path, leaf in named.items()
        }
        found = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        )
        leaves = [found["state"][path] for path in named]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), about["about"]["seconds"]

    def _check(self, step: int, stored: dict[str, Any]) -> None:
        names = sorted({*stored, *self._setting})
        differing = [name for name in names if stored.get(name) != self._setting.get(name)]
        if differing:
            named = "; ".join(
                f"{name} was {_short(stored.get(name))}, now {_short(self._setting.get(name))}"
                for name in differing
            )
            raise ValueError(
                f"{self.directory / str(step)} is of a run with other settings: {named}"
            )


def _remove_parts(directory: Path) -> None:
    """Removes half-written states; orbax's own removal goes on beside the first save."""
    for path in directory.glob(f"*{_PARTIAL}*"):
        shutil.rmtree(path)


def _by_path(tree: Any) -> dict[str, jax.Array]:
    """Leaves by their path, so that a file does not depend on the classes between."""
    leaves = jax.tree.leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves)
    return named


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
