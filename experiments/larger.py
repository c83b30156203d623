"""A larger trio than the pocket one, trained from nothing, and the methods measured with both.

    python -m experiments.larger verifier continuations dflash --corpus build/corpus --out DIR
    python -m experiments.larger weaver measure capacity --corpus build/corpus --out DIR

Steps read what the steps before them left in DIR, so they may run in several calls. `measure`
replays all methods along the larger verifier's texts after held-back and evaluation prompts;
`capacity` does so for the pocket trio, and trains larger Weavers for it (`experiments.capacity`).
Training is that of `tfm_jax.training.pocket`, sizes and stages are those of `configs/larger.json`.
Written for one GPU. `measure` and `capacity` each put their part into `larger.json` in DIR.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tfm_jax
from experiments.acceptance import DOMAINS, load_prompts
from experiments.capacity import Size, compile_arms, train_arms
from experiments.options import refusing
from experiments.progress import log
from experiments.recipes import RECIPES, Learning, describe, open_networks
from experiments.store import store
from experiments.text_sets import (
    METHODS,
    Measured,
    TextSet,
    check_corpus,
    heldout_prompts,
    make_set,
    replay_all,
    replay_setting,
    rows_beside,
    within_pools,
)
from pallas_kernels.choice import automatic
from tfm_jax.decoding.state import Trio
from tfm_jax.model import POCKET, Model, directory
from tfm_jax.training.pocket import STAGES, plan_stage, train_stage
from tfm_jax.training.settings import check_count, check_seconds
from tfm_jax.training.texts import heldout_windows, write_continuations
from tfm_jax.training.verifier import text_losses

CONFIG = Path(__file__).parents[1] / "configs" / "larger.json"
MEASURING = ("measure", "capacity")
STEPS = (*STAGES, *MEASURING)
RESULT = "larger.json"
WINDOW = 512  # tokens of a held-back text that a verifier predicts
BASES = ("dflash", "ddtree")  # what `tfm` is compared with
# How the pocket trio's Weaver is trained on, and as what.
LEARNING = Learning(seed=3)
RECIPE = RECIPES["within reach"]  # the best without noise
SIZES = {"as it is": Size(blocks=1, inner=384), "enlarged": Size(blocks=2, inner=1536)}
# What is shown of a stage's entry in `provenance.json`, and what of it is stored.
_SHOWN = (
    "parameters",
    "steps",
    "skipped_steps",
    "texts",
    "tokens",
    "seconds",
    "steps_per_second",
    "tokens_per_second",
    "flops_per_step",
    "tflops_per_second",
    "matrix_tflops_per_second",
    "share_of_matrix_rate",
)
_FACTS = (
    *_SHOWN,
    "heldout_nats_per_token",
    "mixture",
    "device",
    "devices",
    "jax",
    "seed",
    "corpus_manifest_sha256",
    "corpus_tokens_sha256",
    "options",
)
# The steps that read an option.
_READERS = {
    "config": STAGES,
    "seed": STAGES,
    "devices": ("verifier", "dflash", "weaver"),
    **{f"{stage}_seconds": (stage,) for stage in STAGES},
    "text_seconds": ("capacity",),
    "arm_steps": ("capacity",),
    "count": MEASURING,
    "new_tokens": MEASURING,
    "json": MEASURING,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompting:
    """Which texts acceptance is measured along.

    Attributes:
      count: prompts a domain, of the held-back and of the evaluation prompts each.
      new_tokens: that each text goes on for.
      longest_prompt: evaluation prompts are cut to so many tokens.
    """

    count: int = 40
    new_tokens: int = 128
    longest_prompt: int = 256

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            check_count(name, value)


def make_sets(model: Model, corpus: Path, prompting: Prompting) -> dict[str, TextSet]:
    """The verifier's texts after held-back and after evaluation prompts, all of one shape."""
    count, longest = prompting.count, prompting.longest_prompt
    prompts = {
        "held back": heldout_prompts(corpus, count),
        "evaluation": {d: load_prompts(model, d, count, longest) for d in DOMAINS},
    }
    width = max(len(p) for found in prompts.values() for own in found.values() for p in own)
    return {
        name: make_set(model, found, width, prompting.new_tokens) for name, found in prompts.items()
    }


