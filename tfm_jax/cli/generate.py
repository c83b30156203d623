"""`tfm generate`: one prompt, continued."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tfm_jax.cli.options import DeviceOptions, Method, SamplingOptions, TreeOptions
from tfm_jax.cli.output import print_json, progress, show
from tfm_jax.cli.prompts import Prompt, read_prompt
from tfm_jax.cli.trees import describe_tree, draw_tree

if TYPE_CHECKING:
    from tfm_jax.decoding.generate import Stats
    from tfm_jax.model import Generation, Model


def generate(
    prompt: Annotated[str, tyro.conf.arg(metavar="PROMPT")],
    /,
    *,
    model: str = "pocket",
    method: Method = "tfm",
    max_new_tokens: int = 128,
    tree: TreeOptions = TreeOptions(),  # noqa: B008 - frozen
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
    device: DeviceOptions = DeviceOptions(),  # noqa: B008
    token_ids: bool = False,
    show_tree: bool = False,
    tree_round: int = 1,
    json: bool = False,
) -> None:
    """Continue a prompt: text as it is generated, then a line of figures.

    Args:
      prompt: Text to continue; - reads it from standard input.
      model: "pocket", or a directory made by `tfm convert`.
      method: ar is plain decoding; all give the same text in fewer rounds.
      max_new_tokens: Stop after this many tokens, if no end token comes first.
      tree: Shape of the drafts.
      sampling: Choice of tokens.
      device: How the model is held.
      token_ids: The prompt is token ids, between spaces or commas.
      show_tree: Draw the draft tree of a round, the accepted path marked.
      tree_round: The round to draw.
      json: Print one JSON object and nothing else.
    """
    if tree_round < 1:
        raise ValueError(f"--tree-round counts from 1, got {tree_round}")
    if tree_round > 1 and not show_tree:
        raise ValueError("--tree-round needs --show-tree")
    request: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "method": method,
        "tree": tree.config(),
        "sampling": sampling.config(),
    }
    given = read_prompt(prompt, token_ids=token_ids)
    loaded = device.load(model)
    if json:
        result = loaded.generate(given, **request)
        drawn = {"tree": _round(loaded, given, request, tree_round)} if show_tree else {}
        print_json({**_as_json(result), **drawn})
        return
    result = _stream(loaded, given, request)
    show("", _figures(result.stats))
    if show_tree and tree_round > result.stats.rounds:
        raise _no_round(tree_round)
    if show_tree:
        show("", draw_tree(_round(loaded, given, request, tree_round)))


def _stream(model: Model, prompt: Prompt, request: dict[str, Any]) -> Generation:
    """Writes the text as it comes, ids if there is no tokenizer, and returns the whole."""
    pieces = model.stream(prompt, **request)
    with progress("prefill and compilation"):
        piece = next(pieces)
    while isinstance(piece, str):
        sys.stdout.write(piece)
        sys.stdout.flush()
        piece = next(pieces)
    ids = "" if model.tokenizer else " ".join(map(str, piece.tokens))
    sys.stdout.write(f"{ids}\n")
    return piece


def _round(model: Model, prompt: Prompt, request: dict[str, Any], number: int) -> dict[str, Any]:
    rounds = model.rounds(prompt, **request)
    found = next(itertools.islice(rounds, number - 1, None), None)
    if found is None:
        raise _no_round(number)
    tree, acceptance, _ = found
    return describe_tree(model, tree, acceptance, number)


def _no_round(number: int) -> ValueError:
    return ValueError(f"there is no round {number} to draw: generation ended before it")


def _figures(stats: Stats) -> str:
    return (
        f"{stats.emitted_tokens} tokens, {stats.rounds} rounds, "
        f"mean accepted length {stats.mean_accepted_length:.2f}, "
        f"{stats.tokens_per_second:.1f} tokens/s, prefill {stats.prefill_seconds:.2f} s"
    )


def _as_json(result: Generation) -> dict[str, Any]:
    stats = result.stats
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": {**dataclasses.asdict(stats), "tokens_per_second": stats.tokens_per_second},
    }
