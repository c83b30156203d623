"""A larger trio than the pocket one, trained from nothing, and the methods measured with both.

    python -m experiments.larger verifier continuations dflash --corpus build/corpus --out DIR
    python -m experiments.larger weaver measure capacity --corpus build/corpus --out DIR

Steps read what the steps before them left in DIR, so they may run in several calls. `measure`
replays all methods along the larger verifier's texts after held-back and evaluation prompts;
`capacity` does so for the pocket trio, and trains larger Weavers for it (`experiments.capacity`).
Training is that of `tfm_jax.training.pocket`, sizes and stages are those of `configs/larger.json`.
Written for one GPU. Writes `larger.json` into DIR, again after each step.
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

import jax

import tfm_jax
from experiments.acceptance import DOMAINS, common_setting, load_prompts
from experiments.capacity import Seconds, Size, train_arms
from experiments.progress import log
from experiments.recipes import RECIPES, Plan, open_networks
from experiments.replay import by_domain, summarise
from experiments.store import store
from experiments.text_sets import (
    METHODS,
    Rounds,
    TextSet,
    heldout_prompts,
    make_set,
    replay_all,
    within_pools,
)
from pallas_kernels.choice import automatic
from tfm_jax.decoding.state import Trio
from tfm_jax.model import POCKET, Model, directory
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.training.batches import PACKED, TokenBatches, load_streams
from tfm_jax.training.pocket import STAGES, train_stage
from tfm_jax.training.texts import packed_corpus
from tfm_jax.training.verifier import next_token_loss

CONFIG = Path(__file__).parents[1] / "configs" / "larger.json"
STEPS = (*STAGES, "measure", "capacity")
RESULT = "larger.json"
WINDOW = 512  # tokens of a held-back text that a verifier predicts
BASES = ("dflash", "ddtree")  # what `tfm` is compared with
# How the pocket trio's Weaver is trained on, and as what.
PLAN = Plan(recipes={"within reach": RECIPES["within reach"]}, seed=3)  # best without noise
SIZES = {"as it is": Size(blocks=1, inner=384), "enlarged": Size(blocks=2, inner=1536)}
# What is shown of a stage's entry in `provenance.json`, and what of it is stored.
_SHOWN = ("parameters", "steps", "skipped_steps", "texts", "tokens", "seconds")
_FACTS = (*_SHOWN, "heldout_nats_per_token", "mixture", "device", "devices", "jax", "options")

Measured = Mapping[tuple[float, bool], Rounds]


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
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")


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


def rows_beside(
    names: Mapping[str, Any], texts: TextSet, rounds: Measured, bases: Mapping[str, Measured]
) -> list[dict[str, Any]]:
    """A row for each setting, with the ratio to each of `bases` along the same texts."""
    rows = []
    for setting, found in rounds.items():
        own, ratios = by_domain(texts.domains, found), {}
        summary: dict[str, Any] = {}
        for base, other in bases.items():
            summary = summarise(own, by_domain(texts.domains, other[setting]))
            for end in ("", "_ci95"):
                ratios[f"to_{base}{end}"] = summary.pop(f"to_base{end}")
        named = {"temperature": setting[0], "shared_noise": setting[1] and setting[0] > 0}
        rows.append({**names, **named, **summary, **ratios})
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What all steps share.

    Attributes:
      corpus: packed, with held-back prompts.
      out: folder of the trio and of the result.
      prompting: see there.
    """

    corpus: Path
    out: Path
    prompting: Prompting

    def setting(self, model: Model, name: str) -> dict[str, Any]:
        """What the rows of a trio depend on."""
        return {
            **common_setting(model, name),
            **dataclasses.asdict(self.prompting),
            "corpus": self.corpus.name,
            "methods": {method: dataclasses.asdict(shape) for method, shape in METHODS.items()},
            "pools": "a Weaver that knows each next token and can only take it from the pools",
            "operations": "xla",
            "training_dtype": "bfloat16",
            "prompt_form": "plain continuation, no chat template; end tokens do not stop",
            "rounds": "replayed along the verifier's own texts",
            "heldout_window": WINDOW,
        }

    def keep(self, trio: str, setting: Mapping[str, Any], **parts: Sequence[Mapping]) -> None:
        """Stores lists of rows by name, in place of those that the trio had."""
        path = self.out / RESULT
        found: dict[str, Any] = {"setting": {}, "networks": [], "training": [], "rows": []}
        if path.is_file():
            found = json.loads(path.read_text("utf-8"))
        found["setting"][trio] = setting
        for name, rows in parts.items():
            found[name] = [row for row in found[name] if row["trio"] != trio] + list(rows)
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
        nats = pool.submit(heldout_nats, model.trio.verifier, work.corpus)
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