def replay_methods(trio: Trio, texts: TextSet) -> dict[str, Measured]:
    """Rounds of every method in every setting, and those of the perfect Weaver ("pools")."""
    with concurrent.futures.ThreadPoolExecutor(len(METHODS)) as pool:  # they compile side by side
        rounds = pool.map(lambda method: replay_all(trio, texts, method), METHODS)
        return {**dict(zip(METHODS, rounds, strict=True)), "pools": within_pools(texts)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What all steps share.

    Attributes:
      corpus: packed, with held-back prompts.
      out: folder of the trio and of the result.
      prompting: see there.
      result: name of the file that rows go to.
    """

    corpus: Path
    out: Path
    prompting: Prompting
    result: str = RESULT

    def setting(self, model: Model, name: str) -> dict[str, Any]:
        """What the rows of a trio depend on."""
        return {
            **replay_setting(model, name, self.corpus),
            **dataclasses.asdict(self.prompting),
            "pools": "a Weaver that knows each next token and can only take it from the pools",
            "rounds": "replayed along the verifier's own texts",
            "heldout_window": WINDOW,
        }

    def keep(self, trio: str, setting: Mapping[str, Any], **parts: Sequence[Mapping]) -> None:
        """Stores lists of rows by name, in place of those that the trio had."""
        path = self.out / self.result
        found: dict[str, Any] = {"setting": {}, "networks": [], "training": [], "rows": []}
        if path.is_file():
            found = json.loads(path.read_text("utf-8"))
        found["setting"][trio] = setting
        for name, rows in parts.items():
            others = [row for row in found.get(name, []) if row["trio"] != trio]
            found[name] = others + list(rows)
        store(path, found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured with a trio's own Weaver.

    Attributes:
      sets: texts by the kind of their prompts.
      rounds: by kind of prompts and method.
      rows: of the result.
      nats: of the verifier, a held-back token of each domain.
    """

    sets: dict[str, TextSet]
    rounds: dict[str, dict[str, Measured]]
    rows: list[dict[str, Any]]
    nats: dict[str, float]


def measure(trio: str, model: Model, work: Work) -> Measurement:
    """All methods with a trio's own Weaver, and how well its verifier predicts held-back text."""
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        windows = heldout_windows(work.corpus, WINDOW)
        nats = pool.submit(text_losses, model.trio.verifier, windows)
        sets = make_sets(model, work.corpus, work.prompting)
        log(f"larger: {trio}: texts to measure along", begin)
        rounds: dict[str, dict[str, Measured]] = {}
        rows = []
        for prompts, texts in sets.items():
            rounds[prompts] = found = replay_methods(model.trio, texts)
            bases = {method: found[method] for method in BASES}
            for method, own in found.items():
                names = {"trio": trio, "weaver": "own", "prompts": prompts, "method": method}
                rows += rows_beside(names, texts, own, bases)
            log(f"larger: {trio}: all methods along {prompts} texts", begin)
        return Measurement(sets=sets, rounds=rounds, rows=rows, nats=nats.result())


def networks_of(trio: str, folder: Path, model: Model) -> list[dict[str, Any]]:
    """A row for each stage that trained a trio: sizes, parameters, and what the run was.

    Raises:
      ValueError: a network or the record of a stage is missing.
    """
    networks = {
        "verifier": model.trio.verifier,
        "dflash": model.trio.drafter,
        "weaver": model.trio.weaver,
    }
    path = folder / "provenance.json"
    entries = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    absent = [stage for stage, network in networks.items() if network is None]
    unknown = [stage for stage in STAGES if stage not in entries]
    if absent or unknown:
        raise ValueError(
            f"{folder} is no complete trio: networks missing: {', '.join(absent) or 'none'}; "
            f"stages missing in {path.name}: {', '.join(unknown) or 'none'}"
        )
    rows = []
    for stage in STAGES:
        network = networks.get(stage)
        row: dict[str, Any] = {"trio": trio, "stage": stage}
        row |= {name: entries[stage][name] for name in _FACTS if name in entries[stage]}
        if network is not None:
            row["sizes"] = dataclasses.asdict(network.config)
        rows.append(row)
    return rows


def measure_step(work: Work) -> None:
    """The trio that lies in the folder."""
    model = tfm_jax.load(work.out, dtype="float32")
    stages = networks_of("larger", work.out, model)
    setting = work.setting(model, "larger")
    found = measure("larger", model, work)
    setting |= {"heldout_nats_per_token": found.nats}
    work.keep("larger", setting, networks=stages, rows=found.rows)


def capacity_step(work: Work, learning: Learning, text_seconds: float) -> None:
    """The pocket trio, with its own Weaver and with those that were trained on from it."""
    networks = open_networks(POCKET)
    stages = networks_of("pocket", directory(POCKET), networks.model)
    setting = work.setting(networks.model, POCKET)
    metrics = work.out / "capacity.jsonl"
    metrics.unlink(missing_ok=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        starts = pool.submit(compile_arms, networks, SIZES, learning, RECIPE)
        found = measure("pocket", networks.model, work)
    # Nothing else is computed meanwhile: the arms train under the same conditions.
    written = write_continuations(
        networks.frozen.verifier,
        work.corpus,
        learning.texts,
        vocab_limit=networks.model.vocab_limit,
        seed=learning.seed,
        seconds=text_seconds,
    )
    batches = written.usable(networks.config.depth).batches(RECIPE.rows, learning.seed)
    arms = train_arms(starts.result(), learning, RECIPE, batches, metrics)
    rows = list(found.rows)
    for arm in arms:
        for prompts, texts in found.sets.items():
            bases = {method: found.rounds[prompts][method] for method in BASES}
            bases["own"] = found.rounds[prompts]["tfm"]
            names = {"trio": "pocket", "weaver": arm.name, "prompts": prompts, "method": "tfm"}
            rows += rows_beside(names, texts, replay_all(arm.trio, texts, "tfm"), bases)
        log(f"larger: pocket: Weaver {arm.name!r} replayed")
    learned = dataclasses.asdict(learning) | {
        "text_seconds": text_seconds,
        "written": describe(written),
    }
    work.keep(
        "pocket",
        setting | {"heldout_nats_per_token": found.nats, "capacity": learned},
        networks=stages,
        training=[{"trio": "pocket", **arm.facts} for arm in arms],
        rows=rows,
    )


def show(result: Mapping[str, Any]) -> None:
    """Prints a line for each text set, setting and Weaver, methods side by side."""
    names = ("prompts", "temperature", "shared_noise", "trio", "weaver", "method")
    length = {tuple(r[n] for n in names): r["mean_accepted_length"] for r in result["rows"]}
    for row in sorted(result["rows"], key=lambda r: [r[n] for n in names[:3]]):
        if row["method"] != "tfm":
            continue
        noise = ", shared noise" if row["shared_noise"] else ""
        low, high = row["ci95"]
        own = (*(row[n] for n in names[:4]), "own")
        others = {m: length[*own, m] for m in (*BASES, "pools") if (*own, m) in length}
        print(
            f"{row['prompts']:10s}  T = {row['temperature']:g}{noise:14s}  {row['trio']:6s} "
            f"{row['weaver']:8s}  tfm {row['mean_accepted_length']:.3f} ({low:.2f} to {high:.2f})  "
            f"{'  '.join(f'{m} {x:.3f}' for m, x in others.items())}  "
            f"tfm/dflash {row['to_dflash']:.3f}  tfm/ddtree {row['to_ddtree']:.3f}"
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, none of which the asked steps would ignore."""
    prompting = Prompting()
    parser = argparse.ArgumentParser(description="A larger trio beside the pocket one.")
    parser.add_argument("steps", nargs="+", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--corpus", type=Path, required=True, help="made by `tfm data corpus`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the trio")
    parser.add_argument("--config", type=Path, default=CONFIG, help="sizes and stages, JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1, help="that share each training step")
    for stage in STAGES:
        parser.add_argument(f"--{stage}-seconds", type=float, help="instead of the configuration's")
    parser.add_argument("--text-seconds", type=float, default=25, help="texts of `capacity`")
    parser.add_argument("--arm-steps", type=int, default=1500, help="each Weaver of `capacity`")
    parser.add_argument("--count", type=int, default=prompting.count, help="prompts a domain")
    parser.add_argument("--new-tokens", type=int, default=prompting.new_tokens)
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    options = parser.parse_args(arguments)
    for name, readers in _READERS.items():
        given = getattr(options, name) != parser.get_default(name)
        if given and not set(readers) & set(options.steps):
            parser.error(f"--{name.replace('_', '-')} is only for {', '.join(readers)}")
    with refusing(parser):
        check(options)
        options.out.mkdir(parents=True, exist_ok=True)
    return options


def stage_options(options: argparse.Namespace, stage: str) -> dict[str, Any]:
    """What a stage is trained with."""
    return {
        "config": options.config,
        "seconds": getattr(options, f"{stage}_seconds"),
        "seed": options.seed,
        "devices": options.devices,
    }


def check(options: argparse.Namespace) -> None:
    """Refuses, before anything is computed, what a step would only trip over later.

    Raises:
      ValueError: a time, a number or a corpus that does not fit.
      OSError: a file is missing.
    """
    steps = set(options.steps)
    measuring(options)
    check_corpus(options.corpus)
    for place, step in enumerate(options.steps):
        if step in STAGES:
            before = options.steps[:place]
            own = stage_options(options, step)
            plan_stage(step, options.corpus, options.out, before=before, **own)
    if "verifier" not in steps and steps != {"capacity"}:  # a new verifier takes the corpus's
        check_corpus(options.corpus, options.out)
    if "capacity" in steps:
        check_seconds("--text-seconds", options.text_seconds)
        check_corpus(options.corpus, POCKET)
    if steps.intersection(MEASURING):
        heldout_prompts(options.corpus, options.count)


def measuring(options: argparse.Namespace) -> tuple[Prompting, Learning]:
    """What is measured along, and what the Weavers of `capacity` are trained by."""
    optimiser = dataclasses.replace(LEARNING.optimiser, steps=options.arm_steps)
    prompting = Prompting(count=options.count, new_tokens=options.new_tokens)
    return prompting, dataclasses.replace(LEARNING, optimiser=optimiser)


def run(options: argparse.Namespace, work: Work, learning: Learning) -> None:
    """All steps, in the order that they were asked for."""
    begin = time.monotonic()
    for step in options.steps:
        log(f"larger: {step}", begin)
        if step == "measure":
            measure_step(work)
        elif step == "capacity":
            capacity_step(work, learning, options.text_seconds)
        else:
            entry = train_stage(step, work.corpus, work.out, **stage_options(options, step))
            facts = {name: entry[name] for name in _SHOWN if name in entry}
            log(f"larger: {step} done: {json.dumps(facts)}", begin)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    prompting, learning = measuring(options)
    work = Work(corpus=options.corpus, out=options.out, prompting=prompting)
    # Kernels are made for a single text, and here are many; what the trainer prints is progress.
    with automatic("xla"), contextlib.redirect_stdout(sys.stderr):
        run(options, work, learning)
    if not set(options.steps).intersection(MEASURING):
        return
    result = json.loads((options.out / RESULT).read_text("utf-8"))
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
