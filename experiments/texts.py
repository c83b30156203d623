"""The verifier's own texts after the evaluation prompts: what drafts are compared with."""

from __future__ import annotations

import dataclasses

from tfm_jax.config import Sampling
from tfm_jax.model import Model


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
