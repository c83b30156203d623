"""Options that experiments share, and what is checked of them before anything is computed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfm_jax.config import TreeConfig
from tfm_jax.files import check_new_file
from tfm_jax.model import POCKET

DOMAINS = ("prose", "code", "math", "chat")


@contextlib.contextmanager
def refusing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turns what a check raises into the parser's one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        parser.error(str(error))


def prompt_parser(description: str, *, count: int, out: Path) -> argparse.ArgumentParser:
    """Options of an experiment on the evaluation prompts, with these defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=POCKET, help="the embedded trio, or a directory")
    parser.add_argument("--count", type=int, default=count, help="prompts a domain")
    parser.add_argument("--longest-prompt", type=int, default=256, help="in tokens")
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=list(DOMAINS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, default=out, help="file to write")
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    return parser


def read_prompt_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    *counts: str,
    check: Callable[[argparse.Namespace], object],
) -> argparse.Namespace:
    """Options of a `prompt_parser`; it ends the program for those that no run could have.

    Args:
      parser: of `prompt_parser`, perhaps with further options.
      arguments: those of the command line if None.
      counts: names of the further options that must be at least 1.
      check: raises ValueError for others of the further options.
    """
    options = parser.parse_args(arguments)
    with refusing(parser):
        numbers = ("count", "longest_prompt", *counts)
        check_positive(**{name: getattr(options, name) for name in numbers})
        check(options)
        check_new_file(options.out)
    return options


def tree_of(budget: int) -> TreeConfig:
    """A tree of so many nodes, grown ceil(budget / 16) at a time; ValueError for none."""
    return TreeConfig(budget=budget, expand=max(-(-budget // 16), 1))


def check_positive(**numbers: int) -> None:
    """Raises ValueError if one of these numbers is below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
