"""Corpus to token streams, and token streams to training batches whose state is a step number."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tfm_jax.files import whole_file
from tfm_jax.text import Tokenizer
from tfm_jax.training.corpus import SPLITS, corpus_domains, read_documents
from tfm_jax.training.tokenizer import END_OF_TEXT

PACKED = "tokens.npz.xz"  # the token streams in the folder of a corpus

# What `np.load` and the arrays of what it returns raise for damaged files and for other kinds.
NOT_NPZ = (ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error)

# Share of training tokens a domain; one not in the corpus gives its share to the others.
MIXTURE = {"prose": 0.30, "docs": 0.14, "code": 0.32, "math": 0.16, "chat": 0.08}

# Where a held-back document may be entered: paragraphs; in prose, lines and sentences; turns.
_GAPS = {
    "prose": re.compile(r"\n+|(?<=[.!?]) +"),
    "docs": re.compile(r"\n\n+"),
    "code": re.compile(r"\n\n+"),
    "math": re.compile(r"\n\n+"),
    "chat": re.compile(r"(?=<\|im_start\|>user)"),
}

Streams = dict[str, np.ndarray]


def tokenize_corpus(
    corpus_dir: str | Path, tokenizer: Tokenizer, out: str | Path
) -> dict[str, dict[str, dict[str, float]]]:
    """Packs the corpus into the file `out`; returns `{split: {domain: figures}}`.

    A domain's documents follow one another in corpus order, each closed by `<|endoftext|>`, as
    one stream of the type `token_dtype`. The file is an npz of arrays `<split>.<domain>` inside
    xz; `load_streams` reads it. The figures are documents, tokens, bytes and bytes_per_token.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    end = tokenizer.token_id(END_OF_TEXT)
    streams: Streams = {}
    figures: dict[str, dict[str, dict[str, float]]] = {split: {} for split in SPLITS}
    for domain in corpus_domains(corpus_dir):
        for split in SPLITS:
            # A small corpus may have nothing held back in a domain.
            if not (Path(corpus_dir) / f"{split}.{domain}.jsonl.gz").is_file():
                continue
            parts, documents, size = [], 0, 0
            for texts in _batched(read_documents(corpus_dir, split, domain), 256):
                encoded = tokenizer.encode_batch(texts, parse_special=domain == "chat")
                parts.extend(np.array([*ids, end], dtype) for ids in encoded)
                documents += len(texts)
                size += sum(len(text.encode()) for text in texts)
            stream = np.concatenate(parts)
            streams[f"{split}.{domain}"] = stream
            figures[split][domain] = {
                "documents": documents,
                "tokens": stream.size,
                "bytes": size,
                "bytes_per_token": round(size / (stream.size - documents), 3),
            }
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **streams)
    # The low bits of a position say which byte of a token it is.
    bits = dtype.itemsize // 2
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 4 - bits, "lp": bits, "pb": bits}]
    _write_bytes(Path(out), lzma.compress(buffer.getvalue(), filters=filters))
    return figures


