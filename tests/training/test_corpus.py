"""The corpus builder, on made-up packages that already lie in the cache folder."""

import gzip
import hashlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.training import packages
from tfm_jax.training.corpus import (
    build_corpus,
    corpus_domains,
    cut,
    evaluation_prompts,
    is_heldout,
    read_documents,
    word_runs,
)
from tfm_jax.training.packages import FetchError, Package, fetch, members
from tfm_jax.training.sources import (
    SOURCES,
    Source,
    chat,
    code_files,
    files,
    read_chatterbot,
    read_codeio,
    read_factbook,
    read_jargon,
    read_metamath,
    read_postgresql,
    read_wordnet,
    without_licence,
)

PACKAGE = Package("made-up", "1.0", "pip", "MIT")
EXTRA = Package("made-up-extra", "2", "apt", "CC0-1.0")


def sentence(number: int) -> str:
    """Twenty words that no other number gives."""
    rng = random.Random(number)
    return " ".join(f"w{rng.randrange(10**9)}" for _ in range(20)) + "."


def put(cache: Path, package: Package, contents: dict[str, str]) -> None:
    folder = cache / f"{package.client}-{package.name}-{package.version}"
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())


def build(tmp_path: Path, contents: dict[str, str], **options):
    put(tmp_path / "cache", PACKAGE, contents)
    sources = (Source(PACKAGE, "prose", files(r"\.txt$")),)
    options = {"sources": sources, "cache_dir": tmp_path / "cache", "progress": False, **options}
    return build_corpus(tmp_path / "out", **options)


def texts(folder: Path, domain: str = "prose") -> dict[str, list[str]]:
    """Texts by split; a split without documents has no file."""
    found = {}
    for split in ("train", "heldout"):
        exists = (folder / f"{split}.{domain}.jsonl.gz").is_file()
        rows = read_documents(folder, split, domain) if exists else ()
        found[split] = [row["text"] for row in rows]
    return found


def kept(folder: Path, domain: str = "prose") -> list[str]:
    found = texts(folder, domain)
    return found["train"] + found["heldout"]


def test_every_document_is_in_exactly_one_split_chosen_by_its_hash(tmp_path):
    contents = {f"{n:04d}.txt": sentence(n) for n in range(1200)}
    report = build(tmp_path, contents)
    found = texts(tmp_path / "out")
    assert sorted(found["train"] + found["heldout"]) == sorted(
        text + "\n" for text in contents.values()
    )
    for split, rows in found.items():
        for text in rows:
            first = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
            assert (first < 0.01) == (split == "heldout")
    assert 2 <= len(found["heldout"]) <= 30
    assert report.documents["heldout"]["prose"] == len(found["heldout"])
    assert corpus_domains(tmp_path / "out") == ["prose"]


def test_heldout_share_is_one_in_a_hundred():
    hits = sum(is_heldout(hashlib.sha256(str(n).encode()).digest()) for n in range(50_000))
    assert 430 < hits < 570  # 500 expected, three standard deviations are 67


def test_document_sharing_13_words_with_a_prompt_is_dropped_and_12_words_are_not(tmp_path):
    prompt = next(p for p in evaluation_prompts() if "digits(n)" in p)
    words = [word for run in word_runs(prompt) for word in run[:1]]
    taken = words[2:15]
    contents = {
        "shares13.txt": f"{sentence(1)} {'; '.join(taken).upper()} {sentence(2)}",
        "shares12.txt": f"{sentence(3)} {'; '.join(taken[:12])} {sentence(4)}",
        "far.txt": sentence(5),
    }
    report = build(tmp_path, contents)
    assert len(kept(tmp_path / "out")) == 2
    assert report.sources[0].dropped == {"overlap": 1}
    assert report.overlaps[0]["words"] == " ".join(taken)
    assert prompt.startswith(report.overlaps[0]["prompt"])


def test_second_turns_of_chat_prompts_are_filtered_too():
    prompts = evaluation_prompts()
    assert len(prompts) == 40 + 40 + 80
    assert all(isinstance(prompt, str) and prompt for prompt in prompts)


