"""Trains a whole trio from packed text, stage by stage:

    python -m tfm_jax.training.pocket verifier continuations dflash weaver \
        --corpus build/corpus --out build/pocket

Each stage reads what the stages before it wrote into the output folder, so it can run on its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tfm_jax.checkpoints import build_drafter, build_verifier, write_hf
from tfm_jax.checkpoints.opened import open_drafter, open_verifier
from tfm_jax.config import ConfigError, DrafterConfig, VerifierConfig, WeaverConfig
from tfm_jax.files import read_json
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.presets import Geometry, parse_geometry
from tfm_jax.text import load_tokenizer
from tfm_jax.training.arithmetic import rates_of
from tfm_jax.training.batches import MIXTURE, PACKED, TokenBatches, load_streams
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.dflash import DrafterRecipe, train_drafter
from tfm_jax.training.parallel import Spread
from tfm_jax.training.report import read_log
from tfm_jax.training.settings import check_seconds, check_seed, misfits
from tfm_jax.training.texts import write_continuations
from tfm_jax.training.tokenizer import END_OF_TEXT, MASK, TURN_END, domain_shares
from tfm_jax.training.trainer import OptimiserConfig, TrainState, compute_copy, host_params
from tfm_jax.training.verifier import heldout_loss, train_verifier
from tfm_jax.training.weaver import WeaverRecipe, train_weaver

STAGES = ("verifier", "continuations", "dflash", "weaver")
CONFIG = Path(__file__).parents[2] / "configs" / "pocket.json"
ASSETS = Path(__file__).parents[1] / "assets" / "pocket" / "verifier" / "verifier"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One stage of one run.

    Attributes:
      settings: the whole configuration file.
      stage: name of the stage.
      corpus: folder with `tokens.npz.xz` and `text/manifest.json`.
      out: folder of everything that training writes.
      seconds: time for the stage, compilation and export included; None for no limit.
      seed: of everything random.
      spread: devices to train on.
      begin: when the stage began, by `time.monotonic`.
    """

    settings: Mapping[str, Any]
    stage: str
    corpus: Path
    out: Path
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
        return parse_geometry(self.settings, "the configuration")

    def optimiser(self) -> OptimiserConfig:
        return OptimiserConfig(**self.options["optimiser"])

    def verifier(self) -> Verifier:
        """The trained verifier as it is stored, on the device."""
        opened = open_verifier(self.out / "verifier")
        return build_verifier(opened.config, opened.load(None))

    def drafter(self) -> Drafter:
        """The trained drafter as it is stored, on the device."""
        opened = open_drafter(self.out / "dflash")
        return build_drafter(opened.config, opened.load(None))


def check_stage(
    stage: str,
    *,
    config: str | Path = CONFIG,
    seconds: float | None = None,
    seed: int = 0,
    devices: int = 1,
) -> None:
    """Refuses what `train_stage` cannot run with; computes nothing.

    Args:
      stage, config, seconds, seed, devices: see `train_stage`.

    Raises:
      ValueError: a stage that does not exist or that the configuration says nothing of, a time or
        a seed out of range, or devices that do not exist or do not split the rows.
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    options = _options(Path(config), stage)
    seconds = options["seconds"] if seconds is None else seconds
    if seconds is not None:
        check_seconds(f"seconds of {stage}", seconds)
    check_seed(seed)
    spread = Spread(count=devices)
    if stage != "continuations":
        spread.check(options.get("recipe", options)["rows"])


def _options(config: Path, stage: str) -> Mapping[str, Any]:
    """A stage's own part of a configuration file."""
    settings = read_json(config)
    stages = settings.get("stages") if isinstance(settings, dict) else None
    options = stages.get(stage) if isinstance(stages, dict) else None
    if not isinstance(options, dict):
        raise ConfigError(f"{config} has no object `stages.{stage}`")
    problems = ", ".join(misfits(stage, options))
    if problems:
        raise ConfigError(f"{config}: {problems}")
    return options


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
      seconds: time for the stage; that of the configuration if not given. The configuration's
        may be null: then the numbers of steps and batches decide.
      seed: of everything random.
      devices: number of them that the rows of a training step are split among; continuations are
        written on one.

    Raises:
      ValueError: see `check_stage`.
    """
    check_stage(stage, config=config, seconds=seconds, seed=seed, devices=devices)
    begin = time.monotonic()
    settings = json.loads(Path(config).read_text("utf-8"))
    corpus, out = Path(corpus), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    run = Run(
        settings=settings,
        stage=stage,
        corpus=corpus,
        out=out,
        seconds=settings["stages"][stage]["seconds"] if seconds is None else seconds,
        seed=seed,
        spread=Spread(count=devices),
        begin=begin,
    )
    if stage == "verifier":
        _copy_tokenizer(run, _find_tokenizer(corpus, tokenizer))
    made = {
        "verifier": _verifier,
        "continuations": _continuations,
        "dflash": _drafter,
        "weaver": _weaver,
    }[stage](run)
    return _record(run, made)


def _verifier(run: Run) -> dict[str, Any]:
    config = run.geometry.verifier
    rows, length = run.options["rows"], run.options["length"]
    streams = load_streams(run.corpus / PACKED)
    mixture = domain_shares(run.options.get("mixture", MIXTURE), list(streams))
    batches = TokenBatches(streams, mixture, length, rows, seed=run.seed)
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
    _export(run, "verifier", config, state)
    windows = heldout_windows(run.corpus, length)
    loss = heldout_loss(config, compute_copy(state.params), windows)
    print("verifier: held-back nats per token ", loss, flush=True)
    return {
        **_trained(run, state, rows * length),
        "corpus_tokens": {name: len(stream) for name, stream in streams.items()},
        "mixture": mixture,
        "heldout_nats_per_token": loss,
    }


def heldout_windows(corpus: Path, length: int) -> dict[str, np.ndarray]:
    """16 windows [16, length + 1] of each domain's held-back text, where it is long enough."""
    streams = load_streams(corpus / PACKED, "heldout")
    long_enough = {name: stream for name, stream in streams.items() if len(stream) > 2 * length}
    return {
        name: TokenBatches(long_enough, {name: 1.0}, length, 16)[0]  # seed 0: always the same
        for name in long_enough
    }


