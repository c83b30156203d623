"""Where text comes from: a corpus, a user's files, or Python's own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfm_jax
from tfm_jax.training.prepare import prepare
from tfm_jax.training.texts import (
    corpus_sources,
    given_texts,
    packed_corpus,
    sample_folders,
    training_streams,
    vocab_limit_of,
    write_continuations,
)

TOKENIZER = Path(tfm_jax.__file__).parent / "assets" / "pocket" / "verifier" / "tokenizer.json"
OPTIONS = {
    "rows": 4,
    "total": 20,
    "prompt": 10,
    "shortest": 3,
    "batches": 1,
    "greedy_share": 0.5,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).integers(100, 999, 300)
    (folder / "a.txt").write_text(" ".join(f"number {n}," for n in words))
    (folder / "b.md").write_text(
        "# A title\n\nOne short paragraph, no more than a few words long.\n"
    )
    return packed_corpus(None, [folder], TOKENIZER, tmp_path_factory.mktemp("out") / "corpus")


def test_the_sample_is_text_that_every_machine_has() -> None:
    folders = [Path(folder) for folder in sample_folders()]
    assert len(folders) >= 5
    size = sum(f.stat().st_size for folder in folders for f in folder.rglob("*.py"))
    assert size > 1_000_000


def test_a_corpus_that_is_there_is_taken(corpus: Path, tmp_path: Path) -> None:
    before = (corpus / "tokens.npz.xz").stat().st_mtime_ns
    assert packed_corpus(None, [tmp_path / "gone"], TOKENIZER, corpus) == corpus
    assert packed_corpus(corpus, (), TOKENIZER, tmp_path) == corpus
    assert (corpus / "tokens.npz.xz").stat().st_mtime_ns == before


def test_streams_too_short_for_a_window_are_left_out(corpus: Path) -> None:
    assert set(training_streams(corpus, 20)) == {"prose"}
    with pytest.raises(ValueError, match="too short: windows of 5000 tokens need"):
        training_streams(corpus, 5000)


def test_given_texts_are_windows_of_the_corpus(corpus: Path) -> None:
    assert given_texts(corpus, OPTIONS, vocab_limit=8192) is None
    texts = given_texts(corpus, {**OPTIONS, "given": 30}, vocab_limit=8192)
    assert texts is not None
    assert texts.tokens.shape == (30, 20)
    assert set(texts.temperature) == {1}
    stream = training_streams(corpus, 19)["prose"].tolist()
    windows = {tuple(stream[i : i + 20]) for i in range(len(stream))}
    assert {tuple(row) for row in texts.tokens.tolist()} <= windows


def test_wrong_corpora_are_refused(corpus: Path, tmp_path: Path) -> None:
    verifier: Any = None
    with pytest.raises(FileNotFoundError, match="no corpus: it has no tokens"):
        packed_corpus(tmp_path, (), TOKENIZER, tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer\.json to pack text with"):
        packed_corpus(None, (), None, tmp_path)
    foreign = "vocabulary has 83 tokens: it was packed for another model"
    with pytest.raises(ValueError, match=foreign):
        write_continuations(verifier, corpus, OPTIONS, vocab_limit=83)
    with pytest.raises(ValueError, match=foreign):
        given_texts(corpus, {**OPTIONS, "given": 3}, vocab_limit=83)
    with pytest.raises(ValueError, match=r"prompt must lie in 2\.\.total, got 30 of 20"):
        write_continuations(verifier, corpus, {**OPTIONS, "prompt": 30}, vocab_limit=83)


def test_the_rows_that_no_token_has_are_known(tmp_path: Path) -> None:
    assert vocab_limit_of(TOKENIZER.parent, 8320) == 8192
    assert vocab_limit_of(TOKENIZER.parent, 8000) == 8000
    assert vocab_limit_of(tmp_path, 8320) == 8320  # without a tokenizer all count as tokens


def test_packed_text_without_room_for_a_window_is_not_kept(tmp_path: Path) -> None:
    few = "A few words that nobody, however patient, could ever train upon."
    (tmp_path / "a.txt").write_text(few)
    made = tmp_path / "corpus"
    with pytest.raises(ValueError, match="too short: windows of 50 tokens need"):
        packed_corpus(None, [tmp_path], TOKENIZER, made, 50)
    (tmp_path / "a.txt").write_text(" ".join(f"number {n}," for n in range(100)))
    assert training_streams(packed_corpus(None, [tmp_path], TOKENIZER, made, 50), 50)


def test_sources_differ_by_content_and_not_by_place(tmp_path: Path) -> None:
    for folder, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text)
    a, b, c = (corpus_sources(None, [tmp_path / n], TOKENIZER)["text"] for n in "abc")
    assert a["sha256"] == b["sha256"] != c["sha256"]
    assert a["named"] == str(tmp_path / "a")
    with pytest.raises(NotADirectoryError, match="gone does not exist"):
        corpus_sources(None, [tmp_path / "gone"], TOKENIZER)


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    few = ["the", "cat", "saw", "one", "old", "man", "by", "his", "river"]
    words = np.random.default_rng(0).choice(few, 900)
    (tmp_path / "text" / "a.txt").write_text(" ".join(words))
    made = tmp_path / "corpus"
    text = (str(tmp_path / "text"),)
    prepare(made, text_dirs=text, packages=False, vocab_size=270, progress=False)
    with pytest.raises(ValueError, match="packed with another tokenizer"):
        packed_corpus(made, (), TOKENIZER, tmp_path)
