"""`tfm compare`: all methods side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from tfm_jax.cli.options import DeviceOptions, SamplingOptions, TreeOptions
from tfm_jax.cli.output import print_json, progress, show
from tfm_jax.cli.prompts import Prompt, gather_prompts
from tfm_jax.cli.setting import run_setting

if TYPE_CHECKING:
    from tfm_jax.model import Generation, Model

Runs = dict[str, list["Generation"]]
PLAIN = "ar"


def compare(
    prompts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PROMPT ...")] = (),
    /,
    *,
    prompts_file: Annotated[Path | None, tyro.conf.arg(name="prompts", metavar="FILE")] = None,
    model: str = "pocket",
    max_new_tokens: int = 64,
    tree: TreeOptions = TreeOptions(),  # noqa: B008 - frozen
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
    device: DeviceOptions = DeviceOptions(),  # noqa: B008
    token_ids: bool = False,
    json: bool = False,
) -> int:
    """Run all methods on the same prompts: their rounds, speed, and whether the tokens agree.

    The exit status is 1 if tokens differ in float32.

    Args:
      prompts: Texts to continue, built-in ones if there are none.
      prompts_file: JSON lines, each an object with "prompt" (text) or "tokens" (ids).
      model: "pocket", or a directory made by `tfm convert`.
      max_new_tokens: Stop after this many tokens, if no end token comes first.
      tree: Shape of the drafts.
      sampling: Choice of tokens.
      device: How the model is held.
      token_ids: The prompts are token ids, between spaces or commas.
      json: Print one JSON object and nothing else.
    """
    shape, choice = tree.config(), sampling.config()
    given = gather_prompts(prompts, prompts_file, token_ids=token_ids)
    loaded = device.load(model)
    runs = _run(
        loaded, given, {"max_new_tokens": max_new_tokens, "tree": shape, "sampling": choice}
    )
    same = {method: _tokens(results) == _tokens(runs[PLAIN]) for method, results in runs.items()}
    verifier = loaded.trio.verifier
    setting = {
        **run_setting(model, verifier.dtype, shape.budget + 1),
        "prompts": len(given),
        "max_new_tokens": max_new_tokens,
        "tree": vars(tree),
        "sampling": vars(sampling),
    }
    if json:
        print_json(_as_json(loaded, given, runs, same, setting))
    else:
        for prompt, result in zip(given, runs[PLAIN], strict=True):
            show(_texts(loaded, prompt, result), "")
        show(_table(runs, same))
        if setting["platform"] == "cpu":
            show("On a CPU drafting saves rounds, not time: a pass costs as much as its rows.")
    exact = verifier.dtype == "float32"
    return 1 if exact and not all(same.values()) else 0


def _run(model: Model, prompts: list[Prompt], request: dict[str, Any]) -> Runs:
    for prompt in prompts:
        model.encode(prompt)  # a bad prompt is refused before the first one is run
    runs: Runs = {}
    for method in model.methods:
        with progress(f"{method}: compilation and {len(prompts)} prompts"):
            runs[method] = [model.generate(p, method=method, **request) for p in prompts]
    return runs


def _tokens(results: list[Generation]) -> list[list[int]]:
    return [result.tokens for result in results]


def _totals(results: list[Generation]) -> dict[str, float]:
    """Figures over all prompts: a round counts the same whichever prompt it belongs to."""
    stats = [result.stats for result in results]
    rounds, emitted = sum(s.rounds for s in stats), sum(s.emitted_tokens for s in stats)
    seconds = sum(s.decode_seconds for s in stats)
    return {
        "mean_accepted_length": emitted / rounds if rounds else 0.0,
        "rounds": rounds,
        "tokens_per_second": emitted / seconds if seconds else 0.0,
        "emitted_tokens": emitted,
        "drafted_nodes": sum(s.drafted_nodes for s in stats),
        "decode_seconds": seconds,
        "compile_seconds": sum(s.compile_seconds for s in stats),
    }


def _as_json(
    model: Model,
    prompts: list[Prompt],
    runs: Runs,
    same: dict[str, bool],
    setting: dict[str, Any],
) -> dict[str, Any]:
    """`tokens` of a method is one list for one prompt, a list of lists for several."""
    methods = {}
    for method, results in runs.items():
        tokens = _tokens(results)
        methods[method] = {
            "tokens": tokens[0] if len(tokens) == 1 else tokens,
            **_totals(results),
            "same_tokens": same[method],
        }
    details = [
        {
            "prompt": prompt,
            "text": runs[PLAIN][i].text,
            "finish_reason": runs[PLAIN][i].finish_reason,
            "mean_accepted_length": {
                method: results[i].stats.mean_accepted_length for method, results in runs.items()
            },
        }
        for i, prompt in enumerate(prompts)
    ]
    return {
        "methods": methods,
        "identical": all(same.values()),
        "setting": setting,
        "prompts": details,
    }


def _texts(model: Model, prompt: Prompt, result: Generation) -> Text:
    def text(value: Prompt) -> str:
        if isinstance(value, str):
            return value
        return model.decode(value) if model.tokenizer else " ".join(map(str, value)) + " "

    return Text(text(prompt), "dim").append(text(result.tokens), "not dim")


def _table(runs: Runs, same: dict[str, bool]) -> Table:
    table = Table("method")
    for column in ("rounds", "mean accepted length", "tokens/s", "speed", "same tokens"):
        table.add_column(column, justify="right")
    plain = _totals(runs[PLAIN])["tokens_per_second"]
    for method, results in runs.items():
        totals = _totals(results)
        speed = totals["tokens_per_second"]
        table.add_row(
            method,
            str(totals["rounds"]),
            f"{totals['mean_accepted_length']:.2f}",
            f"{speed:.1f}",
            f"{speed / plain:.2f} x" if plain else "-",
            "yes" if same[method] else "NO",
        )
    return table