def _continuations(run: Run) -> dict[str, Any]:
    texts = write_continuations(
        run.verifier(), run.corpus, run.options, seed=run.seed, seconds=run.left()
    )
    texts.save(run.out / "continuations.npz")
    return {"texts": len(texts.tokens), "tokens": texts.tokens.size}


def _drafter(run: Run) -> dict[str, Any]:
    config = run.geometry.drafter
    texts = Continuations.load(run.out / "continuations.npz")
    recipe = DrafterRecipe(**run.options["recipe"])
    state = train_drafter(
        config,
        run.verifier(),
        texts,
        run.optimiser(),
        recipe,
        seed=run.seed,
        log=run.log,
        log_every=run.options["log_every"],
        seconds=run.left(),
        spread=run.spread,
    )
    _export(run, "dflash", config, state)
    return _trained(run, state, recipe.rows * texts.tokens.shape[1])


def _weaver(run: Run) -> dict[str, Any]:
    config = run.geometry.weaver
    texts = Continuations.load(run.out / "continuations.npz")
    recipe = WeaverRecipe(**run.options["recipe"])
    state = train_weaver(
        config,
        run.verifier(),
        run.drafter(),
        texts,
        run.optimiser(),
        recipe,
        seed=run.seed,
        log=run.log,
        log_every=run.options["log_every"],
        seconds=run.left(),
        spread=run.spread,
    )
    _export(run, "weaver", config, state)
    return _trained(run, state, recipe.rows * texts.tokens.shape[1])


def _export(
    run: Run,
    name: str,
    config: VerifierConfig | DrafterConfig | WeaverConfig,
    state: TrainState,
) -> None:
    write_hf(run.out / name, config, host_params(state), dtype="bfloat16", overwrite=True)


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


def _record(run: Run, made: dict[str, Any]) -> dict[str, Any]:
    path = run.out / "provenance.json"
    entries = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    devices = {} if run.stage == "continuations" else {"devices": run.spread.count}
    entries[run.stage] = {
        **made,
        "seconds": round(time.monotonic() - run.begin, 1),
        "device": jax.devices()[0].device_kind,
        **devices,
        "jax": jax.__version__,
        "seed": run.seed,
        "corpus_manifest_sha256": _digest(run.corpus / "text" / "manifest.json"),
        "corpus_tokens_sha256": _digest(run.corpus / PACKED),
        "options": run.options,
    }
    path.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    return entries[run.stage]


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _find_tokenizer(corpus: Path, given: str | Path | None) -> Path:
    places = [Path(given)] if given is not None else [corpus / "tokenizer.json", ASSETS]
    files = [place / "tokenizer.json" if place.is_dir() else place for place in places]
    for file in files:
        if file.is_file():
            return file
    raise FileNotFoundError(f"no tokenizer at {' or '.join(map(str, files))}")


def _copy_tokenizer(run: Run, source: Path) -> None:
    """Stores the tokenizer with the verifier, once it is known to fit the configuration."""
    tokenizer = load_tokenizer(source)
    verifier = run.geometry.verifier
    drafter = run.geometry.drafter
    ends = (tokenizer.token_id(END_OF_TEXT), tokenizer.token_id(TURN_END))
    expected = (tokenizer.vocab_size, ends, tokenizer.token_id(MASK))
    given = (verifier.vocab_size, verifier.eos_token_ids, drafter.mask_token_id)
    if given != expected:
        raise ValueError(
            f"vocabulary size, end tokens and mask token of the configuration are {given}, "
            f"of {source} {expected}"
        )
    (run.out / "verifier").mkdir(exist_ok=True)
    shutil.copyfile(source, run.out / "verifier" / "tokenizer.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
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
    for stage in stages:  # all of them, before the first one computes
        check_stage(stage, **shared)
    for stage in stages:
        entry = train_stage(
            stage, options.corpus, options.out, tokenizer=options.tokenizer, **shared
        )
        print(f"{stage}: done in {entry['seconds']} s on {entry['device']}", flush=True)


if __name__ == "__main__":
    main()
