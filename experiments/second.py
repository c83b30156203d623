"""Another edition of the pocket trio: drafter and Weaver anew, for the same verifier.

    python -m experiments.second continuations dflash weaver measure --corpus build/corpus --out DIR

The verifier of the package writes texts, a drafter and a Weaver learn from them
(`configs/pocket.json`, or another `--config`), and both editions, the packaged trio ("first") and
the new one ("second"), are measured along texts of that verifier after the same prompts, also by
how predictable those texts are. Steps read what the steps before them left in DIR, so they may run
in several calls. Written for one GPU. `measure` writes `second.json` in DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import tfm_jax
from experiments.larger import Prompting, Work, measure, networks_of, show
from experiments.options import refusing
from experiments.progress import log
from experiments.text_sets import check_corpus, heldout_prompts, rows_by_entropy
from pallas_kernels.choice import automatic
from tfm_jax.checkpoints.opened import open_verifier
from tfm_jax.files import whole_file
from tfm_jax.model import POCKET, directory
from tfm_jax.training.leftovers import network_digest, recorded
from tfm_jax.training.pocket import CONFIG, PROVENANCE, STAGES, plan_stage, train_stage

TRAINING = STAGES[1:]  # all but the verifier
STEPS = (*TRAINING, "measure")
RESULT = "second.json"


def begin(out: Path) -> None:
    """Puts the package's verifier, and the record of how it was trained, into the folder."""
    if (out / "verifier").is_dir():
        return
    out.mkdir(parents=True, exist_ok=True)
    pocket = directory(POCKET)
    entry = recorded(pocket / PROVENANCE)["verifier"]
    unfinished = out / ".verifier"  # known by `check_verifier`, should this stop half-way
    shutil.copytree(pocket / "verifier", unfinished, dirs_exist_ok=True)
    with whole_file(out / PROVENANCE) as partial:
        partial.write_text(json.dumps({"verifier": entry}, indent=1) + "\n", "utf-8")
    unfinished.rename(out / "verifier")


def check_verifier(out: Path) -> None:
    """Refuses a folder that holds another verifier than the package's, or what `begin` replaces.

    Raises:
      ValueError: it does.
    """
    if not (out / "verifier").is_dir():
        if (out / PROVENANCE).exists() and not (out / ".verifier").is_dir():
            raise ValueError(f"{out} holds a {PROVENANCE} and no verifier: name another folder")
        return
    own, shared = (network_digest(open_verifier(p / "verifier")) for p in (out, directory(POCKET)))
    if own != shared:
        raise ValueError(f"{out / 'verifier'} is not the package's verifier: name another folder")


def measure_step(work: Work) -> None:
    """Both editions, each along texts of the verifier that they share."""
    opened = {}
    for edition, folder in (("first", directory(POCKET)), ("second", work.out)):
        model = tfm_jax.load(folder, dtype="float32")
        opened[edition] = (model, networks_of(edition, folder, model))
    for edition, (model, stages) in opened.items():
        setting = work.setting(model, edition)
        found = measure(edition, model, work)
        setting |= {"heldout_nats_per_token": found.nats}
        by_entropy = rows_by_entropy({"trio": edition}, found.sets, found.rounds)
        work.keep(edition, setting, networks=stages, rows=found.rows, by_entropy=by_entropy)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, none of which the asked steps would ignore."""
    prompting = Prompting()
    parser = argparse.ArgumentParser(description="Another edition of the pocket trio.")
    parser.add_argument("steps", nargs="+", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--corpus", type=Path, required=True, help="packed by the trio's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder of the trio")
    parser.add_argument("--config", type=Path, default=CONFIG, help="sizes and stages, JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    parser.add_argument("--count", type=int, default=prompting.count, help="prompts a domain")
    parser.add_argument("--new-tokens", type=int, default=prompting.new_tokens)
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    options = parser.parse_args(arguments)
    training = set(options.steps) & set(TRAINING)
    readers = {"config": training, "seed": training}
    readers |= dict.fromkeys(("count", "new_tokens", "json"), set(options.steps) & {"measure"})
    for name, reading in readers.items():
        if getattr(options, name) != parser.get_default(name) and not reading:
            steps = "training" if name in ("config", "seed") else "measure"
            parser.error(f"--{name.replace('_', '-')} is only for {steps}")
    with refusing(parser):
        check(options)
        begin(options.out)
    return options


def stage_options(options: argparse.Namespace) -> dict[str, Any]:
    """What a stage is trained with."""
    return {"config": options.config, "seed": options.seed}


def check(options: argparse.Namespace) -> None:
    """Refuses, before anything is computed or written, what a step would only trip over later.

    Raises:
      ValueError: a number, a configuration or a corpus that does not fit.
      OSError: a file is missing.
    """
    Prompting(count=options.count, new_tokens=options.new_tokens)
    check_corpus(options.corpus, POCKET)
    check_verifier(options.out)
    there = () if (options.out / "verifier").is_dir() else ("verifier",)
    for place, step in enumerate(options.steps):
        if step in TRAINING:
            before = (*there, *options.steps[:place])
            own = stage_options(options)
            plan_stage(step, options.corpus, options.out, before=before, **own)
    if "measure" in options.steps:
        heldout_prompts(options.corpus, options.count)
        before = options.steps[: options.steps.index("measure")]
        needed = [step for step in ("dflash", "weaver") if step not in before]
        if absent := [step for step in needed if not (options.out / step).is_dir()]:
            raise FileNotFoundError(
                f"{options.out} holds no {' and no '.join(absent)} to measure: the steps of these "
                "names make them"
            )


def run(options: argparse.Namespace, work: Work) -> None:
    """All steps, in the order that they were asked for."""
    started = time.monotonic()
    for step in options.steps:
        log(f"second: {step}", started)
        if step == "measure":
            measure_step(work)
            continue
        entry = train_stage(step, work.corpus, work.out, **stage_options(options))
        log(f"second: {step} done after {entry['seconds']} s", started)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    prompting = Prompting(count=options.count, new_tokens=options.new_tokens)
    work = Work(corpus=options.corpus, out=options.out, prompting=prompting, result=RESULT)
    # Kernels are made for a single text, and here are many; what the trainer prints is progress.
    with automatic("xla"), contextlib.redirect_stdout(sys.stderr):
        run(options, work)
    if "measure" not in options.steps:
        return
    result = json.loads((options.out / RESULT).read_text("utf-8"))
    if options.json:
        print(json.dumps(result))
        return
    show(result)
    for row in result["by_entropy"]:
        noise = ", shared noise" if row["shared_noise"] else ""
        print(
            f"{row['trio']:6s}  T = {row['temperature']:g}{noise:14s}  {row['nats']:.2f} nats  "
            f"ddtree {row['ddtree']:.3f}  tfm {row['tfm']:.3f}  tfm/ddtree {row['to_ddtree']:.3f}"
        )


if __name__ == "__main__":
    main()
