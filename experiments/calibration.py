"""Are the scores that trees grow by as sure as they should be?

    python -m experiments.calibration [--count 6]

A tree takes paths by their probability under Weaver (`tfm`) or the marginals (`ddtree`). Scores
that are too sure of themselves make trees too narrow, unsure ones too wide; dividing them by
another temperature would help either. Every text is replayed with several (`experiments.ablation`).
Writes `calibration.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

from experiments.ablation import Method, Variant, measure
from experiments.store import store
from experiments.texts import read_options, text_arguments, text_parser

RESULT = Path(__file__).parent / "results" / "calibration.json"
METHODS: tuple[Method, ...] = ("ddtree", "tfm")
TEMPERATURES = (0.5, 0.7, 0.85, 1.2, 1.5)


def variants(method: Method) -> list[Variant]:
    """A method's own scores, which the others are compared with: the same cooled and heated."""
    others = [Variant(part="scores", method=method, score_temperature=t) for t in TEMPERATURES]
    return [Variant(part="base", method=method), *others]


def main(arguments: list[str] | None = None) -> None:
    parser = text_parser(
        "Accepted length with scores cooled and heated.",
        temperatures=(0.0, 1.0),
        count=6,
        out=RESULT,
    )
    parser.add_argument("--new-tokens", type=int, default=96)
    options = read_options(parser, arguments, "new_tokens")
    settings = [setting for method in METHODS for setting in variants(method)]
    given = text_arguments(options)
    result = measure(**given, settings=settings, new_tokens=options.new_tokens)
    store(options.out, result)
    if options.json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        low, high = row["to_base_ci95"]
        print(
            f"T = {row['temperature']:g}  {row['method']:6s}  x {row['score_temperature']:4g}  "
            f"{row['mean_accepted_length']:.3f}  {row['to_base']:.1%} ({low:.1%} to {high:.1%})"
        )


if __name__ == "__main__":
    main()
