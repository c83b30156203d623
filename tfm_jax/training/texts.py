"""Where the text of a run comes from, and what a verifier writes on from it."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfm_jax.models.qwen36 import Verifier
from tfm_jax.text import known_ids, load_tokenizer
from tfm_jax.training.batches import (
    MIXTURE,
    PACKED,
    Streams,
    TokenBatches,
    load_streams,
    token_dtype,
)
from tfm_jax.training.continuations import Continuations, generate_continuations
from tfm_jax.training.corpus import check_folders, user_files
from tfm_jax.training.prepare import prepare
from tfm_jax.training.settings import check_count
from tfm_jax.training.tokenizer import check_known, domain_shares

# Parts of Python's own library: real text that every machine has already.
_SAMPLE = ("asyncio", "email", "http", "importlib", "json", "logging", "unittest", "urllib", "xml")


def sample_folders() -> tuple[str, ...]:
    """Folders of the standard library that serve as text where the user names none."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return tuple(str(library / name) for name in _SAMPLE if (library / name).is_dir())


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """SHA-256 of all parts."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


def vocab_limit_of(text_files: Path, rows: int) -> int:
    """`Model.vocab_limit` of a model that is not loaded.

    Args:
      text_files: folder that may hold its `tokenizer.json`.
      rows: of its vocabulary.
    """
    file = text_files / "tokenizer.json"
    return known_ids(load_tokenizer(file) if file.is_file() else None, rows)


def corpus_sources(
    corpus: Path | None, text: Sequence[str | Path], tokenizer: Path | None
) -> dict[str, Any]:
    """What `packed_corpus` takes its tokens from: names, and digests of what they name.

    Raises:
      OSError, ValueError: what `packed_corpus` refuses, but for the length of the text.
    """
    _check_corpus(corpus, tokenizer)
    if corpus is not None:
        named, found = str(corpus), digest([(corpus / PACKED).read_bytes()])
    else:
        folders = [Path(folder) for folder in text or sample_folders()]
        check_folders(folders)
        named = " ".join(map(str, text)) or "parts of Python's library"
        found = digest(_contents(folders))
    known = None if tokenizer is None else digest([tokenizer.read_bytes()])
    return {
        "text": {"named": named, "sha256": found},
        "tokenizer": {"named": str(tokenizer), "sha256": known},
    }


def _contents(folders: Iterable[Path]) -> Iterator[bytes]:
    for folder in folders:
        for file in user_files(folder):
            data = file.read_bytes()
            yield f"{file.relative_to(folder)}\0{len(data)}\0".encode()
            yield data


def packed_corpus(
    corpus: Path | None,
    text: Sequence[str | Path],
    tokenizer: Path | None,
    made: Path,
    window: int = 0,
) -> Path:
    """A folder of packed tokens: `corpus`, or one made at `made` from a user's files.

    Args:
      corpus: made by `tfm data corpus`.
      text: folders of files to pack instead; the sample if neither is given.
      tokenizer: `tokenizer.json` of the model that will read the tokens.
      made: where to pack; a corpus that lies there already is taken.
      window: tokens of a window that the packed text must have room for, or it is not kept.

    Raises:
      ValueError: the corpus was packed with another tokenizer, there is none to pack with, or the
        text is too short.
      OSError: a folder or file is missing.
    """
    _check_corpus(corpus, tokenizer)
    if corpus is not None:
        return corpus
    if not (made / PACKED).is_file():
        prepare(
            made,
            text_dirs=tuple(map(str, text)) or sample_folders(),
            packages=False,
            tokenizer=tokenizer,
        )
        try:
            training_streams(made, window)
        except ValueError:
            (made / PACKED).unlink()
            raise
    return made


def _check_corpus(corpus: Path | None, tokenizer: Path | None) -> None:
    """Refuses a corpus that is none or of another tokenizer, and text that none can pack."""
    if corpus is None:
        if tokenizer is None:
            raise ValueError(
                "the model has no tokenizer.json to pack text with: give texts as tokens"
            )
        return
    if not (corpus / PACKED).is_file():
        raise FileNotFoundError(f"{corpus} is no corpus: it has no {PACKED}")
    own = corpus / "tokenizer.json"
    if own.is_file() and tokenizer is not None and own.read_bytes() != tokenizer.read_bytes():
        raise ValueError(f"{corpus} was packed with another tokenizer than {tokenizer}")


def training_streams(corpus: Path, window: int) -> Streams:
    """The training streams of a packed corpus that are long enough for windows of `window` tokens.

    Raises:
      ValueError: there is none.
    """
    streams = load_streams(corpus / PACKED)
    long_enough = {name: s for name, s in streams.items() if len(s) >= 2 * window + 1}
    if not long_enough:
        sizes = {name: len(stream) for name, stream in streams.items()}
        raise ValueError(
            f"the text in {corpus} is too short: windows of {window} tokens need streams of "
            f"{2 * window + 1}, got {sizes}"
        )
    return long_enough


def heldout_windows(corpus: Path, length: int, rows: int = 16) -> dict[str, np.ndarray]:
    """Windows [rows, length + 1] of each domain's held-back text, where it is long enough."""
    streams = load_streams(corpus / PACKED, "heldout")
    long_enough = {name: stream for name, stream in streams.items() if len(stream) > 2 * length}
    return {
        name: TokenBatches(long_enough, {name: 1.0}, length, rows)[0]  # seed 0: always the same
        for name in long_enough
    }


