"""Builds the training text: fetch, cut into documents, filter, hold back, write.

A corpus is a folder with `train.<domain>.jsonl.gz` and `heldout.<domain>.jsonl.gz`, one
`{"source", "text"}` object a line, and `manifest.json`. Text of the `chat` domain carries the
special tokens of the ChatML layout; in every other domain such names are ordinary text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from tfm_jax.training.packages import FetchError, default_cache, fetch, found_version
from tfm_jax.training.sources import DOMAINS, EVALUATION, SOURCES, Source, read_evaluation

SPLITS = ("train", "heldout")
RUN_WORDS = 13
HELDOUT_SHARE = 0.01
DOCUMENT_CHARS = 8000
MIN_CHARS = 64

_SUFFIXES = {
    "prose": ".txt",
    "docs": ".md .rst",
    "code": ".c .cc .cpp .cu .cuh .go .h .hpp .java .js .py .rs .sh .ts",
    "math": ".tex",
}
SUFFIX_DOMAIN = {
    suffix: domain for domain, suffixes in _SUFFIXES.items() for suffix in suffixes.split()
}


@dataclass
class SourceReport:
    """What one source gave; sizes in UTF-8 bytes of kept text."""

    package: str
    version: str
    client: str
    licence: str
    domain: str
    documents: int = 0
    bytes: int = 0
    heldout_documents: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass
class CorpusReport:
    """What a build wrote; the same content stands in `manifest.json`."""

    documents: dict[str, dict[str, int]]
    bytes: dict[str, dict[str, int]]
    sources: list[SourceReport]
    skipped: dict[str, str]
    overlaps: list[dict[str, str]]
    digests: dict[str, str]
    setting: dict[str, object]


def build_corpus(
    out_dir: str | Path,
    *,
    text_dirs: Sequence[str | Path] = (),
    extras: str = "auto",
    sources: Sequence[Source] = SOURCES,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> CorpusReport:
    """Writes the corpus folder `out_dir` and says what is in it.

    `extras` tells what to do with sources that need npm or apt: "auto" uses those that can be
    fetched and names the others in the report, "none" leaves them out, "all" raises FetchError
    when one is missing. `text_dirs` are folders of a user's own UTF-8 files; the file suffix gives
    the domain. `sources=()` builds from those alone.

    A document is dropped when it shares a run of 13 words with an evaluation prompt, repeats an
    earlier one, is not UTF-8 or is shorter than 64 characters. One document in a hundred, by the
    hash of its text, is held back. Equal inputs give equal files.

    An existing corpus at `out_dir` is replaced once the new one is complete; anything else there
    raises FileExistsError.
    """
    out_dir = Path(out_dir)
    cache = Path(cache_dir) if cache_dir is not None else default_cache()
    if extras not in ("auto", "none", "all"):
        raise ValueError(f'extras must be "auto", "none" or "all", got {extras!r}')
    if out_dir.exists() and not (out_dir / "manifest.json").is_file():
        raise FileExistsError(f"{out_dir} exists and is not a corpus (it has no manifest.json)")
    folders = [Path(folder) for folder in text_dirs]
    check_folders(folders)
    if not sources and not folders:
        raise ValueError("nothing to build from: no sources and no text folders")

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    temporary.chmod(0o755)
    try:
        with _bar(progress) as bar:
            report = _write(temporary, folders, extras, sources, cache, bar)
        _write_json(temporary / "manifest.json", asdict(report))
        if out_dir.exists():
            old = temporary.with_name(temporary.name + "-old")
            out_dir.rename(old)
            temporary.rename(out_dir)
            shutil.rmtree(old)
        else:
            temporary.rename(out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return report


def check_folders(folders: Sequence[Path]) -> None:
    """Raises NotADirectoryError or ValueError for a folder that is missing or has no text."""
    for folder in folders:
        if not folder.is_dir():
            raise NotADirectoryError(f"text folder {folder} does not exist")
        if not any(True for _ in user_files(folder)):
            known = " ".join(sorted(SUFFIX_DOMAIN))
            raise ValueError(f"text folder {folder} holds no file with a known suffix: {known}")


def user_files(folder: Path) -> Iterator[Path]:
    """A user's files that a corpus takes, in its order."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix.lower() in SUFFIX_DOMAIN:
            yield path