def load_streams(path: str | Path, split: str = "train") -> Streams:
    """The token stream of each domain of one split ("train" or "heldout").

    Raises:
      ValueError: no such split, or a damaged file or another kind of file.
      OSError: the file cannot be read.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    packed = Path(path).read_bytes()
    try:
        with np.load(io.BytesIO(lzma.decompress(packed))) as arrays:
            names = [name for name in arrays.files if name.startswith(f"{split}.")]
            streams = {name.partition(".")[2]: arrays[name] for name in names}
    except (lzma.LZMAError, *NOT_NPZ) as error:
        raise ValueError(f"{path} holds no packed tokens: {error}") from None
    for name, stream in streams.items():
        if stream.ndim != 1 or stream.dtype.kind != "u":
            raise ValueError(
                f"{path} holds no packed tokens: {split}.{name} must be one row of unsigned "
                f"integers, got {stream.dtype} {stream.shape}"
            )
    return streams


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every id of a vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class TokenBatches:
    """Batches of token windows, a pure function of the step number.

    `batches[step]` is int32 [batch, seq_len + 1]: inputs and next-token targets overlap by one.
    The domains follow `mixture` exactly over every 1000 windows. Within a domain each pass visits
    all windows once in a new random order and with a new offset of the window grid, so resuming
    needs nothing but the step.
    """

    PATTERN = 1000

    def __init__(
        self,
        streams: Mapping[str, np.ndarray],
        mixture: Mapping[str, float],
        seq_len: int,
        batch: int,
        seed: int = 0,
    ):
        if seq_len < 1 or batch < 1:
            raise ValueError(f"seq_len and batch must be positive, got {seq_len} and {batch}")
        unknown = sorted(set(mixture) - set(streams))
        if unknown:
            raise ValueError(f"mixture names {unknown}, streams hold {sorted(streams)}")
        weights = np.array([mixture[name] for name in sorted(mixture)], np.float64)
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
            raise ValueError(f"mixture weights must be finite, >= 0, not all 0: {dict(mixture)}")
        for name in mixture:
            if mixture[name] > 0 and len(streams[name]) < 2 * seq_len + 1:
                raise ValueError(
                    f"stream {name!r} has {len(streams[name])} tokens: too short for windows of"
                    f" {seq_len} + 1 at a free offset"
                )
        self.names = sorted(mixture)
        self.streams = [streams[name] for name in self.names]
        self.seq_len, self.batch, self.seed = seq_len, batch, seed
        counts = _quotas(weights / weights.sum(), self.PATTERN)
        slots = np.repeat(np.arange(len(counts)), counts)
        self._pattern = self._random("pattern", 0, 0).permutation(slots)
        # Windows of each domain used before a slot, within one pattern.  [PATTERN + 1, D]
        taken = np.eye(len(counts), dtype=np.int64)[self._pattern]
        self._before = np.concatenate([np.zeros((1, len(counts)), np.int64), taken.cumsum(0)])
        self._passes: dict[int, tuple[int, int, np.ndarray]] = {}

    def __getitem__(self, step: int) -> np.ndarray:
        """The batch of `step` (0, 1, 2, ...): int32 [batch, seq_len + 1]."""
        if step < 0:
            raise IndexError(f"step must not be negative, got {step}")
        rows = [self._window(step * self.batch + row) for row in range(self.batch)]
        return np.stack(rows).astype(np.int32)

    def _window(self, index: int) -> np.ndarray:
        cycle, slot = divmod(index, self.PATTERN)
        domain = int(self._pattern[slot])
        nth = cycle * int(self._before[-1, domain]) + int(self._before[slot, domain])
        stream = self.streams[domain]
        # One window fewer than fits, so that every offset of the grid has as many.
        windows = (len(stream) - 1) // self.seq_len - 1
        turn, place = divmod(nth, windows)
        offset, order = self._pass(domain, turn, windows)
        start = offset + int(order[place]) * self.seq_len
        return stream[start : start + self.seq_len + 1]

    def _pass(self, domain: int, turn: int, windows: int) -> tuple[int, np.ndarray]:
        """Grid offset and window order of one pass over a domain; the last pass is kept."""
        if self._passes.get(domain, (None,))[0] != turn:
            random = self._random("pass", domain, turn)
            offset = int(random.integers(self.seq_len))
            self._passes[domain] = (turn, offset, random.permutation(windows))
        return self._passes[domain][1:]

    def _random(self, *purpose: str | int) -> np.random.Generator:
        """Philox keyed by a hash, so that its stream does not depend on the numpy seeding rule."""
        key = hashlib.sha256(repr((self.seed, *purpose)).encode()).digest()[:16]
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def write_prompts(
    corpus_dir: str | Path,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    count: int = 2000,
    length: int = 48,
    stride: int = 160,
) -> dict[str, int]:
    """Writes `count` continuation prompts from held-back text; returns how many each domain gave.

    A prompt is the first `length` tokens at a document's start or at a paragraph (prose: line or
    sentence; chat: turn) that begins at least `stride` tokens after the prompt before it; at least
    `length` tokens of true continuation follow in the document. Domains give
    equal numbers as far as they have them. The file is
    `{"setting", "prompts": [{"id", "domain", "source", "text", "tokens"}]}`.
    """
    if count < 1 or length < 1 or stride < length:
        raise ValueError(f"need count, length >= 1 and stride >= length: {count, length, stride}")
    found: dict[str, list[dict[str, object]]] = {}
    for domain in corpus_domains(corpus_dir):
        if (Path(corpus_dir) / f"heldout.{domain}.jsonl.gz").is_file():
            rows = read_documents(corpus_dir, "heldout", domain)
            found[domain] = list(_prompts(rows, domain, tokenizer, length, stride))
    taken = _equal_shares({domain: len(rows) for domain, rows in found.items()}, count)
    prompts = []
    for domain, number in taken.items():
        rows = found[domain]
        # Even spacing over all held-back documents.
        for place in range(number):
            row = rows[place * len(rows) // number]
            prompts.append({"id": f"{domain}-{place:04d}", "domain": domain, **row})
    setting = {"length": length, "stride": stride, "count": len(prompts)}
    text = json.dumps({"setting": setting, "prompts": prompts}, ensure_ascii=True)
    _write_bytes(Path(out), text.encode() + b"\n")
    return taken


def _prompts(
    rows: Iterator[dict[str, str]], domain: str, tokenizer: Tokenizer, length: int, stride: int
) -> Iterator[dict[str, object]]:
    for row in rows:
        text, free = row["text"], 0
        for start in [0, *(gap.end() for gap in _GAPS[domain].finditer(text))]:
            if start < free:
                continue
            # Eight characters a token are plenty: long documents are not encoded whole each time.
            ahead = text[start : start + 8 * stride]
            tokens = tokenizer.encode(ahead, parse_special=domain == "chat")
            if len(tokens) < 2 * length:
                continue
            free = start + len(tokenizer.decode(tokens[:stride], skip_special=False))
            prompt = tokens[:length]
            shown = tokenizer.decode(prompt, skip_special=False)
            yield {"source": row["source"], "text": shown, "tokens": prompt}


def _quotas(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to `shares` that sum to `total` (largest remainders)."""
    counts = np.floor(shares * total).astype(np.int64)
    remainders = shares * total - counts
    for place in np.argsort(-remainders, kind="stable")[: total - counts.sum()]:
        counts[place] += 1
    return counts


def _equal_shares(available: dict[str, int], count: int) -> dict[str, int]:
    """How many to take of each: `count` in all as far as there are, as equal as possible."""
    taken, left = dict.fromkeys(available, 0), count
    for place, name in enumerate(sorted(available, key=available.__getitem__)):
        taken[name] = min(available[name], left // (len(available) - place))
        left -= taken[name]
    return taken


def _batched(rows: Iterator[dict[str, str]], size: int) -> Iterator[list[str]]:
    texts: list[str] = []
    for row in rows:
        texts.append(row["text"])
        if len(texts) == size:
            yield texts
            texts = []
    if texts:
        yield texts


def _write_bytes(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_bytes(data)