def write_continuations(
    verifier: Verifier,
    corpus: Path,
    options: Mapping[str, Any],
    *,
    vocab_limit: int,
    seed: int = 0,
    seconds: float | None = None,
) -> Continuations:
    """What a verifier writes after prompts from a packed corpus.

    Args:
      verifier: the model.
      corpus: folder with packed tokens.
      options: rows, total, prompt, shortest, batches, greedy_share and, where texts that repeat
        themselves are left out, most_copied; see `generate_continuations`, `prompt` being the
        longest prompt.
      vocab_limit: see `write_on`.
      seed: of windows, lengths and noise.
      seconds: time to stop after.

    Raises:
      ValueError: the text is too short, or holds tokens from `vocab_limit` on.
    """
    width, total = options["prompt"], options["total"]
    if not 2 <= width <= total:
        raise ValueError(f"prompt must lie in 2..total, got {width} of {total}")
    # Another seed than the verifier's training: another order of windows.
    prompts = _windows(corpus, width, options["rows"], seed + 1, vocab_limit)
    return generate_continuations(
        verifier,
        prompts.__getitem__,
        total=total,
        batches=options["batches"],
        vocab_limit=vocab_limit,
        shortest=options["shortest"],
        greedy_share=options["greedy_share"],
        most_copied=options.get("most_copied", 1.0),
        seed=seed,
        seconds=seconds,
    )


def given_texts(
    corpus: Path, options: Mapping[str, Any], *, vocab_limit: int, seed: int = 0
) -> Continuations | None:
    """`given` windows of a corpus as they are, as long as continuations; None for 0 of them.

    They count as drawn at temperature 1: what is learned along them is the verifier's
    distributions, not the text. That is less apt than continuations, and costs no writing.

    Args:
      corpus: folder with packed tokens.
      options: given, total and shortest, the tokens before the first anchor.
      vocab_limit: of the verifier, see `Model.vocab_limit`.
      seed: of the windows.

    Raises:
      ValueError: the text is too short, or holds tokens from `vocab_limit` on.
    """
    count, total = options.get("given", 0), options["total"]
    check_count("given", count, least=0)
    if count == 0:
        return None
    tokens = _windows(corpus, total, count, seed + 2, vocab_limit)[0]
    return Continuations(
        tokens=tokens.astype(token_dtype(vocab_limit)),
        prompt=np.full(count, options["shortest"], np.int32),
        temperature=np.ones(count, np.float32),
    )


def _windows(corpus: Path, width: int, rows: int, seed: int, vocab_limit: int) -> TokenBatches:
    """Batches of `rows` windows of `width` tokens, all below `vocab_limit`."""
    streams = training_streams(corpus, width - 1)
    check_known(corpus, streams, vocab_limit)
    mixture = domain_shares(MIXTURE, list(streams))
    return TokenBatches(streams, mixture, width - 1, rows, seed=seed)