def test_equal_inputs_give_equal_bytes(tmp_path):
    contents = {f"{n}.txt": sentence(n) for n in range(300)}
    build(tmp_path / "a", contents)
    build(tmp_path / "b", dict(reversed(contents.items())))
    first = {p.name: p.read_bytes() for p in (tmp_path / "a" / "out").iterdir()}
    second = {p.name: p.read_bytes() for p in (tmp_path / "b" / "out").iterdir()}
    assert first == second
    manifest = json.loads(first["manifest.json"])
    text = gzip.decompress(first["train.prose.jsonl.gz"])
    assert manifest["digests"]["train.prose"] == hashlib.sha256(text).hexdigest()


def test_duplicates_short_texts_and_broken_text_are_counted(tmp_path):
    contents = {
        "a.txt": sentence(1),
        "b.txt": sentence(1) + "\r\n",
        "c.txt": "too short",
        "d.txt": sentence(2) + "\0",
        "e.txt": "\n\n" + sentence(3),
    }
    report = build(tmp_path, contents)
    assert report.sources[0].dropped == {"duplicate": 1, "short": 1, "not UTF-8 text": 1}
    assert sorted(kept(tmp_path / "out")) == sorted([sentence(1) + "\n", sentence(3) + "\n"])
    assert report.sources[0].documents == 2
    assert report.sources[0].bytes == len(sentence(1)) + len(sentence(3)) + 2


def test_limit_caps_a_source_at_whole_works(tmp_path):
    put(tmp_path / "cache", PACKAGE, {f"{n}.txt": sentence(n) for n in range(9)})
    size = sum(len(sentence(n)) for n in range(3)) + 10
    sources = (Source(PACKAGE, "prose", files(r"\.txt$"), limit=size),)
    report = build(tmp_path, {}, sources=sources)
    assert report.sources[0].documents == 3
    assert report.sources[0].dropped == {"works over the limit": 6}


