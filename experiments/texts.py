"""The verifier's own texts after the evaluation prompts: what drafts are compared with."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.acceptance import DOMAINS
from experiments.options import check_positive, refusing
from tfm_jax.config import Sampling
from tfm_jax.files import check_new_file
from tfm_jax.model import POCKET, Model, load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and what plain decoding wrote after it.

    Attributes:
      tokens: of both.
      prompt: how many of them are the prompt's.
      seed: of the continuation.
    """

    tokens: list[int]
    prompt: int
    seed: int


def write_texts(
    model: Model, prompts: list[list[int]], temperature: float, new_tokens: int
) -> list[Text]:
    """Continues every prompt by exactly `new_tokens` tokens, prompt i with seed i.

    End tokens do not stop. These are the texts of `experiments.acceptance`.
    """
    texts = []
    for seed, prompt in enumerate(prompts):
        run = model.generate(
            prompt,
            max_new_tokens=new_tokens,
            method="ar",
            sampling=Sampling(temperature=temperature, seed=seed),
            end_tokens=[],
        )
        texts.append(Text(tokens=[*prompt, *run.tokens], prompt=len(prompt), seed=seed))
    return texts


def text_parser(
    description: str, *, temperatures: Sequence[float], count: int, out: Path
) -> argparse.ArgumentParser:
    """Options of an experiment along such texts, with these defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=POCKET, help="the embedded trio, or a directory")
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(temperatures))
    parser.add_argument("--count", type=int, default=count, help="prompts a domain")
    parser.add_argument("--longest-prompt", type=int, default=256, help="in tokens")
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=list(DOMAINS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=out, help="file to write")
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    return parser


def read_options(
    parser: argparse.ArgumentParser, arguments: list[str] | None, *counts: str
) -> argparse.Namespace:
    """Options of a `text_parser`; it ends the program for those that no run could have.

    Args:
      parser: of `text_parser`, perhaps with further options.
      arguments: those of the command line if None.
      counts: names of the further options that must be at least 1.
    """
    options = parser.parse_args(arguments)
    with refusing(parser):
        numbers = ("count", "longest_prompt", *counts)
        check_positive(**{name: getattr(options, name) for name in numbers})
        for temperature in options.temperatures:
            Sampling(temperature=temperature)
        check_new_file(options.out)
    return options


def text_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What such an experiment measures along, as its `measure` takes it."""
    return {
        "model": load(options.model, dtype=options.dtype),
        "name": options.model,
        "temperatures": options.temperatures,
        "count": options.count,
        "longest_prompt": options.longest_prompt,
        "domains": options.domains,
    }
