"""Records of a run as TensorBoard event files."""

from __future__ import annotations

import functools
from pathlib import Path
from types import TracebackType
from typing import Any

from tfm_jax.training.report import Record

_BOOKKEEPING = ("title", "step", "steps", "seconds", "last_skipped")


def require_tensorboard() -> None:
    """Raises ImportError, with what to install, if there is no tensorboardX."""
    try:
        import tensorboardX  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "TensorBoard files need tensorboardX: pip install 'tfm-jax[tensorboard]'"
        ) from None


class TensorBoard:
    """Writes records to a folder; pass `add` as `on_record`."""

    def __init__(self, directory: Path, first: int | None = None) -> None:
        """Settings; the folder is written to from the first record on.

        Args:
          directory: of the event files.
          first: step from which on a resumed run writes again what the folder holds: TensorBoard
            shows nothing from before of these steps. None for a new run.

        Raises:
          ImportError: there is no tensorboardX.
        """
        require_tensorboard()
        self._directory, self._first = directory, first

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if "_writer" in vars(self):
            self._writer.close()

    @functools.cached_property
    def _writer(self) -> Any:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        return SummaryWriter(str(self._directory), purge_step=self._first)

    def add(self, record: Record) -> None:
        """Adds the numbers of a record; entry d of a list gets the tag `<name>/<d>`, from 1."""
        title, step = record["title"], record["step"]
        for name, value in record.items():
            if name in _BOOKKEEPING:
                continue
            parts = enumerate(value, 1) if isinstance(value, list) else [(None, value)]
            for depth, number in parts:
                tag = f"{title}/{name}" if depth is None else f"{title}/{name}/{depth}"
                self._writer.add_scalar(tag, number, step)