def test_failing_source_leaves_the_old_corpus_and_no_scraps(tmp_path):
    build(tmp_path, {"a.txt": sentence(1)})
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def broken(folder):
        yield sentence(2)
        raise FetchError("the archive ends early")

    with pytest.raises(FetchError, match="ends early"):
        build(tmp_path, {}, sources=(Source(PACKAGE, "prose", broken),))
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "out"]
    build(tmp_path, {"b.txt": sentence(3)})
    assert sorted(kept(tmp_path / "out")) == sorted([sentence(1) + "\n", sentence(3) + "\n"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "out"]


def test_extras_are_used_named_or_required(tmp_path, monkeypatch):
    sources = (
        Source(PACKAGE, "prose", files(r"\.txt$")),
        Source(EXTRA, "docs", files(r"\.txt$")),
    )
    contents = {"a.txt": sentence(1)}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    report = build(tmp_path, contents, sources=sources)
    assert list(report.skipped) == ["made-up-extra"]
    assert "apt-get" in report.skipped["made-up-extra"]
    with pytest.raises(FetchError, match="apt-get"):
        build(tmp_path, contents, sources=sources, extras="all")
    assert build(tmp_path, contents, sources=sources, extras="none").skipped == {}
    put(tmp_path / "cache", EXTRA, {"b.txt": sentence(2), "VERSION": "2.1-3\n"})
    report = build(tmp_path, contents, sources=sources, extras="all")
    assert [source.version for source in report.sources] == ["1.0", "2.1-3"]
    assert kept(tmp_path / "out", "docs") == [sentence(2) + "\n"]


def test_user_text_goes_to_the_domain_of_its_suffix(tmp_path):
    mine = tmp_path / "mine"
    (mine / "sub").mkdir(parents=True)
    (mine / "a.txt").write_text(sentence(1))
    (mine / "sub" / "b.py").write_text(sentence(2))
    (mine / "c.md").write_text(sentence(3))
    (mine / "d.bin").write_bytes(b"ignored")
    (mine / "e.txt").write_bytes(b"\xff\xfe" + sentence(4).encode())
    report = build(tmp_path, {}, sources=(), text_dirs=[mine])
    for domain, number in (("prose", 1), ("code", 2), ("docs", 3)):
        assert kept(tmp_path / "out", domain) == [sentence(number) + "\n"]
    prose = next(source for source in report.sources if source.domain == "prose")
    assert prose.dropped == {"not UTF-8 text": 1}


def test_wrong_input_is_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match="extras"):
        build(tmp_path, {}, extras="some")
    with pytest.raises(ValueError, match="nothing to build"):
        build(tmp_path, {}, sources=())
    with pytest.raises(NotADirectoryError, match="absent"):
        build(tmp_path, {}, text_dirs=[tmp_path / "absent"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file with a known suffix"):
        build(tmp_path, {}, text_dirs=[tmp_path / "empty"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="not a corpus"):
        build(tmp_path, {"a.txt": sentence(1)})
    assert (tmp_path / "out" / "thesis.txt").read_text() == "keep me"
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        corpus_domains(tmp_path)


@given(st.text(alphabet="ab \n.", max_size=400), st.integers(2, 60))
def test_cut_loses_nothing_and_keeps_the_limit(text, limit):
    pieces = list(cut(text, limit))
    assert "".join(pieces) == text
    assert all(len(piece) <= limit for piece in pieces)


def test_cut_prefers_the_widest_gap():
    text = "a" * 60 + "\n\n" + "b" * 20 + "\n" + "c" * 60
    assert list(cut(text, 100)) == ["a" * 60 + "\n\n", "b" * 20 + "\n" + "c" * 60]


def test_fetch_checks_the_digest_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def fake_pip(package, folder):
        (folder / "made_up-1.0-py3-none-any.whl").write_bytes(b"not what was pinned")

    monkeypatch.setattr(packages, "_pip", fake_pip)
    with pytest.raises(FetchError, match="expected one archive of sha256 00ff"):
        fetch(Package("made-up", "1.0", "pip", "MIT", sha256="00ff"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    digest = hashlib.sha256(b"not what was pinned").hexdigest()
    folder = fetch(Package("made-up", "1.0", "pip", "MIT", sha256=digest), tmp_path)
    assert [path.name for path in folder.iterdir()] == ["made_up-1.0-py3-none-any.whl"]


def test_members_are_sorted_decompressed_and_links_dropped(tmp_path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a"))
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    assert list(members(tmp_path, r"\.txt")) == [("a.txt.gz", b"a"), ("b.txt", b"b")]


def test_shipped_prompts_hold_no_solutions():
    folder = Path(packages.__file__).parents[1] / "assets" / "prompts"
    for domain in ("chat", "code", "math"):
        text = (folder / f"{domain}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.strip().split("\n")]
        assert len(rows) == 40
        assert not any({"test", "reference"} & set(row) for row in rows)
        assert len({row["id"] for row in rows}) == 40


def test_sources_are_pinned_or_extra():
    for source in SOURCES:
        assert source.package.sha256 or source.package.client == "apt"
    domains = {source.domain for source in SOURCES if not source.extra}
    assert domains == {"prose", "docs", "code", "math", "chat"}, "pip alone must be enough"


def test_reader_wordnet(tmp_path):
    line = '00001740 03 n 02 dog_house 0 big(a) 0 000 | a shelter; "a small one"  \n'
    nested = tmp_path / "usr" / "wordnet"
    nested.mkdir(parents=True)
    (nested / "data.noun").write_text("  1 licence text\n" + line)
    assert list(read_wordnet(tmp_path)) == ['dog house, big: a shelter; "a small one"\n']


def test_reader_metamath(tmp_path):
    (tmp_path / "db").mkdir()
    log = "$( 1-Jan-20 abc [same] moved from here to there, a long line of change log $)"
    good = (
        "$( The sum of two odd numbers is an\n even number of ` A ` .\n"
        " (Contributed by A B, 1-Jan-2020.) $)"
    )
    (tmp_path / "db" / "set.mm").write_text(f"{log}\n x $a y $.\n{good}\n$( short $)\n")
    assert list(read_metamath(tmp_path)) == [
        "The sum of two odd numbers is an even number of ` A ` .\n"
    ]


def test_reader_postgresql(tmp_path):
    page = (
        '<html><head><title>T</title></head><body><div class="navheader"><b>Prev</b></div>'
        "<h1>Copy</h1><p>a&lt;b&nbsp;c</p><pre>x\n  y</pre>"
        '<div class="navfooter">Next</div></body></html>'
    )
    (tmp_path / "doc" / "html").mkdir(parents=True)
    (tmp_path / "doc" / "html" / "p.html").write_text(page)
    assert list(read_postgresql(tmp_path)) == ["Copy\na<b c\nx\n  y\n"]


def test_reader_chatterbot(tmp_path):
    yaml = (
        "categories:\n- tests\nconversations:\n"
        "- - Hi there.\n  - 'It''s me.'\n"
        "- - can you code?\n  - |\n    Sure:\n\n        x = 1\n"
        "- - no answer\n"
    )
    (tmp_path / "data" / "english").mkdir(parents=True)
    (tmp_path / "data" / "english" / "a.yml").write_text(yaml)
    assert list(read_chatterbot(tmp_path)) == [
        chat([("Hi there.", "It's me.")]),
        chat([("can you code?", "Sure:\n\n    x = 1")]),
    ]
    assert chat([("q", "a")]) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )


def test_reader_codeio_takes_both_layouts(tmp_path):
    row = {"task_description": "Add.", "input_output_spec": "In: a", "code_sample": "x = 1\n"}
    foreign = {**row, "task_description": "Añade."}
    (tmp_path / "data").mkdir()
    lines = "\n".join(map(json.dumps, [row, foreign]))
    (tmp_path / "data" / "codeio.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    array = json.dumps([row]).encode()
    (tmp_path / "data" / "codeio-hq.jsonl.gz").write_bytes(gzip.compress(array))
    assert list(read_codeio(tmp_path)) == ["Add.\n\nIn: a\n\n```python\nx = 1\n```\n"] * 2


def test_reader_factbook(tmp_path):
    profile = {
        "Geography": {
            "Climate": {
                "text": "mild <b>and</b> pleasant in every month; ++ somewhat cooler on the hills"
            },
            "Coastline": {"text": "0 km"},
        },
        "Government": {"Country name": {"conventional short form": {"text": "Utopia"}}},
    }
    (tmp_path / "package" / "europe").mkdir(parents=True)
    (tmp_path / "package" / "europe" / "ut.json").write_text(json.dumps(profile))
    (dialogue,) = read_factbook(tmp_path)
    assert "Utopia" in dialogue
    assert "climate" in dialogue
    assert "0 km" not in dialogue
    assert "<b>" not in dialogue


def test_reader_jargon(tmp_path):
    body = (
        "00-database-info\nabout the file itself, and long enough to be taken for an entry\n\n"
        "foo\n /foo/\n\n    [common] A {sample} name for\n    anything at all.\n\n"
        "    Second paragraph here."
    )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "jargon.dict.dz").write_bytes(gzip.compress(body.encode()))
    assert list(read_jargon(tmp_path)) == [
        chat(
            [
                (
                    'What does "foo" mean?',
                    "[common] A sample name for anything at all.\n\nSecond paragraph here.",
                )
            ]
        )
    ]


def test_code_loses_licence_headers_only(tmp_path):
    licensed = "# Copyright\n#\n# Licensed under X\n\nimport os\n# licence of os\n"
    assert without_licence(licensed) == "import os\n# licence of os\n"
    assert without_licence("# A helper.\nimport os\n") == "# A helper.\nimport os\n"
    (tmp_path / "a.py").write_text(licensed)
    (tmp_path / "b.py").write_text("x = 1\n")
    assert sorted(code_files(r"\.py$", spread=True)(tmp_path)) == [
        "import os\n# licence of os\n",
        "x = 1\n",
    ]
