"""Trains a whole trio from packed text, stage by stage:

    python -m tfm_jax.training.pocket verifier continuations dflash weaver \
        --corpus build/corpus --out build/pocket

Each stage reads what the stages before it wrote into the output folder, so it can run on its own.
It replaces its own result of before, but nothing that it has not made, and not while results that
were made with it lie in the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tfm_jax.checkpoints import build_drafter, build_verifier, check_pair, write_hf
from tfm_jax.checkpoints.export import check_target
from tfm_jax.checkpoints.opened import open_drafter, open_verifier
from tfm_jax.config import (
    ConfigError,
    DrafterConfig,
    VerifierConfig,
    WeaverConfig,
    made,
)
from tfm_jax.files import whole_file
from tfm_jax.model import POCKET, directory
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.presets import Geometry, parse_geometry, preset_file
from tfm_jax.training.arithmetic import rates_of
from tfm_jax.training.batches import MIXTURE, PACKED, TokenBatches, load_streams
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.dflash import DrafterRecipe, train_drafter
from tfm_jax.training.leftovers import network_digest, recorded
from tfm_jax.training.parallel import Spread
from tfm_jax.training.report import read_log
from tfm_jax.training.settings import (
    check_lengths,
    check_seconds,
    check_seed,
    read_settings,
    refuse_given,
)
from tfm_jax.training.texts import (
    digest,
    heldout_windows,
    packed_corpus,
    training_streams,
    vocab_limit_of,
    write_continuations,
)
from tfm_jax.training.tokenizer import check_known, check_tokens, domain_shares
from tfm_jax.training.trainer import OptimiserConfig, TrainState, compute_copy, host_params
from tfm_jax.training.verifier import heldout_loss, train_verifier
from tfm_jax.training.weaver import WeaverRecipe, train_weaver

STAGES = ("verifier", "continuations", "dflash", "weaver")
CONFIG = preset_file("pocket")
PROVENANCE = "provenance.json"
# What each stage writes, what it reads, and what its result went into.
_RESULTS = {"continuations": "continuations.npz"} | {n: n for n in ("verifier", "dflash", "weaver")}
_READ = {stage: STAGES[:place] for place, stage in enumerate(STAGES)}
_BUILT = {"verifier": ("continuations", "dflash", "weaver"), "dflash": ("weaver",)}
_RECIPES = {"dflash": DrafterRecipe, "weaver": WeaverRecipe}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One stage of one run.

    Attributes:
      config: the configuration file.
      settings: all that it holds.
      stage: name of the stage.
      corpus: folder with `tokens.npz.xz` and `text/manifest.json`.
      out: folder of everything that training writes.
      tokenizer: file of the corpus's tokenizer; the stage "verifier" alone has one.
      seconds: time for the stage, compilation and export included; None for no limit.
      seed: of everything random.
      spread: devices to train on.
      begin: when the stage began, by `time.monotonic`.
    """

    config: Path
    settings: Mapping[str, Any]
    stage: str
    corpus: Path
    out: Path
    tokenizer: Path | None
    seconds: float | None
    seed: int
    spread: Spread
    begin: float

    @property
    def options(self) -> Mapping[str, Any]:
        """The stage's own part of the configuration."""
        return self.settings["stages"][self.stage]

    @property
    def log(self) -> Path:
        return self.out / "training.jsonl"

    def left(self, reserve: float = 0.04) -> float | None:
        """Seconds left, less a share of the whole for what comes after training."""
        if self.seconds is None:
            return None
        return self.seconds * (1 - reserve) - (time.monotonic() - self.begin)

    @property
    def geometry(self) -> Geometry:
        """Sizes of the three networks."""
        return parse_geometry(self.settings, str(self.config))

    def path(self, stage: str) -> Path:
        """Where the result of a stage lies."""
        return self.out / _RESULTS[stage]

    def optimiser(self) -> OptimiserConfig:
        return made(OptimiserConfig, self.options["optimiser"], self.where("optimiser"))

    def recipe(self) -> Any:
        """What the stage's network is trained by."""
        return made(_RECIPES[self.stage], self.options["recipe"], self.where("recipe"))

    def where(self, part: str) -> str:
        """What messages call a part of the stage's settings."""
        return f"{self.config}: {self.stage}.{part}"

    def verifier(self) -> Verifier:
        """The trained verifier as it is stored, on the device."""
        opened = open_verifier(self.path("verifier"))
        return build_verifier(opened.config, opened.load(None))

    @property
    def vocab_limit(self) -> int:
        """Ids that the trained verifier's tokenizer knows."""
        return vocab_limit_of(self.path("verifier"), self.geometry.verifier.vocab_size)

    def drafter(self) -> Drafter:
        """The trained drafter as it is stored, on the device."""
        opened = open_drafter(self.path("dflash"))
        return build_drafter(opened.config, opened.load(None))


