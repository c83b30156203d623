"""Conversion of published checkpoints into one directory that `load` reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tfm_jax.checkpoints.errors import CheckpointError
from tfm_jax.checkpoints.store import is_stored, write_store
from tfm_jax.checkpoints.trio import check_dtype, open_trio

_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


class Report(NamedTuple):
    """What a conversion did.

    Attributes:
      read: by network, its source, its number of weight files and of parameters.
      skipped: number of published tensors skipped, by the pattern of their names.
      unknown: names of published tensors without a place (never any if strict).
      copied: tokenizer and generation files taken over.
      size: bytes of parameters written.
    """

    read: dict[str, tuple[Path, int, int]]
    skipped: dict[str, int]
    unknown: tuple[str, ...]
    copied: tuple[str, ...]
    size: int


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    drafter: str | Path | None = None,
    weaver: str | Path | None = None,
    dtype: str | None = None,
    strict: bool = True,
    overwrite: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Writes verifier, drafter and Weaver to `dst`, whole or not at all.

    Everything is checked before anything is written, then written beside `dst` and renamed.

    Args:
      src: a verifier in the Hugging Face layout (flat or nested), a trio (`verifier/`,
        `dflash/`, `weaver/`) or a converted directory. It is not changed.
      dst: directory to make.
      drafter: directory of the DFlash drafter, if not in `src`.
      weaver: directory, `.pth` or `.safetensors` file of the Weaver, if not in `src`.
      dtype: see `read_trio`.
      strict: refuse tensors that no network has a place for.
      overwrite: replace `dst` if it was made by a conversion.
      on_stage: called with the name of each stage.

    Raises:
      CheckpointError: something does not fit; `dst` is as it was.
    """
    source, target = Path(src), Path(dst)
    wanted = check_dtype(dtype)
    _check_target(source, target, overwrite)
    on_stage("checking")
    opened = open_trio(source, drafter=drafter, weaver=weaver, strict=strict)
    parts = opened.parts()
    on_stage("reading")
    params = {name: part.load(wanted) for name, part in parts.items()}
    copied = tuple(name for name in _TEXT_FILES if (opened.text_files / name).is_file())
    on_stage("writing")
    with _whole_directory(target) as directory:
        write_store(directory, {name: part.config for name, part in parts.items()}, params)
        for name in copied:
            shutil.copyfile(opened.text_files / name, directory / name)
    return Report(
        read={n: (p.source, len(p.files), len(params[n])) for n, p in parts.items()},
        skipped={
            pattern: len(names)
            for part in parts.values()
            for pattern, names in part.matched.ignored.items()
        },
        unknown=tuple(name for part in parts.values() for name in part.matched.unknown),
        copied=copied,
        size=sum(array.nbytes for part in params.values() for array in part.values()),
    )


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if target.resolve() in (source.resolve(), *source.resolve().parents):
        raise CheckpointError(f"{target} would replace its own source {source}")
    if not overwrite:
        raise CheckpointError(f"{target} exists; overwrite (--overwrite) replaces it")
    if not is_stored(target):
        raise CheckpointError(f"{target} was not made by a conversion, it is not replaced")


@contextmanager
def _whole_directory(target: Path) -> Iterator[Path]:
    """A new directory that takes the name `target` when the block ends, or vanishes if it fails."""
    target = target.absolute()
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.exists():
            target.rename(old)
        partial.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