def read_documents(corpus_dir: str | Path, split: str, domain: str) -> Iterator[dict[str, str]]:
    """The `{"source", "text"}` documents of one split ("train" or "heldout") and domain."""
    file = Path(corpus_dir) / f"{split}.{domain}.jsonl.gz"
    if not file.is_file():
        raise FileNotFoundError(f"no {split} text of domain {domain!r} in corpus {corpus_dir}")
    with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def corpus_domains(corpus_dir: str | Path) -> list[str]:
    """The domains that have training text, in the fixed order of DOMAINS."""
    manifest = Path(corpus_dir) / "manifest.json"
    if not manifest.is_file():
        raise FileNotFoundError(f"{corpus_dir} is not a corpus: it has no manifest.json")
    counts = json.loads(manifest.read_text())["documents"]["train"]
    return [domain for domain in DOMAINS if counts.get(domain)]


def evaluation_prompts() -> list[str]:
    """Every user turn of the shipped evaluation prompts."""
    prompts = []
    for domain in ("chat", "code", "math"):
        file = resources.files("tfm_jax") / "assets" / "prompts" / f"{domain}.jsonl"
        for line in file.read_text(encoding="utf-8").strip().split("\n"):
            row = json.loads(line)
            prompts.extend(row.get("turns", [row["prompt"]]))
    return prompts


