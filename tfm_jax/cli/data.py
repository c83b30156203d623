"""`tfm data`: text to train on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tfm_jax.cli.output import show


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """Build a corpus: text, tokenizer, packed tokens.

    Attributes:
      out: Folder to write.
      text: Folders of your own text files, too.
      no_packages: Take --text alone and fetch nothing.
      extras: Sources that need npm or apt: all, none, or those that can be fetched. [default:
        auto, the latter]
      tokenizer: An existing tokenizer.json, instead of training one.
      vocab_size: Entries of the new tokenizer. [default: 8192]
      cache: Folder of fetched packages.
    """

    out: tyro.conf.Positional[Path]
    text: tuple[Path, ...] = ()
    no_packages: bool = False
    extras: Literal["auto", "none", "all"] | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    cache: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContinuationOptions:
    """Let a verifier write on from a corpus, at temperatures 0 and 1.

    Attributes:
      out: File to write, .npz.
      model: "pocket", or a directory made by `tfm convert`.
      corpus: Folder made by `tfm data corpus`.
      config: JSON file with a stage "continuations". [default: a short run]
      seconds: Stop before a batch that would end later.
      seed: Equal seeds give equal texts.
      dtype: Type of weights and activations. [default: float32 on a CPU, else bfloat16]
    """

    out: tyro.conf.Positional[Path]
    corpus: Path
    model: str = "pocket"
    config: Path | None = None
    seconds: float | None = None
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] | None = None


def data(
    what: Annotated[CorpusOptions, tyro.conf.subcommand("corpus")]
    | Annotated[ContinuationOptions, tyro.conf.subcommand("continuations")],
) -> None:
    """Build a corpus, or let a verifier write the texts that drafters and Weavers learn from."""
    if isinstance(what, CorpusOptions):
        _corpus(what)
    else:
        _continuations(what)


def _corpus(options: CorpusOptions) -> None:
    from tfm_jax.training.packages import FetchError
    from tfm_jax.training.prepare import prepare, show_report

    try:
        report = prepare(
            options.out,
            text_dirs=tuple(map(str, options.text)),
            packages=not options.no_packages,
            extras=options.extras,
            tokenizer=options.tokenizer,
            vocab_size=options.vocab_size,
            cache_dir=options.cache,
        )
    except FetchError as error:
        raise OSError(str(error)) from None
    show_report(report)


def _continuations(options: ContinuationOptions) -> None:
    from tfm_jax.cli.options import DeviceOptions
    from tfm_jax.files import check_new_file
    from tfm_jax.training.settings import (
        check_seconds,
        check_seed,
        read_settings,
        refuse_given,
        stage_settings,
    )
    from tfm_jax.training.texts import write_continuations

    if options.seconds is not None:
        check_seconds("seconds", options.seconds)
    check_seed(options.seed)
    check_new_file(options.out)
    settings = {} if options.config is None else read_settings(options.config)
    refuse_given(settings.get("stages", {}).get("continuations", {}), str(options.config))
    stage = stage_settings(settings, "continuations")
    model = DeviceOptions(dtype=options.dtype).load(options.model)
    seconds = stage.get("seconds") if options.seconds is None else options.seconds
    texts = write_continuations(
        model.trio.verifier,
        options.corpus,
        stage,
        vocab_limit=model.vocab_limit,
        seed=options.seed,
        seconds=seconds,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    texts.save(options.out)
    rows, length = texts.tokens.shape
    show(f"written {options.out}: {rows} texts of {length} tokens")
