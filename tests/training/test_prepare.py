"""A corpus is replaced as a whole or not at all, and nothing else in its folder is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tfm_jax
from tfm_jax.training import prepare as module
from tfm_jax.training.prepare import prepare

TOKENIZER = Path(tfm_jax.__file__).parent / "assets" / "pocket" / "verifier" / "tokenizer.json"


@pytest.fixture
def text(tmp_path: Path) -> tuple[str]:
    folder = tmp_path / "mine"
    folder.mkdir()
    write(folder, 0)
    return (str(folder),)


def write(folder: Path, seed: int) -> None:
    words = np.random.default_rng(seed).integers(100, 999, 200)
    (folder / "a.txt").write_text(" ".join(f"number {n}," for n in words))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "nope"}, "nope"),
        ({"vocab_size": 5}, "vocab_size must be in"),
        ({"vocab_size": 60_000}, "the corpus is too small"),
    ],
)
def test_a_failure_leaves_the_corpus_as_it_was(
    tmp_path: Path, text: tuple[str], options: dict, message: str
) -> None:
    out = tmp_path / "new" / "corpus"
    given = {"text_dirs": text, "packages": False, "progress": False}
    with pytest.raises((OSError, ValueError), match=message):
        prepare(out, **given, **options)
    assert not out.exists()
    prepare(out, **given, tokenizer=TOKENIZER)
    assert (out / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes()
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    write(Path(text[0]), 1)
    with pytest.raises((OSError, ValueError), match=message):
        prepare(out, **given, **options)
    assert contents(out) == before


def test_a_new_corpus_replaces_every_part(
    tmp_path: Path, text: tuple[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "corpus"
    given = {"text_dirs": text, "packages": False, "progress": False}
    prepare(out, **given, tokenizer=TOKENIZER)
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    write(Path(text[0]), 1)
    prepare(out, **given, vocab_size=265)
    after = contents(out)
    assert after.keys() == before.keys()
    same = {name for name in after if after[name] == before[name]}
    assert same <= {"notes.txt", "heldout_prompts.json", "text/heldout.prose.jsonl.gz"}

    # Stopped after the text has been moved: no reader takes what is left, a new build replaces it.
    with monkeypatch.context() as patched:
        patched.setattr(module, "PARTS", ("text", "gone"))
        with pytest.raises(FileNotFoundError):
            prepare(out, **given, tokenizer=TOKENIZER)
    assert not (out / "tokens.npz.xz").exists()
    prepare(out, **given, vocab_size=265)
    assert contents(out) == after


@pytest.mark.parametrize("name", ["tokenizer.json", "figures.json", "text"])
def test_files_that_are_no_corpus_are_kept(tmp_path: Path, text: tuple[str], name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(FileExistsError, match=rf"holds {name} and is not a corpus"):
        prepare(out, text_dirs=text, packages=False, tokenizer=TOKENIZER, progress=False)
    assert contents(out) == {name: b"mine"}
