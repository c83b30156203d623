"""The tokenizer wrapper and the streaming decoder."""

import itertools
import random
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import tfm_jax.text
from tfm_jax.text import StreamDecoder, Tokenizer, load_tokenizer

HARD_TEXTS = [
    "plain words, 1234 and (punctuation)!\n\n",
    "caffè, naïve, Ångström, Ελληνικά, Русский",
    "مرحبا بالعالم، كيف حالك؟",
    "日本語のテキストと中文",
    "👩\u200d👩\u200d👧\u200d👦 family, 🏳️\u200d🌈 flag, 👍🏽 tone, 🇳🇿",
    "x\u0323\u0307 z\u0335\u0488 stacked marks, हिन्दी, ตัวอักษร",
    "\ttabs\r\nand \u00a0 odd spaces \u2028 end",
]


SHIPPED = load_tokenizer(Path(tfm_jax.text.__file__).parent / "assets" / "pocket" / "verifier")


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return SHIPPED


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """Every byte a token of its own, one special token, one added token with a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    inner.add_tokens(["tool call é"])
    return Tokenizer(inner)


def stream(tokenizer: Tokenizer, pieces: list[list[int]]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(piece) for piece in pieces), decoder.flush()]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_round_trip_of_normal_form_text(shipped, text):
    assert shipped.decode(shipped.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_stream_of_single_bytes_gives_whole_characters_only(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    pieces = stream(byte_tokenizer, [[token] for token in ids])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_stream_in_random_groups_equals_decoding_at_once(shipped, text):
    ids = shipped.encode(text)
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(4))
        edges = [0, *cuts, len(ids)]
        pieces = [ids[a:b] for a, b in itertools.pairwise(edges)]
        assert "".join(stream(shipped, pieces)) == shipped.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 8191), max_size=12), st.integers(0, 12))
def test_stream_equals_decode_for_any_ids(ids, cut):
    assert "".join(stream(SHIPPED, [ids[:cut], ids[cut:]])) == SHIPPED.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=10))
def test_broken_bytes_stream_as_python_replaces_them(data):
    id_of_byte = {SHIPPED.token_bytes(token): token for token in range(4, 260)}
    ids = [id_of_byte[bytes([byte])] for byte in data]
    expected = data.decode("utf-8", errors="replace")
    assert SHIPPED.decode(ids) == expected
    assert "".join(stream(SHIPPED, [[token] for token in ids])) == expected


def test_special_tokens_are_hidden_unless_asked_for(byte_tokenizer):
    ids = byte_tokenizer.encode("a<|end|>b")
    assert len(ids) == 3
    assert byte_tokenizer.decode(ids) == "ab"
    assert byte_tokenizer.decode(ids, skip_special=False) == "a<|end|>b"
    decoder = StreamDecoder(byte_tokenizer, skip_special=False)
    assert decoder.push(ids) + decoder.flush() == "a<|end|>b"
    assert "".join(stream(byte_tokenizer, [ids])) == "ab"


def test_special_names_can_be_ordinary_text(byte_tokenizer):
    ids = byte_tokenizer.encode("a<|end|>", parse_special=False)
    assert len(ids) == 8
    assert byte_tokenizer.decode(ids) == "a<|end|>"
    assert len(byte_tokenizer.encode("a<|end|>")) == 2, "the other mode must not have changed"


def test_added_token_with_a_space_and_an_accent(byte_tokenizer):
    ids = byte_tokenizer.encode("a tool call é b")
    assert byte_tokenizer.token_bytes(257) == "tool call é".encode()
    assert "".join(stream(byte_tokenizer, [[i] for i in ids])) == byte_tokenizer.decode(ids)


def test_ids_beyond_the_vocabulary_give_nothing(byte_tokenizer):
    ids = [*byte_tokenizer.encode("ab"), 5000, *byte_tokenizer.encode("c")]
    assert byte_tokenizer.decode(ids) == "abc"
    assert "".join(stream(byte_tokenizer, [ids])) == "abc"


def test_flush_shows_an_unfinished_character_once(byte_tokenizer):
    ids = byte_tokenizer.encode("ok 👍")[:-1]
    decoder = StreamDecoder(byte_tokenizer)
    assert decoder.push(ids) == "ok "
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_no_beginning_token_and_empty_text(shipped):
    assert shipped.encode("") == []
    assert shipped.decode([]) == ""
    assert not shipped.special_ids & set(shipped.encode("hello"))


def test_wrong_input_is_refused(byte_tokenizer, tmp_path):
    with pytest.raises(TypeError, match="str"):
        byte_tokenizer.encode(b"bytes")
    with pytest.raises(ValueError, match="surrogate"):
        byte_tokenizer.encode("bad \ud83d half")
    with pytest.raises(ValueError, match="negative"):
        byte_tokenizer.decode([3, -1])
    with pytest.raises(KeyError, match="nothing"):
        byte_tokenizer.token_id("<|nothing|>")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="readable"):
        load_tokenizer(tmp_path)
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="byte-level"):
        load_tokenizer(tmp_path / "tokenizer.json")