def heldout_nats(verifier: Verifier, corpus: Path) -> dict[str, float]:
    """Mean cross-entropy of held-back windows, the same for every verifier of a vocabulary."""
    streams = load_streams(corpus / PACKED, "heldout")
    long_enough = {name: s for name, s in streams.items() if len(s) > 2 * WINDOW}
    loss = jax.jit(next_token_loss)
    found = {}
    for name in long_enough:
        tokens = TokenBatches(long_enough, {name: 1.0}, WINDOW, 16)[0]
        found[name] = round(float(loss(verifier, tokens)), 4)
    return found


def networks_of(trio: str, folder: Path, model: Model) -> list[dict[str, Any]]:
    """A row for each stage that trained a trio: sizes, parameters, and what the run was."""
    entries = json.loads((folder / "provenance.json").read_text("utf-8"))
    networks = {
        "verifier": model.trio.verifier,
        "dflash": model.trio.drafter,
        "weaver": model.trio.weaver,
    }
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
    setting = work.setting(model, "larger")
    found = measure("larger", model, work)
    setting |= {"heldout_nats_per_token": found.nats}
    stages = networks_of("larger", work.out, model)
    work.keep("larger", setting, networks=stages, rows=found.rows)


def capacity_step(work: Work, seconds: Seconds) -> None:
    """The pocket trio, with its own Weaver and with those that were trained on from it."""
    networks = open_networks(POCKET)
    setting = work.setting(networks.model, POCKET)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # measured while others compile
        measuring = pool.submit(measure, "pocket", networks.model, work)
        arms = train_arms(networks, SIZES, PLAN, seconds, work.corpus, work.out)
        found = measuring.result()
    rows = list(found.rows)
    for arm in arms:
        for prompts, texts in found.sets.items():
            bases = {method: found.rounds[prompts][method] for method in BASES}
            bases["own"] = found.rounds[prompts]["tfm"]
            names = {"trio": "pocket", "weaver": arm.name, "prompts": prompts, "method": "tfm"}
            rows += rows_beside(names, texts, replay_all(arm.trio, texts, "tfm"), bases)
        log(f"larger: pocket: Weaver {arm.name!r} replayed")
    work.keep(
        "pocket",
        setting | {"heldout_nats_per_token": found.nats},
        networks=networks_of("pocket", directory(POCKET), networks.model),
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
            f"{row['weaver']:6s}  tfm {row['mean_accepted_length']:.3f} ({low:.2f} to {high:.2f})  "
            f"{'  '.join(f'{m} {x:.3f}' for m, x in others.items())}  "
            f"tfm/dflash {row['to_dflash']:.3f}  tfm/ddtree {row['to_ddtree']:.3f}"
        )


def main(arguments: list[str] | None = None) -> None:
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
    parser.add_argument("--arm-seconds", type=float, default=30, help="each Weaver of `capacity`")
    parser.add_argument("--count", type=int, default=prompting.count, help="prompts a domain")
    parser.add_argument("--new-tokens", type=int, default=prompting.new_tokens)
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    options = parser.parse_args(arguments)
    prompting = Prompting(count=options.count, new_tokens=options.new_tokens)
    corpus = packed_corpus(options.corpus, (), None, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    work = Work(corpus=corpus, out=options.out, prompting=prompting)
    begin = time.monotonic()
    # Kernels are made for a single text, and here are many; what the trainer prints is progress.
    with automatic("xla"), contextlib.redirect_stdout(sys.stderr):
        for step in options.steps:
            log(f"larger: {step}", begin)
            if step == "measure":
                measure_step(work)
            elif step == "capacity":
                capacity_step(work, Seconds(texts=options.text_seconds, arm=options.arm_seconds))
            else:
                entry = train_stage(
                    step,
                    corpus,
                    options.out,
                    config=options.config,
                    seconds=getattr(options, f"{step}_seconds"),
                    seed=options.seed,
                    devices=options.devices,
                )
                facts = {name: entry[name] for name in _SHOWN if name in entry}
                log(f"larger: {step} done: {json.dumps(facts)}", begin)
    if not (options.out / RESULT).is_file():
        return
    result = json.loads((options.out / RESULT).read_text("utf-8"))
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
