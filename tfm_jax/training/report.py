"""What a run says while it goes: a bar with rates, printed lines, a JSON-lines log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tfm_jax.files import whole_file

Record = Mapping[str, Any]


class Reporter:
    """Shows and stores the records of one run; use it in a `with` block."""

    def __init__(
        self,
        title: str,
        *,
        log: Path | None = None,
        on_record: Callable[[Record], None] | None = None,
        skipped: int = 0,
    ) -> None:
        """Settings of the reports.

        Args:
          title: of the bar, the lines and the records.
          log: JSON-lines file to append records to.
          on_record: called with every record.
          skipped: steps reported as skipped before.
        """
        self.title, self.log, self.on_record = title, log, on_record
        self._skipped = skipped
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        rate = TextColumn("{task.fields[rate]}")
        self._bar = Progress(*columns, TimeRemainingColumn(), rate, transient=True)
        self._task = self._bar.add_task(title, rate="")

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, done: int, total: int, rates: Mapping[str, float]) -> None:
        """Moves the bar; `rates` are units a second by name."""
        shown = "  ".join(f"{value:,.4g} {name}/s" for name, value in rates.items())
        self._bar.update(self._task, completed=done, total=total, rate=shown)

    def record(self, values: Record) -> None:
        """Prints one line and stores the record; it has `skipped` and `last_skipped`."""
        if values["skipped"] > self._skipped:
            count, last = values["skipped"] - self._skipped, values["last_skipped"]
            print(f"{self.title}: skipped {count} steps that were not finite, last {last}")
        self._skipped = values["skipped"]
        numbers = (
            (name, value) for name, value in values.items() if isinstance(value, int | float)
        )
        line = "  ".join(f"{name} {value:.5g}" for name, value in numbers)
        print(f"{self.title}: {line}", flush=True)
        record = {"title": self.title, **values}
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        if self.on_record is not None:
            self.on_record(record)


def read_log(log: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines log; a last line that a kill cut off is left out.

    Raises:
      ValueError: another line is not JSON.
      OSError: the file cannot be read.
    """
    lines = log.read_text("utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{log} is not a log of training: {error}") from None


def rewind(log: Path, title: str, step: int) -> None:
    """Removes records of `title` after `step`: those that a resumed run is going to write again."""
    if not log.is_file():
        return
    kept = [r for r in read_log(log) if r.get("title") != title or r["step"] <= step]
    with whole_file(log) as partial:
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept), "utf-8")
