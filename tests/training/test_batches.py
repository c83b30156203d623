"""Packing of a corpus and the sampler of training batches."""

import io
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tfm_jax.text import load_tokenizer
from tfm_jax.training import batches
from tfm_jax.training.batches import TokenBatches, load_streams, tokenize_corpus, write_prompts
from tfm_jax.training.corpus import build_corpus, read_documents
from tfm_jax.training.packages import Package
from tfm_jax.training.sources import Source, chat

SHIPPED = Path(batches.__file__).parents[1] / "assets" / "pocket" / "verifier"
STREAMS = {
    "code": np.arange(0, 3_000, dtype=np.uint16),
    "prose": np.arange(10_000, 12_001, dtype=np.uint16),
}
SHORT = np.full(3, 60_000, np.uint16)
MIXTURE = {"prose": 0.25, "code": 0.75}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("batches")
    rng = random.Random(0)
    words = ["the", "small", "river", "runs", "under", "a", "bridge", "and", "<|im_end|>", "turns"]

    def paragraph():
        return " ".join(rng.choice(words) for _ in range(90)) + f" {rng.random()}."

    package = Package("made-up", "1", "pip", "MIT")
    (folder / "cache" / "pip-made-up-1").mkdir(parents=True)
    sources = (
        Source(
            package,
            "docs",
            lambda _: iter("\n\n".join(paragraph() for _ in range(4)) for _ in range(400)),
        ),
        Source(
            package,
            "chat",
            lambda _: iter(
                chat([(f"{n} or {n + 1}?", f"{n} of course, as we all know well")])
                for n in range(300)
            ),
        ),
    )
    build_corpus(folder / "text", sources=sources, cache_dir=folder / "cache", progress=False)
    return folder / "text"


def domains(data: TokenBatches, steps: Iterable[int]) -> list[str]:
    """The stream that each window was cut from, which its first token tells."""
    firsts = np.concatenate([data[step][:, 0] for step in steps])
    return ["math" if t >= 60_000 else "prose" if t >= 10_000 else "code" for t in firsts]


def rows(corpus: Path, split: str, domain: str) -> list[str]:
    return [row["text"] for row in read_documents(corpus, split, domain)]


def test_streams_hold_every_document_closed_by_the_end_token(corpus, tokenizer, tmp_path):
    figures = tokenize_corpus(corpus, tokenizer, tmp_path / "tokens.npz.xz")
    end = tokenizer.token_id("<|endoftext|>")
    for split in ("train", "heldout"):
        streams = load_streams(tmp_path / "tokens.npz.xz", split)
        assert set(streams) == {"docs", "chat"}
        for domain, stream in streams.items():
            assert stream.dtype == np.uint16
            ends = np.flatnonzero(stream == end)
            parts = np.split(stream, ends + 1)
            assert parts.pop().size == 0
            decoded = [tokenizer.decode(part[:-1], skip_special=False) for part in parts]
            expected = rows(corpus, split, domain)
            assert decoded == expected
            size = sum(len(text.encode()) for text in expected)
            assert figures[split][domain] == {
                "documents": len(expected),
                "tokens": stream.size,
                "bytes": size,
                "bytes_per_token": round(size / (stream.size - len(expected)), 3),
            }


def test_special_tokens_are_parsed_in_dialogues_only(corpus, tokenizer, tmp_path):
    tokenize_corpus(corpus, tokenizer, tmp_path / "tokens.npz.xz")
    streams = load_streams(tmp_path / "tokens.npz.xz")
    turn_end = tokenizer.token_id("<|im_end|>")
    assert "<|im_end|>" in rows(corpus, "train", "docs")[0]
    assert turn_end not in streams["docs"]
    assert (streams["chat"] == turn_end).sum() == 2 * len(rows(corpus, "train", "chat"))


