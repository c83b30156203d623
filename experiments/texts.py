"""The verifier's own texts after the evaluation prompts: what drafts are compared with."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.options import prompt_parser, read_prompt_options
from tfm_jax.config import Sampling
from tfm_jax.model import Model, load


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
    parser = prompt_parser(description, count=count, out=out)
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(temperatures))
    return parser


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *counts: str
) -> argparse.Namespace:
    """As `read_prompt_options`, for a `text_parser`."""
    return read_prompt_options(parser, arguments, *counts, check=_check_temperatures)


def _check_temperatures(options: argparse.Namespace) -> None:
    for temperature in options.temperatures:
        Sampling(temperature=temperature)


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
