"""Prompts from arguments, files, standard input, or built in."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

Prompt = str | list[int]

BUILT_IN: tuple[Prompt, ...] = (
    "class Point:\n    def __init__(self, x, y):\n",
    "Mia reads 12 pages every day. How many pages does she read in 2 weeks?\n",
    "ROMEO.\n",
)


def read_prompt(text: str, *, token_ids: bool = False) -> Prompt:
    """The prompt that an argument stands for: `-` is all of standard input.

    Args:
      text: the argument.
      token_ids: take the text as integers between spaces or commas.
    """
    if text == "-":
        text = sys.stdin.read()
    return _parse_ids(text) if token_ids else text


def gather_prompts(
    texts: Sequence[str], file: Path | None, *, token_ids: bool = False
) -> list[Prompt]:
    """Prompts of the arguments and then of the file; the built-in ones if there are neither.

    Args:
      texts: arguments, see `read_prompt`.
      file: JSON lines, each an object with `prompt` (text) or `tokens` (ids).
      token_ids: what `texts` hold.

    Raises:
      ValueError: no prompt in the file, or a line without one.
      OSError: the file cannot be read.
    """
    prompts = [read_prompt(text, token_ids=token_ids) for text in texts]
    if file is not None:
        prompts += _read_file(file)
    if not prompts and token_ids:
        raise ValueError("--token-ids needs prompts: the built-in ones are text")
    return prompts or list(BUILT_IN)


def _read_file(file: Path) -> list[Prompt]:
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from None
    lines = text.split("\n")  # a string of JSON may hold other line separators
    prompts = [_parse_line(line, f"{file}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{file} holds no prompt")
    return prompts


def _parse_line(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if isinstance(entry, dict) and entry.keys() >= {"prompt", "tokens"}:
        raise ValueError(f'{where}: give "prompt" or "tokens", not both')
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        return entry["prompt"]
    if isinstance(entry, dict) and isinstance(entry.get("tokens"), list):
        return entry["tokens"]
    raise ValueError(f'{where}: expected an object with "prompt" (text) or "tokens" (ids)')


def _parse_ids(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip(" \t\n,"))
    try:
        return [int(word) for word in words if word]
    except ValueError:
        raise ValueError(f"--token-ids expects integers, got {text[:60]!r}") from None
