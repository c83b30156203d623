"""Training of the byte-level BPE, on a small made-up corpus."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import tfm_jax.text
from tfm_jax.config import ConfigError
from tfm_jax.presets import geometry
from tfm_jax.text import load_tokenizer
from tfm_jax.training.corpus import build_corpus
from tfm_jax.training.tokenizer import (
    QWEN35_PATTERN,
    SPECIAL_TOKENS,
    check_known,
    check_tokens,
    domain_shares,
    train_tokenizer,
)

SHIPPED = Path(tfm_jax.text.__file__).parent / "assets" / "pocket" / "verifier" / "tokenizer.json"
WORDS = ["river", "stone", "cloud", "winter", "garden", "letter", "number", "window", "silver"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    mine = folder / "mine"
    mine.mkdir()
    rng = random.Random(0)
    for n in range(60):
        text = " ".join(rng.choice(WORDS) + rng.choice(["", "s", "ed"]) for _ in range(80))
        (mine / f"{n}.txt").write_text(f"{text} <|im_start|>{n}")
        (mine / f"{n}.py").write_text(f"def {text.replace(' ', '_')}(x):\n    return x + {n}\n")
    build_corpus(folder / "text", text_dirs=[mine], sources=(), progress=False)
    return folder / "text"


def train(corpus: Path, out: Path, **options) -> tokenizers.Tokenizer:
    options = {"mixture": {"prose": 0.5, "code": 0.5}, "vocab_size": 370, **options}
    train_tokenizer(corpus, out, progress=False, **options)
    return tokenizers.Tokenizer.from_file(str(out))


def test_size_special_tokens_and_bytes(corpus, tmp_path):
    trained = train(corpus, tmp_path / "tokenizer.json")
    assert trained.get_vocab_size() == 370
    assert [trained.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    every_character = "".join(map(chr, range(0x20, 0x250)))
    ours = load_tokenizer(tmp_path)
    assert ours.vocab_size == 370
    assert ours.decode(ours.encode(every_character)) == every_character
    assert ours.special_ids == {0, 1, 2, 3}
    assert ours.encode("river<|im_end|>")[-1] == 2


def test_markers_are_not_learned_as_text(corpus, tmp_path):
    vocabulary = train(corpus, tmp_path / "tokenizer.json").get_vocab()
    assert not [
        entry
        for entry in vocabulary
        if "|" in entry and len(entry) > 1 and entry not in SPECIAL_TOKENS
    ]


def test_equal_corpus_gives_equal_file(corpus, tmp_path):
    train(corpus, tmp_path / "a.json")
    train(corpus, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_mixture_decides_what_is_sampled(corpus, tmp_path):
    prose = train(corpus, tmp_path / "a.json", mixture={"prose": 1.0}, vocab_size=310).get_vocab()
    code = train(corpus, tmp_path / "b.json", mixture={"code": 1.0}, vocab_size=310).get_vocab()
    assert "Ġriver" in prose
    assert "Ġriver" not in code
    assert "_river" in code


def test_pre_tokenizer_pieces():
    """Expected pieces worked out by hand from the Qwen3.5 rules."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN35_PATTERN), behavior="isolated")

    def pieces(text):
        return [piece for piece, _ in split.pre_tokenize_str(text)]

    assert pieces("I'll go, OK?\n\nYes") == ["I", "'ll", " go", ",", " OK", "?\n\n", "Yes"]
    assert pieces("a 2024 b") == ["a", " ", "2", "0", "2", "4", " b"]
    assert pieces("if x:\n    y=1") == ["if", " x", ":\n", "   ", " y", "=", "1"]
    # Combining marks stay inside the word, which Qwen3's rule would split.
    assert pieces("e\u0323a हिन्दी") == ["e\u0323a", " हिन्दी"]


def test_text_is_brought_to_normal_form(corpus, tmp_path):
    train(corpus, tmp_path / "tokenizer.json")
    ours = load_tokenizer(tmp_path)
    assert ours.encode("cafe\u0301") == ours.encode("caf\u00e9")


def test_too_small_corpus_and_wrong_options_are_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="corpus is too small"):
        train(corpus, tmp_path / "t.json", vocab_size=8192)
    with pytest.raises(ValueError, match=r"261\.\.65536"):
        train(corpus, tmp_path / "t.json", vocab_size=260)
    with pytest.raises(ValueError, match="falls on"):
        train(corpus, tmp_path / "t.json", mixture={"chat": 1.0})
    with pytest.raises(ValueError, match="not negative"):
        train(corpus, tmp_path / "t.json", mixture={"prose": -1.0})
    with pytest.raises(FileNotFoundError, match="not a corpus"):
        train(tmp_path, tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_shares_leave_out_absent_domains():
    assert domain_shares({"prose": 1, "chat": 2, "code": 3}, ["prose", "code"]) == {
        "prose": 0.25,
        "code": 0.75,
    }


def test_shipped_tokenizer():
    assert SHIPPED.stat().st_size < 1_000_000
    content = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert content["normalizer"] == {"type": "NFC"}
    assert content["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": QWEN35_PATTERN}
    ours = load_tokenizer(SHIPPED)
    assert ours.vocab_size == 8192
    assert [ours.token_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert len(ours.encode("12345")) == 5, "digits stand alone"
    assert len(ours.encode("The children were playing in the garden.")) <= 11


def test_a_configuration_names_the_tokens_of_its_tokenizer():
    sizes = geometry("pocket")
    verifier, drafter = sizes.verifier, sizes.drafter
    check_tokens(SHIPPED, verifier, drafter)
    more = dataclasses.replace(verifier, vocab_size=8320, eos_token_ids=(2, 0))
    check_tokens(SHIPPED, more)
    with pytest.raises(ConfigError, match="has 8192 tokens, the verifier's vocab_size is 8000"):
        check_tokens(SHIPPED, dataclasses.replace(verifier, vocab_size=8000))
    for ends in ((), (0,), (0, 1)):
        wrong = dataclasses.replace(verifier, eos_token_ids=ends)
        with pytest.raises(ConfigError, match=r"the end tokens \[0, 2\], .* eos_token_ids are \["):
            check_tokens(SHIPPED, wrong)
    masked = dataclasses.replace(drafter, mask_token_id=4)
    with pytest.raises(ConfigError, match="mask token 3, the drafter's mask_token_id is 4"):
        check_tokens(SHIPPED, verifier, masked)


def test_a_tokenizer_without_the_layouts_tokens_is_refused_in_one_line(tmp_path):
    described = json.loads(SHIPPED.read_text())
    for entry in described["added_tokens"]:
        entry["content"] = entry["content"].replace("<|", "<")
    del described["model"]["merges"][:]
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = {k.replace("<|", "<"): v for k, v in vocabulary.items()}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(described))
    with pytest.raises(
        ConfigError, match=r"has no <\|endoftext\|>, .*; it has the end tokens \[\]"
    ):
        check_tokens(file, geometry("pocket").verifier)


def test_tokens_beyond_the_vocabulary_are_refused():
    streams = {"a": np.array([3, 9], np.uint16), "b": np.array([4], np.uint16)}
    check_known(Path("corpus"), streams, 10)
    with pytest.raises(ValueError, match="corpus holds token 9, the verifier's vocabulary has 9"):
        check_known(Path("corpus"), streams, 9)
