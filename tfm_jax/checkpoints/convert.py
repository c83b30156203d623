"""Conversion of published checkpoints into one directory that `load` reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tfm_jax.checkpoints.errors import CheckpointError
from tfm_jax.checkpoints.opened import find_file
from tfm_jax.checkpoints.store import foreign_files, is_stored, write_store
from tfm_jax.checkpoints.trio import check_dtype, open_trio
from tfm_jax.text import load_tokenizer

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
      overwrite: replace `dst` if it holds what a conversion wrote, and nothing else.

    Raises:
      CheckpointError: something does not fit; `dst` is as it was.
    """
    source, target = Path(src), Path(dst)
    wanted = check_dtype(dtype)
    sources = [source, *(Path(path) for path in (drafter, weaver) if path is not None)]
    _check_target(sources, target, overwrite)
    opened = open_trio(source, drafter=drafter, weaver=weaver, strict=strict)
    texts = _find_texts(opened.text_files)
    parts = opened.parts()
    params = {name: part.load(wanted) for name, part in parts.items()}
    with _whole_directory(target) as directory:
        configs = {name: part.config for name, part in parts.items()}
        write_store(directory, configs, params, copied=list(texts))
        for name, text in texts.items():
            shutil.copyfile(text, directory / name)
    return Report(
        read={n: (p.source, len(p.files), len(params[n])) for n, p in parts.items()},
        skipped={
            pattern: len(names)
            for part in parts.values()
            for pattern, names in part.matched.ignored.items()
        },
        unknown=tuple(name for part in parts.values() for name in part.matched.unknown),
        copied=tuple(texts),
        size=sum(array.nbytes for part in params.values() for array in part.values()),
    )


def _check_target(sources: Sequence[Path], target: Path, overwrite: bool) -> None:
    if target.is_symlink():
        raise CheckpointError(f"{target} is a link; name the directory itself")
    if not target.exists():
        return
    for source in sources:
        if source.resolve().is_relative_to(target.resolve()):
            raise CheckpointError(f"{target} would replace its own source {source}")
    if not overwrite:
        raise CheckpointError(f"{target} exists; overwrite (--overwrite) replaces it")
    if not is_stored(target):
        raise CheckpointError(f"{target} was not made by a conversion, it is not replaced")
    foreign = foreign_files(target)
    if foreign:
        raise CheckpointError(
            f"{target} holds files that its conversion did not write, it is not replaced: "
            f"{', '.join(foreign[:5])}{', ...' * (len(foreign) > 5)}"
        )


def _find_texts(directory: Path) -> dict[str, Path]:
    """The files to copy by name; CheckpointError for a tokenizer that could not be loaded."""
    found = {name: find_file(directory, name) for name in _TEXT_FILES}
    texts = {name: path for name, path in found.items() if path is not None}
    if "tokenizer.json" in texts:
        try:
            load_tokenizer(texts["tokenizer.json"])
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    return texts


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
