"""One command from nothing to training data: `python -m tfm_jax.training.prepare build/corpus`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tfm_jax.text import load_tokenizer
from tfm_jax.training.batches import MIXTURE, PACKED, tokenize_corpus, write_prompts
from tfm_jax.training.corpus import CorpusReport, build_corpus
from tfm_jax.training.packages import FetchError
from tfm_jax.training.sources import SOURCES
from tfm_jax.training.tokenizer import train_tokenizer


def prepare(
    out_dir: str | Path,
    *,
    text_dirs: tuple[str, ...] = (),
    packages: bool = True,
    extras: str = "auto",
    tokenizer: str | Path | None = None,
    vocab_size: int = 8192,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> CorpusReport:
    """Writes everything that training reads into `out_dir`; returns the corpus report.

    `text/` (the corpus), `tokenizer.json` (trained here unless `tokenizer` names one),
    `tokens.npz.xz` (packed streams), `heldout_prompts.json` and `figures.json`.
    """
    out_dir = Path(out_dir)
    report = build_corpus(
        out_dir / "text",
        text_dirs=text_dirs,
        extras=extras,
        sources=SOURCES if packages else (),
        cache_dir=cache_dir,
        progress=progress,
    )
    path = Path(tokenizer) if tokenizer is not None else out_dir / "tokenizer.json"
    if tokenizer is None:
        train_tokenizer(
            out_dir / "text", path, mixture=MIXTURE, vocab_size=vocab_size, progress=progress
        )
    coder = load_tokenizer(path)
    figures = tokenize_corpus(out_dir / "text", coder, out_dir / PACKED)
    prompts = write_prompts(out_dir / "text", coder, out_dir / "heldout_prompts.json")
    summary = {"tokens": figures, "prompts": prompts}
    (out_dir / "figures.json").write_text(json.dumps(summary, indent=1) + "\n")
    return report


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tfm_jax.training.prepare", description=__doc__)
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--text", action="append", default=[], metavar="DIR", help="your own files")
    parser.add_argument("--no-packages", action="store_true", help="train on --text alone")
    parser.add_argument(
        "--extras", choices=("auto", "none", "all"), default="auto", help="npm and apt sources"
    )
    parser.add_argument("--tokenizer", help="an existing tokenizer.json, instead of training one")
    parser.add_argument("--vocab-size", type=int, default=8192)
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