def word_runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of 13 consecutive words of `text`, lower-cased, punctuation ignored."""
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[start:] for start in range(RUN_WORDS)), strict=False)


def cut(text: str, limit: int = DOCUMENT_CHARS) -> Iterator[str]:
    """Pieces of at most `limit` characters whose concatenation is `text`.

    A piece ends at the widest gap in its second half: between sections, paragraphs, lines,
    sentences, words.
    """
    start = 0
    while len(text) - start > limit:
        middle, end = start + limit // 2, start + limit
        for gap in ("\n\n\n", "\n\n", "\n", ". ", " "):
            place = text.rfind(gap, middle, end)
            if place >= 0:
                end = place + len(gap)
                break
        yield text[start:end]
        start = end
    yield text[start:]


def is_heldout(digest: bytes) -> bool:
    """Whether the document of this SHA-256 digest belongs to the held-back hundredth."""
    return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


class _Writer:
    """Filters documents and appends them to the files of their split and domain."""

    def __init__(self, folder: Path, prompts: Iterable[str], stack: ExitStack):
        self.runs = {run: prompt for prompt in prompts for run in word_runs(prompt)}
        self.folder, self.stack = folder, stack
        self.files: dict[str, gzip.GzipFile] = {}
        self.digests: dict[str, hashlib._Hash] = {}
        self.seen: set[bytes] = set()
        self.documents = {split: Counter() for split in SPLITS}
        self.bytes = {split: Counter() for split in SPLITS}
        self.overlaps: list[dict[str, str]] = []

    def add_work(self, work: str, source: SourceReport) -> int:
        """Cuts and keeps one work; returns the bytes kept."""
        before = source.bytes
        work = unicodedata.normalize("NFC", work.replace("\r\n", "\n").replace("\r", "\n"))
        # Dialogues are short and lose their sense when cut.
        for text in [work] if source.domain == "chat" else cut(work):
            text = text.strip("\n") + "\n"
            if len(text) < MIN_CHARS:
                self.drop("short", source)
            elif "\ufffd" in text or "\0" in text:
                self.drop("not UTF-8 text", source)
            else:
                self._add_document(text, source)
        return source.bytes - before

    def _add_document(self, text: str, source: SourceReport) -> None:
        data = text.encode()
        digest = hashlib.sha256(data).digest()
        if digest[:16] in self.seen:
            return self.drop("duplicate", source)
        self.seen.add(digest[:16])
        if not self.runs.keys().isdisjoint(word_runs(text)):
            shared = next(run for run in word_runs(text) if run in self.runs)
            self.overlaps.append(
                {
                    "source": source.package,
                    "domain": source.domain,
                    "words": " ".join(shared),
                    "prompt": self.runs[shared][:80],
                }
            )
            return self.drop("overlap", source)
        split = "heldout" if is_heldout(digest) else "train"
        row = json.dumps({"source": source.package, "text": text}) + "\n"
        self._file(split, source.domain).write(row.encode())
        self.digests[f"{split}.{source.domain}"].update(row.encode())
        self.documents[split][source.domain] += 1
        self.bytes[split][source.domain] += len(data)
        source.documents += 1
        source.bytes += len(data)
        source.heldout_documents += split == "heldout"

    def drop(self, reason: str, source: SourceReport) -> None:
        source.dropped[reason] = source.dropped.get(reason, 0) + 1

    def _file(self, split: str, domain: str) -> gzip.GzipFile:
        name = f"{split}.{domain}"
        if name not in self.files:
            raw = self.stack.enter_context((self.folder / f"{name}.jsonl.gz").open("wb"))
            # No file name and no time in the header: equal text gives equal bytes.
            self.files[name] = self.stack.enter_context(
                gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=4, mtime=0)
            )
            self.digests[name] = hashlib.sha256()
        return self.files[name]


def _write(
    folder: Path,
    text_dirs: list[Path],
    extras: str,
    sources: Sequence[Source],
    cache: Path,
    bar: Progress,
) -> CorpusReport:
    """Writes all text files into `folder`."""
    skipped: dict[str, str] = {}
    used = [source for source in sources if not (source.extra and extras == "none")]
    steps = bar.add_task("fetching", total=len(used) + len(text_dirs))
    prompts = evaluation_prompts()
    # The default sources bring their benchmarks' whole files; a user's own text does not.
    for package in EVALUATION if sources is SOURCES else ():
        bar.update(steps, description=f"evaluation prompts of {package.name}")
        try:
            prompts.extend(read_evaluation(fetch(package, cache)))
        except FetchError as error:
            skipped[package.name] = str(error)

    reports = []
    with ExitStack() as stack:
        writer = _Writer(folder, prompts, stack)
        for source in used:
            package = source.package
            bar.update(steps, description=f"{source.domain}: {package.name}")
            report = SourceReport(
                package.name, package.version, package.client, package.licence, source.domain
            )
            try:
                place = fetch(package, cache)
                report.version = found_version(package, place)
                # Read whole before writing: a source that fails half-way leaves nothing behind.
                works = list(source.read(place))
                if not works:
                    raise FetchError(f"{package.name}: no text found in the package")
            except FetchError as error:
                if not source.extra or extras == "all":
                    raise
                skipped[package.name] = str(error)
            else:
                _add_source(writer, report, works, source.limit)
                reports.append(report)
            bar.advance(steps)
        for text_dir in text_dirs:
            bar.update(steps, description=f"your text: {text_dir.name}")
            reports.extend(_add_text_dir(writer, text_dir))
            bar.advance(steps)
        bar.update(steps, description="done")
    return CorpusReport(
        documents={split: dict(writer.documents[split]) for split in SPLITS},
        bytes={split: dict(writer.bytes[split]) for split in SPLITS},
        sources=reports,
        skipped=skipped,
        overlaps=writer.overlaps,
        digests={name: value.hexdigest() for name, value in sorted(writer.digests.items())},
        setting={
            "run_words": RUN_WORDS,
            "heldout_share": HELDOUT_SHARE,
            "document_chars": DOCUMENT_CHARS,
            "min_chars": MIN_CHARS,
            "evaluation_prompts": len(prompts),
            "extras": extras,
        },
    )


def _add_source(writer: _Writer, report: SourceReport, works: list[str], limit: int | None) -> None:
    kept = 0
    for place, work in enumerate(works):
        if limit is not None and kept + len(work.encode()) > limit:
            report.dropped["works over the limit"] = len(works) - place
            return
        kept += writer.add_work(work, report)


def _add_text_dir(writer: _Writer, folder: Path) -> list[SourceReport]:
    reports = {}
    for path in user_files(folder):
        domain = SUFFIX_DOMAIN[path.suffix.lower()]
        if domain not in reports:
            reports[domain] = SourceReport(folder.name, "", "text", "the user's own", domain)
        try:
            work = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            writer.drop("not UTF-8 text", reports[domain])
        else:
            writer.add_work(work, reports[domain])
    return [reports[domain] for domain in DOMAINS if domain in reports]


def _bar(shown: bool) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
