"""Does a frozen drafter limit its Weaver? Three ways to train the packaged pair further.

    python -m experiments.together texts together variation weaver measure --corpus DIR --out DIR

"together" lets the Weaver's loss reach the drafter's states (`tfm_jax.training.pair`), the
others leave the drafter as it is: "weaver" goes on by the Weaver's own recipe, "variation" by one
that weighs total variation more. All start from the packaged trio and learn from the same new
texts of its verifier. `measure` replays all methods with the packaged trio ("own") and with each
trained one along texts after the same prompts. Steps read what the steps before them left in OUT,
so they may run in several calls. Each way leaves a whole trio in OUT/NAME; what was done and found
goes to `together.json`. Written for one GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import tfm_jax
from experiments.larger import Prompting, Work, measure, show
from experiments.options import refusing
from experiments.progress import log
from experiments.recipes import describe
from experiments.second import begin, check_verifier
from experiments.text_sets import check_corpus, heldout_prompts, rows_by_entropy
from pallas_kernels.choice import automatic
from tfm_jax.checkpoints import read_trio, write_hf
from tfm_jax.checkpoints.trio import open_trio
from tfm_jax.config import made
from tfm_jax.model import POCKET, directory
from tfm_jax.training.arithmetic import rates_of
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.leftovers import recorded
from tfm_jax.training.pair import PairRecipe, joined, pair_recipe, parted, train_pair
from tfm_jax.training.pocket import CONFIG
from tfm_jax.training.report import read_log
from tfm_jax.training.settings import check_seconds, check_seed, read_settings
from tfm_jax.training.texts import write_continuations
from tfm_jax.training.trainer import OptimiserConfig, host_params
from tfm_jax.training.weaver import WeaverRecipe, train_weaver

WAYS = ("together", "variation", "weaver")
SEED = 4
STEPS = ("texts", *WAYS, "measure")
RESULT = "together.json"
TEXTS = "continuations.npz"


def ways() -> dict[str, PairRecipe | WeaverRecipe]:
    """How each way trains: by the packaged pair's recipe, or by a part or a change of it."""
    entries = read_settings(CONFIG)["stages"]["pair"]["recipe"]
    pair = pair_recipe(entries, f"{CONFIG}: pair.recipe")
    variation = dataclasses.replace(pair.weaver, eta=3.0)
    return dict(zip(WAYS, (pair, variation, pair.weaver), strict=True))


def optimiser() -> OptimiserConfig:
    """The same for all ways."""
    entries = read_settings(CONFIG)["stages"]["pair"]["optimiser"]
    return made(OptimiserConfig, entries, f"{CONFIG}: pair.optimiser")


def write_texts(work: Work, seed: int, seconds: float) -> None:
    """New texts of the packaged verifier, by the settings that the packaged pair learned from."""
    model = tfm_jax.load(POCKET, dtype="bfloat16")
    texts = write_continuations(
        model.trio.verifier,
        work.corpus,
        read_settings(CONFIG)["stages"]["continuations"],
        vocab_limit=model.vocab_limit,
        seed=seed,
        seconds=seconds,
    )
    texts.save(work.out / TEXTS)


def train_step(way: str, work: Work, start_from: str | Path, seed: int, seconds: float) -> None:
    """Trains a pair one way, and leaves a trio with the result."""
    began, recipe = time.monotonic(), ways()[way]
    stored = read_trio(directory(start_from), dtype="float32")
    model = tfm_jax.load(start_from, dtype="bfloat16")
    texts = Continuations.load(work.out / TEXTS)
    common: dict[str, Any] = {
        "vocab_limit": model.vocab_limit,
        "seed": seed,
        "log": work.out / "training.jsonl",
        "log_every": 100,
        "seconds": seconds,
    }
    verifier, drafter = model.trio.verifier, model.trio.drafter
    assert drafter is not None
    assert stored.drafter is not None
    assert stored.weaver is not None
    first, second = stored.drafter, stored.weaver
    if isinstance(recipe, PairRecipe):
        start = joined(first.params, second.params)
        configs = (first.config, second.config)
        state = train_pair(*configs, verifier, texts, optimiser(), recipe, start=start, **common)
        drafters, weavers = parted(host_params(state))
    else:
        start = dict(second.params)
        state = train_weaver(
            second.config, verifier, drafter, texts, optimiser(), recipe, start=start, **common
        )
        drafters, weavers = first.params, host_params(state)
    out = work.out / way
    begin(out)
    write_hf(out / "dflash", first.config, drafters, dtype="bfloat16", overwrite=True)
    write_hf(out / "weaver", second.config, weavers, dtype="bfloat16", overwrite=True)
    facts = {
        "trio": way,
        **dataclasses.asdict(recipe),
        "steps": int(state.step),
        "skipped_steps": int(state.skipped),
        "seconds": round(time.monotonic() - began, 1),
        **rates_of(read_log(work.out / "training.jsonl")[-1], 1),
        "written": describe(texts),
    }
    work.keep(way, {}, training=[facts])


