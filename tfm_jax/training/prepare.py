"""One command from nothing to training data: `python -m tfm_jax.training.prepare build/corpus`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tfm_jax.text import load_tokenizer
from tfm_jax.training.batches import MIXTURE, PACKED, tokenize_corpus, write_prompts
from tfm_jax.training.corpus import CorpusReport, build_corpus
from tfm_jax.training.packages import FetchError
from tfm_jax.training.sources import SOURCES
from tfm_jax.training.tokenizer import check_vocab_size, train_tokenizer

PARTS = ("text", "tokenizer.json", "heldout_prompts.json", "figures.json", PACKED)


def prepare(
    out_dir: str | Path,
    *,
    text_dirs: tuple[str, ...] = (),
    packages: bool = True,
    extras: str | None = None,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> CorpusReport:
    """Writes everything that training reads into `out_dir`; returns the corpus report.

    `text/` (the corpus), `tokenizer.json` (trained here, or a copy of `tokenizer`),
    `tokens.npz.xz` (packed streams), `heldout_prompts.json` and `figures.json`.

    Args:
      out_dir: folder to write; a corpus there is replaced once the new one is complete.
      text_dirs: folders of a user's own text files.
      packages: fetch the package's own sources, too.
      extras: see `build_corpus`; "auto" if not given.
      tokenizer: an existing `tokenizer.json`.
      vocab_size: entries of a new tokenizer; 8192 if not given.
      cache_dir: folder of fetched packages.
      progress: show bars.

    Raises:
      ValueError: options that exclude each other or are out of range, or too little text.
      OSError: a missing folder or file, or files in `out_dir` that are no corpus's.
    """
    out_dir = Path(out_dir)
    fetching = {"extras": extras, "cache": cache_dir}
    unused = [name for name, value in fetching.items() if value is not None]
    if not packages and unused:
        raise ValueError(f"{' and '.join(unused)} only count when packages are fetched")
    if tokenizer is not None and vocab_size is not None:
        raise ValueError("vocab_size counts for a new tokenizer only: one was given")
    _check_place(out_dir)
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    vocab_size = 8192 if vocab_size is None else vocab_size
    check_vocab_size(vocab_size)

    new = not out_dir.exists()
    out_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".corpus-", dir=out_dir))
    try:
        report = build_corpus(
            building / "text",
            text_dirs=text_dirs,
            extras=extras or "auto",
            sources=SOURCES if packages else (),
            cache_dir=cache_dir,
            progress=progress,
        )
        text, path = building / "text", building / "tokenizer.json"
        if tokenizer is None:
            train_tokenizer(text, path, mixture=MIXTURE, vocab_size=vocab_size, progress=progress)
        else:
            shutil.copyfile(tokenizer, path)
        coder = load_tokenizer(path)
        figures = tokenize_corpus(text, coder, building / PACKED)
        prompts = write_prompts(text, coder, building / "heldout_prompts.json")
        summary = {"tokens": figures, "prompts": prompts}
        (building / "figures.json").write_text(json.dumps(summary, indent=1) + "\n")
        _replace(building, out_dir)
    finally:
        shutil.rmtree(building)
        if new and not any(out_dir.iterdir()):
            out_dir.rmdir()
    return report


def _check_place(folder: Path) -> None:
    """Raises OSError for a file, or a folder with files of these names that are no corpus's."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: name a folder")
    there = [name for name in PARTS if (folder / name).exists()]
    if there and not (folder / "text" / "manifest.json").is_file():
        raise FileExistsError(
            f"{folder} holds {', '.join(there)} and is not a corpus (it has no text/manifest.json)"
        )


def _replace(new: Path, folder: Path) -> None:
    """Moves a corpus to its place; until all is there it lacks what makes it one to a reader."""
    (folder / PACKED).unlink(missing_ok=True)
    for name in PARTS:
        if (folder / name).is_dir():
            (folder / name).rename(new / f"old-{name}")
        (new / name).rename(folder / name)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tfm_jax.training.prepare", description=__doc__)
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--text", action="append", default=[], metavar="DIR", help="your own files")
    parser.add_argument("--no-packages", action="store_true", help="train on --text alone")
    parser.add_argument(
        "--extras", choices=("auto", "none", "all"), help="npm and apt sources [default: auto]"
    )
    parser.add_argument("--tokenizer", help="an existing tokenizer.json, instead of training one")
    parser.add_argument("--vocab-size", type=int, help="of a new tokenizer [default: 8192]")
    parser.add_argument("--cache", help="folder of fetched packages")
    options = parser.parse_args(arguments)
    try:
        report = prepare(
            options.out,
            text_dirs=tuple(options.text),
            packages=not options.no_packages,
            extras=options.extras,
            tokenizer=options.tokenizer,
            vocab_size=options.vocab_size,
            cache_dir=options.cache,
        )
    except (FetchError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show_report(report)
    return 0


def show_report(report: CorpusReport) -> None:
    """Prints what a corpus was built from, and what was left out."""
    console = Console()
    table = Table("domain", "package", "version", "licence", "documents", "MB", "dropped")
    for source in report.sources:
        dropped = ", ".join(f"{reason} {number}" for reason, number in source.dropped.items())
        size = f"{source.bytes / 1e6:.1f}"
        names = (source.domain, source.package, source.version, source.licence)
        table.add_row(*names, str(source.documents), size, dropped)
    console.print(table)
    for package, reason in report.skipped.items():
        console.print(f"skipped {package}: {reason}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
