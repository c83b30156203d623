"""A second edition of a Weaver: new texts, a short run of each recipe, a long run of the best.

    python -m experiments.recipes --corpus build/corpus --out build/second --seconds 335

The verifier first writes texts to learn from, without those that mostly repeat themselves. Each
recipe (an "arm") trains the first Weaver further for a few seconds; the one that accepts most along
texts after held-back prompts goes on for most of the time. Then the first and the second Weaver are
compared on the evaluation prompts, by replay and, as far as time allows, by real decoding. Verifier
and drafter stay as they are. Programs are compiled in threads while texts are written.

Writes `recipes.json` (again after each part), `training.jsonl` and the network, `weaver/`, which
`tfm convert MODEL NEW --weaver OUT/weaver` puts to use.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import tfm_jax
from experiments.acceptance import DOMAINS, load_prompts
from experiments.loops import compile_loop
from experiments.options import refusing
from experiments.progress import log
from experiments.store import store
from experiments.text_sets import (
    METHODS,
    SETTINGS,
    Measured,
    Prompts,
    Rounds,
    TextSet,
    check_corpus,
    heldout_prompts,
    make_set,
    replay_all,
    replay_setting,
    rows_beside,
)
from pallas_kernels.choice import automatic
from tfm_jax.checkpoints import read_trio, write_hf
from tfm_jax.config import Sampling, WeaverConfig
from tfm_jax.decoding.generate import bucket, rounds_limit
from tfm_jax.decoding.prefill import prefill
from tfm_jax.decoding.state import Trio, make_request, networks_for
from tfm_jax.model import POCKET, Model, directory
from tfm_jax.models.weaver import Weaver
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.settings import check_count, check_seconds
from tfm_jax.training.texts import write_continuations
from tfm_jax.training.trainer import (
    OptimiserConfig,
    Params,
    Step,
    fill,
    fit,
    make_optimiser,
    make_step,
    start,
)
from tfm_jax.training.weaver import WeaverRecipe, initial_weaver, weaver_objective

RECIPES = {
    "as before": WeaverRecipe(eta=3.0),
    "within reach": WeaverRecipe(eta=0.7, nodes=64),
    "with noise": WeaverRecipe(eta=0.7, nodes=64, noise=1.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning:
    """What Weavers learn from, and how fast.

    Attributes:
      seed: of texts, anchors and batches.
      texts: options of `write_continuations`.
      optimiser: of all runs; its `steps` are a first guess for a run that is given a time.
    """

    seed: int = 2
    texts: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {
            "rows": 4096,
            "total": 208,
            "prompt": 96,
            "shortest": 16,
            "batches": 1000,
            "greedy_share": 0.6,
            "most_copied": 0.3,
        }
    )
    optimiser: OptimiserConfig = dataclasses.field(
        default_factory=lambda: OptimiserConfig(
            steps=1000, matrix_rate=0.006, other_rate=0.0012, warmup=0.02, decay=0.5
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Learning):
    """Everything that is chosen beforehand.

    Attributes:
      seconds: for the whole; real decoding that would not fit is left out.
      count: prompts a domain, of the held-back and of the evaluation prompts each.
      new_tokens: that texts go on for where acceptance is measured.
      longest_prompt: evaluation prompts are cut to so many tokens.
      recipes: by name.
      write: texts are written until this share of the time.
      arm: share of the time that an arm trains for.
      train: training ends at this share of the time.
    """

    seconds: float = 335.0
    count: int = 40
    new_tokens: int = 128
    longest_prompt: int = 256
    recipes: Mapping[str, WeaverRecipe] = dataclasses.field(default_factory=lambda: RECIPES)
    write: float = 0.22
    arm: float = 0.055
    train: float = 0.82

    def __post_init__(self) -> None:
        check_seconds("seconds", self.seconds)
        for name in ("count", "new_tokens", "longest_prompt"):
            check_count(name, getattr(self, name))
        if len({recipe.rows for recipe in self.recipes.values()}) != 1:
            raise ValueError("recipes need one number of rows: they share their batches")
        if not 0 < self.write < self.train <= 1:
            raise ValueError(f"0 < write < train <= 1 expected, got {self.write} and {self.train}")
        if not 0 < self.arm * len(self.recipes) < self.train - self.write:
            raise ValueError(
                f"{len(self.recipes)} arms must be positive and fit between write and train, got "
                f"{self.arm} each between {self.write} and {self.train}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clock:
    """Time since `begin`, and how much of a given time is left."""

    begin: float
    seconds: float

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begin

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the whole time is over; at least one."""
        return max(1.0, share * self.seconds - self.now)

    def say(self, line: str) -> None:
        """Tells how far the work is."""
        log(f"recipes: {self.now:6.1f} s  {line}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Networks:
    """A model to measure with, and frozen networks in bfloat16 to write and to train with.

    Attributes:
      model: float32, with the first Weaver.
      frozen: verifier and drafter alone.
      config: of the Weaver.
      first: float32 parameters of the first Weaver, by dotted path.
    """

    model: Model
    frozen: Trio
    config: WeaverConfig
    first: Params


def open_networks(path: str | Path) -> Networks:
    """Reads a trio twice.

    Raises:
      ValueError: it is no trio.
    """
    found = read_trio(directory(path), dtype="float32").weaver
    if found is None:
        raise ValueError(f"{path} holds no Weaver to start from")
    frozen = tfm_jax.load(path, dtype="bfloat16").trio
    return Networks(
        model=tfm_jax.load(path, dtype="float32"),
        frozen=Trio(verifier=frozen.verifier, drafter=frozen.drafter),
        config=found.config,
        first=initial_weaver(found.config, found.params),
    )


def with_weaver(networks: Networks, params: Params) -> Trio:
    """The float32 trio with another Weaver."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Weaver(networks.config, rngs=nnx.Rngs(0))))
    return dataclasses.replace(networks.model.trio, weaver=fill(graph, params), growth=None)


def as_stored(params: Params) -> Params:
    """Parameters rounded to bfloat16, as the file of a trained Weaver holds them."""
    return {k: v.astype(jnp.bfloat16).astype(jnp.float32) for k, v in params.items()}


def compile_step(networks: Networks, learning: Learning, recipe: WeaverRecipe) -> Step:
    """The training step of a recipe, compiled without running it."""
    optimiser = make_optimiser(learning.optimiser)
    batch = {
        "tokens": jax.ShapeDtypeStruct((recipe.rows, learning.texts["total"]), jnp.int32),
        "first": jax.ShapeDtypeStruct((recipe.rows,), jnp.int32),
        "temperature": jax.ShapeDtypeStruct((recipe.rows,), jnp.float32),
    }
    limit = networks.model.vocab_limit
    objective = weaver_objective(networks.config, recipe, vocab_limit=limit)
    step = make_step(objective, optimiser, learning.optimiser, learning.seed)
    state = jax.eval_shape(lambda: start(networks.first, optimiser, 1))
    return step.lower(state, (networks.frozen, batch)).compile()


def train(
    title: str,
    networks: Networks,
    learning: Learning,
    recipe: WeaverRecipe,
    params: Params,
    step: Step,
    batches: Callable[[int], Any],
    *,
    first: int,
    seconds: float | None,
    log: Path,
) -> tuple[Params, dict[str, Any]]:
    """Trains for a time or a number of steps; returns the parameters, and what the run was.

    Args:
      title: of the run.
      networks, learning, recipe: what is trained, and how.
      params: to start from.
      step: compiled for the recipe.
      batches: see `Continuations.batches`.
      first: batch to begin with, so that no run sees the batches of another.
      seconds: to train for; None for the steps of the optimiser.
      log: file to append to.
    """
    begin, records = time.monotonic(), []
    tokens = recipe.rows * learning.texts["total"]
    state = fit(
        jax.tree.map(jnp.copy, params),  # a step gives its input's memory to its output
        weaver_objective(networks.config, recipe, vocab_limit=networks.model.vocab_limit),
        lambda i: (networks.frozen, batches(first + i)),
        learning.optimiser,
        seed=learning.seed,
        log=log,
        log_every=100,
        title=title,
        seconds=seconds,
        tokens=tokens,
        on_record=records.append,
        step=step,
    )
    took, steps = time.monotonic() - begin, int(state.step)
    return state.params, {
        "run": title,
        **dataclasses.asdict(recipe),
        "first_batch": first,
        "steps": steps,
        "skipped": int(state.skipped),
        "loss": records[-1]["loss"],
        "seconds": round(took, 1),
        "steps_per_second": round(steps / took, 2),
        "tokens_per_second": round(steps * tokens / took),
        "paths_per_second": round(steps * recipe.rows * recipe.anchors / took),
    }


def compile_loops(model: Model, prompts: Prompts, new_tokens: int) -> dict[str, Callable]:
    """The loops of real decoding by method, and what prefill of the prompts needs."""
    capacity = _capacity(model, prompts, new_tokens)
    for own in prompts.values():
        for prompt in (min(own, key=len), max(own, key=len)):
            prefill(_readers(model, "tfm"), np.asarray(prompt, np.int32), capacity)
    return {
        method: compile_loop(networks_for(model.trio, method), method, shape, capacity)
        for method, shape in METHODS.items()
    }


def decode_rounds(
    model: Model,
    loop: Callable,
    method: str,
    prompts: Prompts,
    temperature: float,
    new_tokens: int,
) -> Rounds:
    """Tokens that each round of real decoding emits, for each prompt; prompt i has seed i.

    Args:
      model: float32.
      loop: from `compile_loops` of the same prompts.
      method: of the rounds.
      prompts: by domain.
      temperature: with shared noise above 0.
      new_tokens: after each prompt; end tokens do not stop.
    """
    capacity = _capacity(model, prompts, new_tokens)
    found = []
    for own in prompts.values():
        for seed, prompt in enumerate(own):
            request = make_request(
                Sampling(temperature=temperature, seed=seed),
                end_tokens=(),
                vocab_limit=model.vocab_limit,
                total=len(prompt) + new_tokens,
            )
            state = prefill(_readers(model, method), np.asarray(prompt, np.int32), capacity)
            state = loop(networks_for(model.trio, method), state, request, rounds_limit())
            found.append(np.asarray(state.accepted)[: int(state.rounds)].tolist())
    return found


def _readers(model: Model, method: str) -> Trio:
    """The networks of prefill. Weaver has no part in it: one program serves all methods."""
    return dataclasses.replace(networks_for(model.trio, method), weaver=None, growth=None)


def _capacity(model: Model, prompts: Prompts, new_tokens: int) -> int:
    """Cache rows that serve all prompts, so that one program does."""
    lengths = {len(prompt) for own in prompts.values() for prompt in own}
    return max(bucket(n, n + new_tokens, model.trio.depth) for n in lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What all parts of the experiment work with.

    Attributes:
      networks, plan, clock: see there.
      corpus: packed, with held-back prompts.
      out: folder of the results.
      result: all rows so far.
    """

    networks: Networks
    plan: Plan
    clock: Clock
    corpus: Path
    out: Path
    result: dict[str, Any]

    @property
    def log(self) -> Path:
        """Metrics of all training runs."""
        return self.out / "training.jsonl"

    def keep(self, done: str) -> None:
        """Stores the rows so far and tells what was done."""
        self.result["seconds"] = round(self.clock.now, 1)
        store(self.out / "recipes.json", self.result)
        self.clock.say(done)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What Weavers are measured by.

    Attributes:
      choosing: texts after held-back prompts, which the arm is chosen by.
      judging: texts after the evaluation prompts.
      base: rounds of the first Weaver along `choosing`.
    """

    choosing: TextSet
    judging: TextSet
    base: Measured


def empty_result(plan: Plan, model: str, corpus: Path, loaded: Model) -> dict[str, Any]:
    """The result before any part has run: the whole setting, and no rows."""
    return {
        "setting": {
            **replay_setting(loaded, model, corpus),
            **dataclasses.asdict(plan),
            "to_base": "tfm by the first Weaver along the same texts, replayed",
        },
        "texts": {},
        "best": None,
        "training": [],
        "held_back": [],
        "evaluation": [],
        "decoded": [],
        "seconds": 0.0,
    }


def measure(run: Run) -> None:
    """Runs all parts; the rows go to `run.result`.

    Rows of "held_back" and "evaluation" are replays; all are compared with `tfm` by the first
    Weaver along the same texts.
    """
    plan, networks = run.plan, run.networks
    held_back = heldout_prompts(run.corpus, plan.count)
    given = {d: load_prompts(networks.model, d, plan.count, plan.longest_prompt) for d in DOMAINS}
    with concurrent.futures.ThreadPoolExecutor(len(plan.recipes) + 2) as pool:
        steps = {
            name: pool.submit(compile_step, networks, plan, recipe)
            for name, recipe in plan.recipes.items()
        }
        first_measured = pool.submit(measure_first, run, held_back, given)
        loops = pool.submit(compile_loops, networks.model, given, plan.new_tokens)
        texts = write_texts_to_learn(run)
        yardstick = first_measured.result()
        batches = texts.usable(networks.config.depth).batches(_rows(plan), plan.seed)
        best, params = train_arms(run, steps, batches, yardstick)
        params = train_second(run, best, params, steps[best].result(), batches, yardstick)
        replayed = judge(run, params, yardstick.judging)
        decode(run, params, given, loops.result(), yardstick.judging, replayed)


def write_texts_to_learn(run: Run) -> Continuations:
    """What the Weavers are trained on."""
    texts = write_continuations(
        run.networks.frozen.verifier,
        run.corpus,
        run.plan.texts,
        vocab_limit=run.networks.model.vocab_limit,
        seed=run.plan.seed,
        seconds=run.clock.left(run.plan.write),
    )
    run.result["texts"] = describe(texts)
    run.keep(f"{len(texts.tokens)} texts to learn from")
    return texts


def measure_first(run: Run, held_back: Prompts, given: Prompts) -> Yardstick:
    """Writes the texts to measure with, and replays all methods along those to choose by."""
    model, new_tokens = run.networks.model, run.plan.new_tokens
    width = max(len(p) for own in (*held_back.values(), *given.values()) for p in own)
    choosing = make_set(model, held_back, width, new_tokens)
    judging = make_set(model, given, width, new_tokens)
    first = with_weaver(run.networks, run.networks.first)
    found = {method: replay_all(first, choosing, method) for method in METHODS}
    for method, rounds in found.items():
        names = {"weaver": "first", "method": method}
        run.result["held_back"] += rows_beside(names, choosing, rounds, {"base": found["tfm"]})
    run.clock.say("first Weaver replayed along held-back texts")
    return Yardstick(choosing=choosing, judging=judging, base=found["tfm"])


def train_arms(
    run: Run,
    steps: Mapping[str, concurrent.futures.Future[Step]],
    batches: Callable[[int], Any],
    yardstick: Yardstick,
) -> tuple[str, Params]:
    """Trains with every recipe for a while; the best one's name and parameters."""
    merits: dict[str, float] = {}
    best: tuple[str, Params] | None = None
    for name, step in steps.items():
        seconds = run.plan.arm * run.plan.seconds
        params = _train(run, name, name, run.networks.first, step.result(), batches, seconds)
        merits[name] = _merit(_choose(run, name, params, yardstick))
        if best is None or merits[name] > merits[best[0]]:
            best = name, params
        run.keep(f"arm {name!r}: {merits[name]:.3f} of the first Weaver")
    assert best is not None
    run.result["best"] = best[0]
    return best


def train_second(
    run: Run,
    recipe: str,
    params: Params,
    step: Step,
    batches: Callable[[int], Any],
    yardstick: Yardstick,
) -> Params:
    """Goes on from an arm and writes the network."""
    seconds = run.clock.left(run.plan.train)
    params = _train(run, "second", recipe, params, step, batches, seconds)
    numbers = {name: np.asarray(value) for name, value in params.items()}
    write_hf(run.out / "weaver", run.networks.config, numbers, dtype="bfloat16")
    merit = _merit(_choose(run, "second", params, yardstick))
    run.keep(f"second Weaver, {recipe!r}: {merit:.3f} of the first")
    return params


def judge(run: Run, params: Params, judging: TextSet) -> dict[tuple[str, str], Measured]:
    """Replays along the evaluation texts; rounds by Weaver and method."""
    first = with_weaver(run.networks, run.networks.first)
    second = with_weaver(run.networks, as_stored(params))
    found = {("first", method): replay_all(first, judging, method) for method in METHODS}
    found["second", "tfm"] = replay_all(second, judging, "tfm")
    for (weaver, method), rounds in found.items():
        names = {"weaver": weaver, "method": method}
        base = {"base": found["first", "tfm"]}
        run.result["evaluation"] += rows_beside(names, judging, rounds, base)
    run.keep("evaluation prompts replayed")
    return found


def decode(
    run: Run,
    params: Params,
    prompts: Prompts,
    loops: Mapping[str, Callable],
    judging: TextSet,
    replayed: Mapping[tuple[str, str], Measured],
) -> None:
    """Decodes the evaluation prompts, the second Weaver first, as long as there is time.

    A row says for how many prompts the rounds are those of the replay.
    """
    model, new_tokens = run.networks.model, run.plan.new_tokens
    second = _served(model, with_weaver(run.networks, as_stored(params)))
    longest = 0.0
    for weaver, method in (("second", "tfm"), *(("first", method) for method in METHODS)):
        for setting in SETTINGS[:2]:
            if run.clock.now + longest > run.plan.seconds:
                run.clock.say(f"no time to decode {weaver} {method} T = {setting[0]:g}")
                continue
            begin = time.monotonic()
            decoding = second if weaver == "second" else model
            rounds = decode_rounds(decoding, loops[method], method, prompts, setting[0], new_tokens)
            longest = max(longest, time.monotonic() - begin)
            names = {"weaver": weaver, "method": method}
            base = {"base": replayed["first", "tfm"]}
            (row,) = rows_beside(names, judging, {setting: rounds}, base)
            pairs = zip(rounds, replayed[weaver, method][setting], strict=True)
            row |= {"prompts": len(rounds), "as_replayed": sum(a == b for a, b in pairs)}
            run.result["decoded"].append(row)
            run.keep(f"decoded {weaver} {method} T = {setting[0]:g}")


def _train(
    run: Run,
    title: str,
    recipe: str,
    params: Params,
    step: Step,
    batches: Callable[[int], Any],
    seconds: float,
) -> Params:
    """Trains on batches that no run has seen, and adds what the run was to the result."""
    first = sum(done["steps"] for done in run.result["training"])
    params, facts = train(
        title,
        run.networks,
        run.plan,
        run.plan.recipes[recipe],
        params,
        step,
        batches,
        first=first,
        seconds=seconds,
        log=run.log,
    )
    run.result["training"].append({"recipe": recipe, **facts})
    return params


def _choose(run: Run, name: str, params: Params, yardstick: Yardstick) -> list[dict[str, Any]]:
    """Replays a Weaver along the held-back texts and adds its rows to the result."""
    rounds = replay_all(with_weaver(run.networks, as_stored(params)), yardstick.choosing, "tfm")
    names = {"weaver": name, "method": "tfm"}
    rows = rows_beside(names, yardstick.choosing, rounds, {"base": yardstick.base})
    run.result["held_back"] += rows
    return rows


def _served(model: Model, trio: Trio) -> Model:
    """The model with another trio, in the form that it decodes in."""
    assert trio.weaver is not None
    if model.trio.growth is not None:
        verifier = trio.verifier
        growth = trio.weaver.growth_weights(verifier.embed_tokens.weight[...], verifier.output_rows)
        trio = dataclasses.replace(trio, growth=growth)
    return dataclasses.replace(model, trio=trio)


def describe(texts: Continuations) -> dict[str, Any]:
    """What texts to learn from are, for a result."""
    return {
        "texts": len(texts.tokens),
        "greedy": int((texts.temperature == 0).sum()),
        "copied_mean": round(float(texts.copied().mean()), 4),
        "digest": texts.digest,
    }


def _rows(plan: Plan) -> int:
    """Texts a step, the same in all recipes."""
    return next(iter(plan.recipes.values())).rows


def _merit(rows: Sequence[Mapping[str, Any]]) -> float:
    """What arms are chosen by: mean ratio to the base, greedy and with shared noise."""
    counted = [r["to_base"] for r in rows if r["shared_noise"] or r["temperature"] == 0]
    return float(np.mean(counted))


def check_new_results(out: Path) -> None:
    """Raises FileExistsError if a folder holds what the experiment writes."""
    there = [name for name in ("recipes.json", "training.jsonl", "weaver") if (out / name).exists()]
    if there:
        raise FileExistsError(
            f"{out} holds {', '.join(there)}, which are not replaced: name another folder"
        )


def main(arguments: list[str] | None = None) -> None:
    plan = Plan()
    parser = argparse.ArgumentParser(description="A second edition of a Weaver.")
    parser.add_argument("--model", default=POCKET, help="trio whose Weaver is trained further")
    parser.add_argument("--corpus", type=Path, required=True, help="made by `tfm data corpus`")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seconds", type=float, default=plan.seconds, help="for everything")
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--count", type=int, default=plan.count, help="prompts a domain")
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    options = parser.parse_args(arguments)
    clock = Clock(begin=time.monotonic(), seconds=options.seconds)
    with refusing(parser):
        plan = dataclasses.replace(
            plan, seconds=options.seconds, seed=options.seed, count=options.count
        )
        check_corpus(options.corpus, options.model)
        check_new_results(options.out)
        options.out.mkdir(parents=True, exist_ok=True)
    # Thousands of texts at once: XLA's forms, since the kernels are made for a single one. What
    # the trainer prints is progress.
    with automatic("xla"), contextlib.redirect_stdout(sys.stderr):
        networks = open_networks(options.model)
        run = Run(
            networks=networks,
            plan=plan,
            clock=clock,
            corpus=options.corpus,
            out=options.out,
            result=empty_result(plan, options.model, options.corpus, networks.model),
        )
        measure(run)
    result = run.result
    if options.json:
        print(json.dumps(result))
        return
    for part in ("held_back", "evaluation", "decoded"):
        for row in result[part]:
            low, high = row["ci95"]
            noise = ", shared noise" if row["shared_noise"] else ""
            print(
                f"{part:10s}  {row['weaver']:12s}  {row['method']:6s}  "
                f"T = {row['temperature']:g}{noise:14s}  {row['mean_accepted_length']:.3f} "
                f"({low:.2f} to {high:.2f})  {row['to_base']:.1%} of the first"
            )


if __name__ == "__main__":
    main()