def measure_step(work: Work) -> None:
    """The packaged trio and those of OUT, along texts after the same prompts."""
    trained = {way: work.out / way for way in WAYS if (work.out / way).is_dir()}
    for name, folder in {"own": directory(POCKET), **trained}.items():
        model = tfm_jax.load(folder, dtype="float32")
        found = measure(name, model, work)
        setting = work.setting(model, name) | {"optimiser": dataclasses.asdict(optimiser())}
        by_entropy = rows_by_entropy({"trio": name}, found.sets, found.rounds)
        work.keep(name, setting, rows=found.rows, by_entropy=by_entropy)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, none of which the asked steps would ignore."""
    prompting = Prompting()
    parser = argparse.ArgumentParser(description="Drafter and Weaver trained together or apart.")
    parser.add_argument("steps", nargs="+", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--corpus", type=Path, required=True, help="packed by the trio's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--start", default=POCKET, help="trio to train further, of that verifier")
    parser.add_argument("--seed", type=int, default=SEED, help="of texts and training")
    parser.add_argument("--text-seconds", type=float, default=110, help="for the texts")
    parser.add_argument("--seconds", type=float, default=320, help="for each way of training")
    parser.add_argument("--count", type=int, default=prompting.count, help="prompts a domain")
    parser.add_argument("--new-tokens", type=int, default=prompting.new_tokens)
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    options = parser.parse_args(arguments)
    steps = set(options.steps)
    readers = {"text_seconds": {"texts"}, "seconds": set(WAYS), "start": set(WAYS)}
    readers["seed"] = {"texts", *WAYS}
    readers |= {name: {"measure"} for name in ("count", "new_tokens", "json")}
    for name, reading in readers.items():
        if getattr(options, name) != parser.get_default(name) and not steps & reading:
            parser.error(f"--{name.replace('_', '-')} is only for {', '.join(sorted(reading))}")
    with refusing(parser):
        check(options)
        options.out.mkdir(parents=True, exist_ok=True)
    return options


def check(options: argparse.Namespace) -> None:
    """Refuses, before anything is computed or written, what a step would only trip over later.

    Raises:
      ValueError: a number or a corpus that does not fit, or a step before the one that it needs.
      OSError: a file is missing.
    """
    steps = options.steps
    Prompting(count=options.count, new_tokens=options.new_tokens)
    check_seconds("--text-seconds", options.text_seconds)
    check_seconds("--seconds", options.seconds)
    check_seed(options.seed)
    check_corpus(options.corpus, POCKET)
    if set(steps) & set(WAYS):
        check_verifier(directory(options.start))
        start = open_trio(directory(options.start))
        if start.drafter is None or start.weaver is None:
            raise ValueError(f"{options.start} is no trio: a drafter or a Weaver is missing")
    own = {row["trio"] for row in recorded(options.out / RESULT).get("training", ())}
    foreign = [w for w in WAYS if w in steps and (options.out / w).exists() and w not in own]
    if foreign:
        raise ValueError(
            f"{options.out} holds {', '.join(foreign)}, which {RESULT} there does not account for: "
            "name another folder"
        )
    for place, step in enumerate(steps):
        texts = "texts" in steps[:place] or (options.out / TEXTS).is_file()
        if step in WAYS and not texts:
            raise FileNotFoundError(f"{options.out / TEXTS} is missing: the step texts makes it")
    if "measure" in steps:
        heldout_prompts(options.corpus, options.count)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    prompting = Prompting(count=options.count, new_tokens=options.new_tokens)
    work = Work(corpus=options.corpus, out=options.out, prompting=prompting, result=RESULT)
    began = time.monotonic()
    # Kernels are made for a single text, and here are many; what the trainer prints is progress.
    with automatic("xla"), contextlib.redirect_stdout(sys.stderr):
        for step in options.steps:
            log(f"together: {step}", began)
            if step == "texts":
                write_texts(work, options.seed, options.text_seconds)
            elif step == "measure":
                measure_step(work)
            else:
                train_step(step, work, options.start, options.seed, options.seconds)
    if "measure" not in options.steps:
        return
    result = json.loads((options.out / RESULT).read_text("utf-8"))
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
