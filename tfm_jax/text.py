"""Text to token ids and back: byte-level BPE files in the `tokenizer.json` layout."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in the file `path`, or in `path/tokenizer.json`.

    Raises FileNotFoundError when there is none and ValueError when the file is not a byte-level
    tokenizer.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer at {file}: expected a tokenizer.json file")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file} is not a readable tokenizer.json: {error}") from error
    return Tokenizer(inner)


def known_ids(tokenizer: Tokenizer | None, rows: int) -> int:
    """How many of a vocabulary's rows stand for tokens; without a tokenizer all do."""
    return rows if tokenizer is None else min(rows, tokenizer.vocab_size)


class Tokenizer:
    """Encodes and decodes with a byte-level BPE; never adds a beginning-of-text token."""

    def __init__(self, inner: tokenizers.Tokenizer):
        decoder = json.loads(inner.to_str())["decoder"]
        if decoder is None or decoder["type"] != "ByteLevel":
            raise ValueError(
                "expected a byte-level tokenizer (decoder ByteLevel), got decoder "
                f"{None if decoder is None else decoder['type']}"
            )
        self._inner = inner
        self._plain = tokenizers.Tokenizer.from_str(inner.to_str())
        self._plain.encode_special_tokens = True
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which decoding leaves out by default."""
        return self._special

    def token_id(self, token: str) -> int:
        """The id of one vocabulary entry; KeyError when there is none."""
        found = self._inner.token_to_id(token)
        if found is None:
            raise KeyError(f"token {token!r} is not in the vocabulary")
        return found

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        With `parse_special` a special token's name inside the text, such as `<|im_end|>`, becomes
        that token; without it the name is ordinary text.
        """
        return self.encode_batch([text], parse_special=parse_special)[0]

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool = True) -> list[list[int]]:
        """Token ids of each text, as `encode` gives them, on all cores."""
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"text must be str, got {type(text).__name__}")
            if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
                raise ValueError("text holds a lone surrogate, which has no UTF-8 form")
        inner = self._inner if parse_special else self._plain
        return [item.ids for item in inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of all `ids` at once; bytes that are not UTF-8 come as U+FFFD.

        Ids without a vocabulary entry (a model's padded rows) give nothing. Raises ValueError for
        a negative id.
        """
        ids = [int(token) for token in ids]
        if any(token < 0 for token in ids):
            raise ValueError(f"token ids must not be negative, got {min(ids)}")
        return self._inner.decode(ids, skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for; empty for an id without a vocabulary entry."""
        if token < 0:
            raise ValueError(f"token ids must not be negative, got {token}")
        entry = self._inner.id_to_token(token)
        if entry is None:
            return b""
        try:
            return bytes(_BYTE_OF[char] for char in entry)
        except KeyError:
            # An added token is stored as plain text, not in the byte alphabet.
            return entry.encode()


class StreamDecoder:
    """Text of a growing list of ids, in pieces that never hold half a character.

    The concatenation of all pieces equals `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text completed by `ids`; bytes of an unfinished character are kept back."""
        shown = (int(token) for token in ids)
        data = b"".join(self._tokenizer.token_bytes(t) for t in shown if t not in self._hidden)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The kept-back bytes as U+FFFD, or ""; call once after the last id."""
        return self._utf8.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of the byte-level alphabet.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 and up (the
    GPT-2 scheme).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    assert set(table) == set(ByteLevel.alphabet())
    return table


_BYTE_OF = _byte_alphabet()