def test_packing_is_deterministic_and_complete_or_absent(corpus, tokenizer, tmp_path):
    tokenize_corpus(corpus, tokenizer, tmp_path / "a")
    tokenize_corpus(corpus, tokenizer, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(ValueError, match="split"):
        load_streams(tmp_path / "a", "test")


def test_batch_depends_on_step_and_seed_only():
    first = TokenBatches(STREAMS, MIXTURE, 16, 8, seed=1)
    walked = [first[step] for step in range(300)]
    resumed = TokenBatches(STREAMS, MIXTURE, 16, 8, seed=1)
    for step in (299, 0, 137, 298):
        np.testing.assert_array_equal(resumed[step], walked[step])
    assert walked[0].dtype == np.int32
    assert walked[0].shape == (8, 17)
    other = TokenBatches(STREAMS, MIXTURE, 16, 8, seed=2)
    assert not np.array_equal(other[0], walked[0])
    assert not np.array_equal(walked[0], walked[1])


def test_known_batch_stays_the_same():
    """Resume across releases: the order is part of the contract."""
    got = TokenBatches(STREAMS, MIXTURE, 4, 4, seed=0)[5][:, 0].tolist()
    assert got == [202, 310, 1970, 2370]


def test_windows_are_consecutive_tokens_of_one_domain():
    data = TokenBatches(STREAMS, MIXTURE, 16, 8, seed=3)
    for step in (0, 7, 500):
        for row, domain in zip(data[step], domains(data, [step]), strict=True):
            np.testing.assert_array_equal(np.diff(row), 1)
            assert row[-1] <= STREAMS[domain][-1]


def test_mixture_is_exact_over_a_thousand_windows():
    data = TokenBatches(STREAMS, MIXTURE, 16, 8, seed=4)
    counts = Counter(domains(data, range(125, 250)))
    assert counts == {"code": 750, "prose": 250}
    thirds = TokenBatches(STREAMS, {"prose": 1, "code": 2}, 16, 8)
    counts = Counter(domains(thirds, range(125)))
    assert counts == {"code": 667, "prose": 333}


def test_each_pass_visits_every_window_once_and_offsets_move():
    data = TokenBatches({"code": STREAMS["code"]}, {"code": 1.0}, 16, 1, seed=5)
    windows = (3_000 - 1) // 16 - 1
    passes = [
        [int(data[step][0, 0]) for step in range(turn * windows, (turn + 1) * windows)]
        for turn in range(3)
    ]
    for starts in passes:
        assert np.diff(sorted(starts)).tolist() == [16] * (windows - 1)
        assert sorted(starts) != starts
    assert len({min(starts) for starts in passes}) > 1
    assert passes[0] != passes[1]


def test_zero_weight_domain_may_be_short_and_is_never_used():
    streams = {**STREAMS, "math": SHORT}
    data = TokenBatches(streams, {**MIXTURE, "math": 0.0}, 16, 8)
    assert set(domains(data, range(125))) == {"code", "prose"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixture": {"prose": 1.0, "poetry": 1.0}}, "poetry"),
        ({"mixture": {"prose": -1.0, "code": 1.0}}, ">= 0"),
        ({"mixture": {"prose": float("nan")}}, "finite"),
        ({"mixture": {"prose": 0.0}}, "not all 0"),
        ({"mixture": {}}, "not all 0"),
        ({"seq_len": 0}, "seq_len"),
        ({"batch": 0}, "batch"),
        ({"seq_len": 1500}, "too short"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    options = {"streams": STREAMS, "mixture": MIXTURE, "seq_len": 16, "batch": 8, **change}
    with pytest.raises(ValueError, match=message):
        TokenBatches(**options)


def test_negative_step_is_refused():
    with pytest.raises(IndexError, match="negative"):
        TokenBatches(STREAMS, MIXTURE, 16, 8)[-1]


def test_prompts_begin_held_back_paragraphs(corpus, tokenizer, tmp_path):
    taken = write_prompts(
        corpus, tokenizer, tmp_path / "prompts.json", count=6, length=10, stride=60
    )
    assert sum(taken.values()) == 6
    content = json.loads((tmp_path / "prompts.json").read_text())
    assert content["setting"] == {"length": 10, "stride": 60, "count": 6}
    assert len({prompt["id"] for prompt in content["prompts"]}) == 6
    for prompt in content["prompts"]:
        assert len(prompt["tokens"]) == 10
        assert tokenizer.decode(prompt["tokens"], skip_special=False) == prompt["text"]
        held_back = rows(corpus, "heldout", prompt["domain"])
        starts = [text for text in held_back if prompt["text"] in text]
        assert starts
        if prompt["domain"] == "docs":
            assert any(
                part.startswith(prompt["text"]) for text in starts for part in text.split("\n\n")
            )
    assert len({prompt["text"] for prompt in content["prompts"]}) == 6
    with pytest.raises(ValueError, match="stride"):
        write_prompts(corpus, tokenizer, tmp_path / "p", count=6, length=10, stride=5)


def test_equal_shares_fill_up_from_the_rich_domains():
    assert batches._equal_shares({"a": 3, "b": 100, "c": 50}, 60) == {"a": 3, "b": 29, "c": 28}
    assert batches._equal_shares({"a": 3, "b": 4}, 60) == {"a": 3, "b": 4}


@pytest.mark.parametrize("wrong", ["text", "cut", "array", "floats", "no archive"])
def test_other_files_than_packed_tokens_are_refused(tmp_path: Path, wrong: str) -> None:
    file, inner = tmp_path / "tokens.npz.xz", io.BytesIO()
    array = np.zeros(9, np.float32 if wrong == "floats" else np.uint16)
    if wrong == "array":
        np.save(inner, array)
    else:
        np.savez(inner, **{"train.prose": array})
    data = lzma.compress(b"nothing" if wrong == "no archive" else inner.getvalue())
    file.write_bytes({"text": b"no tokens", "cut": data[:-20]}.get(wrong, data))
    with pytest.raises(ValueError, match=r"tokens\.npz\.xz holds no packed tokens: "):
        load_streams(file)
