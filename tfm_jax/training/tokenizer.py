"""Trains the small models' own byte-level BPE on a corpus."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tfm_jax.config import ConfigError, DrafterConfig, VerifierConfig
from tfm_jax.files import whole_file
from tfm_jax.text import load_tokenizer
from tfm_jax.training.corpus import corpus_domains, read_documents

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)

# The Qwen3.5 pre-tokenizer: as Qwen3's, with combining marks (\p{M}) kept inside words.
QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    corpus_dir: str | Path,
    out: str | Path,
    *,
    mixture: Mapping[str, float],
    vocab_size: int = 8192,
    sample_bytes: int = 48_000_000,
    progress: bool = True,
) -> None:
    """Writes the tokenizer file `out` (`tokenizer.json`), trained on a sample of the corpus.

    The sample takes documents at even spacing, each domain's share as in `mixture`. `vocab_size`
    counts everything: the four special tokens (ids 0 to 3), the 256 bytes, and the merges. Equal
    corpora give equal files.
    """
    check_vocab_size(vocab_size)
    shares = domain_shares(mixture, corpus_domains(corpus_dir))
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN35_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    bpe.train_from_iterator(_sample(Path(corpus_dir), shares, sample_bytes), trainer)
    found = bpe.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        raise ValueError(
            f"the corpus is too small: {found} entries could be learned, asked for {vocab_size}"
        )
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as partial:
        partial.write_text(bpe.to_str(), encoding="utf-8")


def check_vocab_size(vocab_size: int) -> None:
    """Raises ValueError if no vocabulary of that size can be learned."""
    smallest = len(SPECIAL_TOKENS) + 256
    if not smallest < vocab_size <= 65536:
        raise ValueError(f"vocab_size must be in {smallest + 1}..65536, got {vocab_size}")


def check_tokens(
    file: Path, verifier: VerifierConfig, drafter: DrafterConfig | None = None
) -> None:
    """Refuses a configuration that names other tokens than a tokenizer has.

    Args:
      file: the tokenizer's.
      verifier: may have more rows than there are tokens.
      drafter: names the mask token.

    Raises:
      ConfigError: with all that differs.
      ValueError, OSError: the file is no tokenizer.
    """
    tokenizer = load_tokenizer(file)
    ids: dict[str, int] = {}
    for name in SPECIAL_TOKENS:
        with contextlib.suppress(KeyError):
            ids[name] = tokenizer.token_id(name)
    ends = [ids[name] for name in (END_OF_TEXT, TURN_END) if name in ids]
    problems = []
    if tokenizer.vocab_size > verifier.vocab_size:
        problems.append(
            f"has {tokenizer.vocab_size} tokens, the verifier's vocab_size is {verifier.vocab_size}"
        )
    if END_OF_TEXT not in ids:
        problems.append(f"has no {END_OF_TEXT}, which ends each document")
    if {*ends} != {*verifier.eos_token_ids}:
        given = list(verifier.eos_token_ids)
        problems.append(f"has the end tokens {ends}, the verifier's eos_token_ids are {given}")
    if drafter is not None and ids.get(MASK) != drafter.mask_token_id:
        problems.append(
            f"has the mask token {ids.get(MASK)}, the drafter's mask_token_id is "
            f"{drafter.mask_token_id}"
        )
    if problems:
        raise ConfigError(f"{file} {'; it '.join(problems)}")


def check_known(corpus: Path, streams: Mapping[str, np.ndarray], vocab_limit: int) -> None:
    """Raises ValueError if the packed text of a corpus holds a token from `vocab_limit` on."""
    largest = max(int(np.max(stream)) for stream in streams.values())
    if largest >= vocab_limit:
        raise ValueError(
            f"{corpus} holds token {largest}, the verifier's vocabulary has {vocab_limit} tokens: "
            "it was packed for another model"
        )


def domain_shares(mixture: Mapping[str, float], domains: list[str]) -> dict[str, float]:
    """The weights of those `domains` that `mixture` names, scaled to sum 1.

    Raises ValueError for a negative weight or when no weight is left.
    """
    if any(not 0 <= weight < float("inf") for weight in mixture.values()):
        raise ValueError(f"mixture weights must be finite and not negative, got {dict(mixture)}")
    weights = {domain: mixture[domain] for domain in domains if mixture.get(domain, 0) > 0}
    if not weights:
        raise ValueError(f"no weight in {dict(mixture)} falls on the corpus domains {domains}")
    total = sum(weights.values())
    return {domain: weight / total for domain, weight in weights.items()}


def _sample(corpus_dir: Path, shares: Mapping[str, float], sample_bytes: int) -> Iterator[str]:
    # The chat layout's markers must not be learned as ordinary text.
    markers = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    for domain, share in shares.items():
        texts = [row["text"] for row in read_documents(corpus_dir, "train", domain)]
        size = sum(len(text.encode()) for text in texts)
        step = max(1.0, size / (share * sample_bytes))
        for place in range(int(len(texts) / step)):
            yield markers.sub("\n", texts[int(place * step)])
