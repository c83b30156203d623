"""`tfm verify`: drafted decoding against plain decoding, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table

from tfm_jax.cli.options import DeviceOptions, TreeOptions
from tfm_jax.cli.output import print_json, progress, show
from tfm_jax.cli.prompts import Prompt, gather_prompts
from tfm_jax.cli.setting import run_setting

if TYPE_CHECKING:
    from tfm_jax.model import Model

# A drafted run sums in another order than a plain one. Logits closer than this may change places.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.25}


def verify(
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")],
    prompts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PROMPT ...")] = (),
    /,
    *,
    prompts_file: Annotated[Path | None, tyro.conf.arg(name="prompts", metavar="FILE")] = None,
    max_new_tokens: int = 128,
    tree: TreeOptions = TreeOptions(),  # noqa: B008 - frozen
    device: DeviceOptions = DeviceOptions(),  # noqa: B008
    token_ids: bool = False,
    json: bool = False,
) -> int:
    """Check that greedy drafted decoding gives the tokens of plain decoding.

    A difference is excused only where the two tokens' logits are so close that rounding decides:
    1e-3 in float32, 0.25 in bfloat16. The exit status is 1 if there is any other.

    Args:
      model: "pocket", or a directory made by `tfm convert`.
      prompts: Texts to continue, built-in ones if there are none.
      prompts_file: JSON lines, each an object with "prompt" (text) or "tokens" (ids).
      max_new_tokens: Stop after this many tokens, if no end token comes first.
      tree: Shape of the drafts.
      device: How the model is held.
      token_ids: The prompts are token ids, between spaces or commas.
      json: Print one JSON object and nothing else.
    """
    if max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens must be at least 1 to compare anything, got {max_new_tokens}"
        )
    shape = tree.config()
    given = gather_prompts(prompts, prompts_file, token_ids=token_ids)
    loaded = device.load(model)
    if len(loaded.methods) == 1:
        raise ValueError(f"{model} holds a verifier alone: there is no drafting to check")
    verifier = loaded.trio.verifier
    bound = ROUNDING[str(verifier.dtype)]
    found = _differences(loaded, given, {"max_new_tokens": max_new_tokens, "tree": shape}, bound)
    passed = all(one["excused"] for differences in found.values() for one in differences)
    if json:
        print_json(
            {
                "passed": passed,
                "identical": not any(found.values()),
                "gap_bound": bound,
                "methods": {
                    method: {
                        "identical_prompts": len(given) - len(differences),
                        "differences": differences,
                    }
                    for method, differences in found.items()
                },
                "setting": {
                    **run_setting(model, verifier.dtype, shape.budget + 1),
                    "prompts": len(given),
                    "max_new_tokens": max_new_tokens,
                    "tree": vars(tree),
                },
            }
        )
    else:
        show(_table(found, len(given)))
        show(f"{'passed' if passed else 'FAILED'}: gaps up to {bound} are rounding")
    return 0 if passed else 1


def _differences(
    model: Model, prompts: list[Prompt], request: dict[str, Any], bound: float
) -> dict[str, list[dict[str, Any]]]:
    """By drafted method, the prompts whose text differs and where it first does."""
    ids = [model.encode(prompt).tolist() for prompt in prompts]
    with progress("plain decoding"):
        plain = [model.generate(prompt, method="ar", **request).tokens for prompt in ids]
    found: dict[str, list[dict[str, Any]]] = {}
    for method in model.methods[1:]:
        found[method] = []
        with progress(method):
            for i, prompt in enumerate(ids):
                drafted = model.generate(prompt, method=method, **request).tokens
                place = first_difference(plain[i], drafted)
                if place is None:
                    continue
                pair = [text[place] if place < len(text) else None for text in (plain[i], drafted)]
                gap = logit_gap(model, prompt + plain[i][:place], pair)
                found[method].append(
                    {
                        "prompt": i,
                        "position": place,
                        "plain": pair[0],
                        "drafted": pair[1],
                        "gap": gap,
                        "excused": gap is not None and gap <= bound,
                    }
                )
    return found


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first token that is not the same; None if the texts are equal."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def logit_gap(model: Model, text: list[int], pair: list[int | None]) -> float | None:
    """How far the worse token of `pair` lies below the best one after `text`.

    The top-2 gap if the pair are the two best tokens, more if not. None if a token is missing.
    """
    tokens = [token for token in pair if token is not None]
    if len(tokens) < len(pair):
        return None
    logits = model.logits(text)[-1, : model.vocab_limit]
    return float(logits.max() - logits[tokens].min())


def _table(found: dict[str, list[dict[str, Any]]], prompts: int) -> Table:
    table = Table("method", "same tokens", "first differences")
    for method, differences in found.items():
        lines = [
            f"prompt {one['prompt']}, token {one['position']}: plain {one['plain']}, "
            f"drafted {one['drafted']}, gap "
            + ("none" if one["gap"] is None else f"{one['gap']:.2g}")
            for one in differences
        ]
        table.add_row(method, f"{prompts - len(differences)}/{prompts}", "\n".join(lines) or "-")
    return table