def plan_stage(
    stage: str,
    corpus: str | Path,
    out: str | Path,
    *,
    config: str | Path = CONFIG,
    tokenizer: str | Path | None = None,
    seconds: float | None = None,
    seed: int = 0,
    devices: int = 1,
    before: Collection[str] = (),
) -> Run:
    """The stage as it begins now, all that it needs checked; computes and writes nothing.

    Args:
      stage, corpus, out, config, tokenizer, seconds, seed, devices: see `train_stage`.
      before: stages that will have run by then: their results need not lie in `out` yet.

    Raises:
      ValueError: a stage that does not exist or that the configuration says nothing of, settings,
        a time or a seed out of range, devices that do not exist or do not split the rows, a
        tokenizer or a corpus that does not fit, or results in `out` that the stage must not replace
        or cannot build on.
      OSError: a missing file or folder.
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    config, corpus = Path(config), Path(corpus)
    settings = read_settings(config)
    if stage not in settings.get("stages", {}):
        raise ConfigError(f"{config} has no object `stages.{stage}`")
    if tokenizer is not None and stage != "verifier":
        raise ValueError(f"tokenizer is for the stage verifier alone, got {tokenizer} for {stage}")
    seconds = settings["stages"][stage].get("seconds") if seconds is None else seconds
    if seconds is not None:
        check_seconds(f"seconds of {stage}", seconds)
    check_seed(seed)
    run = Run(
        config=config,
        settings=settings,
        stage=stage,
        corpus=corpus,
        out=Path(out),
        tokenizer=_find_tokenizer(corpus, tokenizer) if stage == "verifier" else None,
        seconds=seconds,
        seed=seed,
        spread=Spread(count=devices),
        begin=time.monotonic(),
    )
    _check_options(run)
    _check_results(run, before)
    _check_corpus(run, before)
    return run


def _check_options(run: Run) -> None:
    """Refuses settings of the stage that its parts do not take."""
    options, depth = run.options, run.geometry.drafter.depth
    if run.stage == "continuations":
        refuse_given(options, str(run.config))
        check_lengths(options, depth, f"{run.config}: continuations")
        return
    run.optimiser()
    run.spread.check(run.recipe().rows if run.stage in _RECIPES else options["rows"])


def _check_results(run: Run, before: Collection[str]) -> None:
    """Refuses a folder whose results the stage must not replace, or cannot build on."""
    entries, own = recorded(run.out / PROVENANCE), run.path(run.stage)
    if own.exists() and run.stage not in entries:
        raise ValueError(
            f"{own} is not replaced: {run.out / PROVENANCE} does not say that this stage made it; "
            "name another folder, or remove it"
        )
    if run.stage != "continuations":
        check_target(own, overwrite=True)
    built = [str(run.path(n)) for n in _BUILT.get(run.stage, ()) if run.path(n).exists()]
    if built:
        raise ValueError(
            f"{', '.join(built)} were made with the {run.stage} in {run.out}, which is not "
            "replaced beside them: name another folder, or remove them"
        )
    read = [stage for stage in _READ[run.stage] if stage not in before]
    for stage in read:
        if not run.path(stage).exists():
            raise FileNotFoundError(f"{run.path(stage)} is missing: the stage {stage} makes it")
    if "verifier" not in read:
        return
    verifier = open_verifier(run.path("verifier"))
    check_pair(verifier.config, run.geometry.drafter, run.geometry.weaver)
    made_with = network_digest(verifier)
    for stage in read[1:]:
        if entries.get(stage, {}).get("verifier_sha256") != made_with:
            raise ValueError(
                f"{run.path(stage)} is not known to be made with the verifier in "
                f"{run.path('verifier')}: run the stage {stage} again"
            )


def _check_corpus(run: Run, before: Collection[str]) -> None:
    """Refuses a corpus that is none, is of another tokenizer or is too short for the stage."""
    tokenizer = run.tokenizer
    if run.stage != "verifier" and "verifier" not in before:
        file = run.path("verifier") / "tokenizer.json"
        tokenizer = file if file.is_file() else None
    packed_corpus(run.corpus, (), tokenizer, run.corpus)
    if run.stage == "continuations":
        training_streams(run.corpus, run.options["prompt"] - 1)
    if run.stage == "verifier":
        assert tokenizer is not None
        check_tokens(tokenizer, run.geometry.verifier, run.geometry.drafter)
        _batches(run)


def _batches(run: Run) -> tuple[TokenBatches, dict[str, float], dict[str, int]]:
    """What a verifier is trained on, the share of each domain, and the tokens there are of it."""
    streams = load_streams(run.corpus / PACKED)
    mixture = domain_shares(run.options.get("mixture", MIXTURE), list(streams))
    check_known(run.corpus, streams, run.geometry.verifier.vocab_size)
    rows, length = run.options["rows"], run.options["length"]
    sizes = {name: len(stream) for name, stream in streams.items()}
    return TokenBatches(streams, mixture, length, rows, seed=run.seed), mixture, sizes


def train_stage(
    stage: str,
    corpus: str | Path,
    out: str | Path,
    *,
    config: str | Path = CONFIG,
    tokenizer: str | Path | None = None,
    seconds: float | None = None,
    seed: int = 0,
    devices: int = 1,
) -> dict[str, Any]:
    """Runs one stage and returns its entry of `OUT/provenance.json`.

    Writes `OUT/{verifier,dflash,weaver}/` in the published layouts (bfloat16),
    `OUT/continuations.npz`, and metrics to `OUT/training.jsonl`.

    Args:
      stage: one of STAGES.
      corpus: folder made by `tfm_jax.training.prepare`.
      out: folder to write; holds the results of earlier stages.
      config: JSON file with the three geometries and the settings of the stages.
      tokenizer: `tokenizer.json` of the corpus; the corpus's own, else the package's, if not given.
      seconds: time for the stage; that of the configuration if not given. Without either the
        numbers of steps and batches decide.
      seed: of everything random.
      devices: number of them that the rows of a training step are split among; continuations are
        written on one.

    Raises:
      ValueError, OSError: see `plan_stage`.
    """
    run = plan_stage(
        stage,
        corpus,
        out,
        config=config,
        tokenizer=tokenizer,
        seconds=seconds,
        seed=seed,
        devices=devices,
    )
    run.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "verifier": _verifier,
        "continuations": _continuations,
        "dflash": _drafter,
        "weaver": _weaver,
    }[stage](run)
    return _record(run, facts)


def _verifier(run: Run) -> dict[str, Any]:
    assert run.tokenizer is not None
    config, tokenizer = run.geometry.verifier, run.tokenizer.read_bytes()
    batches, mixture, sizes = _batches(run)
    state = train_verifier(
        config,
        batches.__getitem__,
        run.optimiser(),
        seed=run.seed,
        log=run.log,
        log_every=run.options["log_every"],
        seconds=run.left(reserve=0.08),
        spread=run.spread,
    )
    _export(run, config, state, beside={"tokenizer.json": tokenizer})
    windows = heldout_windows(run.corpus, batches.seq_len)
    loss = heldout_loss(config, compute_copy(state.params), windows)
    print("verifier: held-back nats per token ", loss, flush=True)
    return {
        **_trained(run, state, batches.batch * batches.seq_len),
        "corpus_tokens": sizes,
        "mixture": mixture,
        "heldout_nats_per_token": loss,
    }


def _continuations(run: Run) -> dict[str, Any]:
    texts = write_continuations(
        run.verifier(),
        run.corpus,
        run.options,
        vocab_limit=run.vocab_limit,
        seed=run.seed,
        seconds=run.left(),
    )
    texts.save(run.path("continuations"))
    return {"texts": len(texts.tokens), "tokens": texts.tokens.size}


def _drafter(run: Run) -> dict[str, Any]:
    config = run.geometry.drafter
    texts, recipe = Continuations.load(run.path("continuations")), run.recipe()
    state = train_drafter(
        config,
        run.verifier(),
        texts,
        run.optimiser(),
        recipe,
        vocab_limit=run.vocab_limit,
        seed=run.seed,
        log=run.log,
        log_every=run.options["log_every"],
        seconds=run.left(),
        spread=run.spread,
    )
    _export(run, config, state)
    return _trained(run, state, recipe.rows * texts.tokens.shape[1])


def _weaver(run: Run) -> dict[str, Any]:
    config = run.geometry.weaver
    texts, recipe = Continuations.load(run.path("continuations")), run.recipe()
    state = train_weaver(
        config,
        run.verifier(),
        run.drafter(),
        texts,
        run.optimiser(),
        recipe,
        vocab_limit=run.vocab_limit,
        seed=run.seed,
        log=run.log,
        log_every=run.options["log_every"],
        seconds=run.left(),
        spread=run.spread,
    )
    _export(run, config, state)
    return _trained(run, state, recipe.rows * texts.tokens.shape[1])


def _export(
    run: Run,
    config: VerifierConfig | DrafterConfig | WeaverConfig,
    state: TrainState,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    params = host_params(state)
    own = run.path(run.stage)
    write_hf(own, config, params, dtype="bfloat16", beside=beside, overwrite=True)


def _trained(run: Run, state: TrainState, tokens: int) -> dict[str, float]:
    """What a training run did, at `tokens` tokens a step, and how fast."""
    steps = int(state.step)
    return {
        "steps": steps,
        "skipped_steps": int(state.skipped),
        "tokens": steps * tokens,
        "parameters": sum(value.size for value in state.params.values()),
        **rates_of(read_log(run.log)[-1], run.spread.count),
    }


def _record(run: Run, facts: dict[str, Any]) -> dict[str, Any]:
    """Stores what a stage did; what was made with its result before is gone, and its entry goes."""
    gone = _BUILT.get(run.stage, ())
    before = recorded(run.out / PROVENANCE)
    entries = {name: entry for name, entry in before.items() if name not in gone}
    devices = {} if run.stage == "continuations" else {"devices": run.spread.count}
    entries[run.stage] = {
        **facts,
        "seconds": round(time.monotonic() - run.begin, 1),
        "device": jax.devices()[0].device_kind,
        **devices,
        "jax": jax.__version__,
        "seed": run.seed,
        "corpus_manifest_sha256": _digest(run.corpus / "text" / "manifest.json"),
        "corpus_tokens_sha256": _digest(run.corpus / PACKED),
        "verifier_sha256": network_digest(open_verifier(run.path("verifier"))),
        "options": run.options,
    }
    with whole_file(run.out / PROVENANCE) as partial:
        partial.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    return entries[run.stage]


def _digest(path: Path) -> str | None:
    return digest([path.read_bytes()]) if path.is_file() else None


def _find_tokenizer(corpus: Path, given: str | Path | None) -> Path:
    own = directory(POCKET) / "verifier"
    places = [Path(given)] if given is not None else [corpus / "tokenizer.json", own]
    files = [place / "tokenizer.json" if place.is_dir() else place for place in places]
    for file in files:
        if file.is_file():
            return file
    raise FileNotFoundError(f"no tokenizer at {' or '.join(map(str, files))}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tfm_jax.training.pocket")
    parser.add_argument("stages", nargs="+", choices=(*STAGES, "all"), metavar="STAGE")
    parser.add_argument("--corpus", required=True, help="folder made by tfm_jax.training.prepare")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--config", default=CONFIG, help="geometry and settings, JSON")
    parser.add_argument("--tokenizer", help="tokenizer.json, instead of the corpus's own")
    parser.add_argument("--seconds", type=float, help="time for each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1, help="that share each training step")
    options = parser.parse_args(arguments)
    stages = STAGES if "all" in options.stages else options.stages
    shared = {name: getattr(options, name) for name in ("config", "seconds", "seed", "devices")}
    # Of several stages the verifier alone reads it; without that one it is refused.
    reader = "verifier" if "verifier" in stages else stages[0]
    try:
        for place, stage in enumerate(stages):  # all of them, before the first one computes
            tokenizer = options.tokenizer if stage == reader else None
            plan_stage(
                stage,
                options.corpus,
                options.out,
                tokenizer=tokenizer,
                before=stages[:place],
                **shared,
            )
        for stage in stages:
            tokenizer = options.tokenizer if stage == reader else None
            entry = train_stage(stage, options.corpus, options.out, tokenizer=tokenizer, **shared)
            print(f"{stage}: done in {entry['seconds']} s on {entry['device']}", flush=True)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
