"""Trains one network, from text to a published checkpoint, in one folder that can be resumed.

The folder holds `checkpoints/`, `training.jsonl`, what had to be made (`corpus/`,
`continuations.npz`) and what from (`sources.json`), the network itself under its name, and
`summary.json`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.checkpoints import build_drafter, build_verifier, check_pair, write_hf
from tfm_jax.checkpoints.opened import Opened, open_weaver
from tfm_jax.checkpoints.trio import OpenedTrio, check_dtype, open_trio
from tfm_jax.config import ConfigError, DrafterConfig, VerifierConfig, WeaverConfig, made
from tfm_jax.decoding.state import Trio
from tfm_jax.model import default_dtype, directory
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.presets import geometry
from tfm_jax.text import load_tokenizer
from tfm_jax.training.batches import MIXTURE, PACKED, TokenBatches, load_streams
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.dflash import (
    DrafterRecipe,
    drafter_objective,
    initial_drafter,
    train_drafter,
)
from tfm_jax.training.evaluation import hold_back, make_evaluation
from tfm_jax.training.leftovers import claim
from tfm_jax.training.parallel import Spread
from tfm_jax.training.plots import plot_training, require_matplotlib
from tfm_jax.training.settings import (
    check_seconds,
    check_seed,
    read_settings,
    stage_settings,
)
from tfm_jax.training.tensorboard import TensorBoard, require_tensorboard
from tfm_jax.training.texts import (
    corpus_sources,
    digest,
    given_texts,
    packed_corpus,
    training_streams,
    write_continuations,
)
from tfm_jax.training.tokenizer import domain_shares
from tfm_jax.training.trainer import (
    Loss,
    OptimiserConfig,
    Params,
    TrainState,
    compute_copy,
    host_params,
)
from tfm_jax.training.verifier import heldout_loss, train_verifier
from tfm_jax.training.weaver import (
    WeaverRecipe,
    initial_weaver,
    train_weaver,
    weaver_objective,
)

Network = Literal["verifier", "dflash", "weaver"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to train against and on, for how long, and where to.

    Attributes:
      out: folder of everything that the run writes.
      model: "pocket" or a directory with the frozen networks; it lends a verifier its tokenizer.
      config: JSON file of sizes and stages; the model's own sizes and a short run if not given.
      texts: continuations of the model, an npz file.
      corpus: folder of packed tokens.
      text: folders of text files. Without any of the three a sample serves.
      warm_start: a Weaver to start from.
      steps: instead of the configuration's.
      seconds: time for training, in place of steps.
      seed: of everything random.
      dtype: to compute in; float32 on a CPU, else bfloat16, if not given.
      resume: go on from the newest checkpoint in `out`.
      save_every: seconds between checkpoints.
      devices: to split the rows of each step among.
      tensorboard: folder of event files.
      plot: draw `training.svg`.
    """

    out: Path
    model: str | Path = "pocket"
    config: Path | None = None
    texts: Path | None = None
    corpus: Path | None = None
    text: tuple[Path, ...] = ()
    warm_start: Path | None = None
    steps: int | None = None
    seconds: float | None = None
    seed: int = 0
    dtype: str | None = None
    resume: bool = False
    save_every: float = 60.0
    devices: int = 1
    tensorboard: Path | None = None
    plot: bool = False

    def __post_init__(self) -> None:
        given = [n for n in ("texts", "corpus", "text") if getattr(self, n) not in (None, ())]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both name the text: give one of them")
        if self.steps is not None and self.seconds is not None:
            raise ValueError("steps and seconds both give the length of the run: give one of them")
        if self.seconds is not None:
            check_seconds("seconds", self.seconds)
        check_seed(self.seed)
        if not 0 <= self.save_every < float("inf"):
            raise ValueError(f"save_every must be at least 0 seconds, got {self.save_every}")

    @property
    def compute(self) -> jnp.dtype:
        """The dtype to compute in."""
        return jnp.dtype(check_dtype(default_dtype(self.dtype)))

    @property
    def log(self) -> Path:
        return self.out / "training.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """A job with its files read and checked, nothing computed yet."""

    job: Job
    network: Network
    settings: Mapping[str, Any]
    stage: Mapping[str, Any]
    optimiser: OptimiserConfig

    @property
    def seconds(self) -> float | None:
        """Time for training, if it is not the steps that count."""
        if self.job.steps is not None:
            return None
        return self.job.seconds or self.stage.get("seconds")

    def where(self, part: str) -> str:
        """What messages call a part of the stage's settings."""
        return f"{self.job.config or 'built-in settings'}: {self.network}.{part}"


def train_network(network: Network, job: Job) -> dict[str, Any]:
    """Trains a network and returns the summary that is stored beside it.

    The network lies in `<out>/<network>/` in its published layout, bfloat16. The summary has
    steps, skipped steps, metrics before and after on texts held back, and the setting.

    Raises:
      ValueError, OSError, ImportError: bad input, before any compute.
    """
    begin = time.monotonic()
    if job.plot:
        require_matplotlib()
    if job.tensorboard is not None:
        require_tensorboard()
    plan = _plan(network, job)
    run = {"verifier": _verifier, "dflash": _drafter, "weaver": _weaver}[network]
    summary = {
        "network": network,
        **run(plan),
        "seconds": round(time.monotonic() - begin, 1),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    (job.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    if job.plot:
        plot_training(job.log, job.out / "training.svg")
    return summary


def _plan(network: Network, job: Job) -> _Plan:
    if (job.out / "checkpoints").is_dir() and not job.resume:
        raise ValueError(f"{job.out} holds a run already: resume it, or name another folder")
    settings = {} if job.config is None else read_settings(job.config)
    stage = stage_settings(settings, network)
    where = f"{job.config or 'built-in settings'}: {network}.optimiser"
    entries = stage["optimiser"] | ({} if job.steps is None else {"steps": job.steps})
    return _Plan(
        job=job,
        network=network,
        settings=settings,
        stage=stage,
        optimiser=made(OptimiserConfig, entries, where),
    )


def _verifier(plan: _Plan) -> dict[str, Any]:
    job, stage = plan.job, plan.stage
    if "verifier" in plan.settings:
        config = made(VerifierConfig, plan.settings["verifier"], f"{job.config}: verifier")
    else:
        config = geometry("pocket").verifier
    source = None if job.corpus is None else job.corpus / "tokenizer.json"
    if source is None or not source.is_file():
        source = open_trio(directory(job.model)).text_files / "tokenizer.json"
    vocabulary = load_tokenizer(source).vocab_size
    if vocabulary > config.vocab_size:
        raise ConfigError(
            f"{source} has {vocabulary} tokens, the verifier's vocab_size is {config.vocab_size}"
        )
    rows, length = stage["rows"], stage["length"]
    spread = _spread(job, rows)
    _claim(job, corpus_sources(job.corpus, job.text, source))
    corpus = packed_corpus(job.corpus, job.text, source, job.out / "corpus", length)
    streams = training_streams(corpus, length)
    batches = TokenBatches(streams, domain_shares(MIXTURE, list(streams)), length, rows, job.seed)
    heldout = load_streams(corpus / PACKED, "heldout")
    heldout = {name: s for name, s in heldout.items() if len(s) > 2 * length}
    texts = {name: TokenBatches(heldout, {name: 1.0}, length, rows)[0] for name in heldout}
    setting = {"rows": rows, "length": length, "text": digest([(corpus / PACKED).read_bytes()])}
    with _reports(plan, config, setting) as reports:
        state = train_verifier(
            config,
            batches.__getitem__,
            plan.optimiser,
            seed=job.seed,
            dtype=job.compute,
            spread=spread,
            **reports,
        )
    after = heldout_loss(config, compute_copy(state.params, job.compute), texts)
    summary = _export(plan, config, state)
    shutil.copyfile(source, job.out / "verifier" / "tokenizer.json")
    return {**summary, "after": after, "heldout": True}


def _drafter(plan: _Plan) -> dict[str, Any]:
    job = plan.job
    opened = open_trio(directory(job.model))
    config = _drafter_config(plan, opened)
    check_pair(opened.verifier.config, config)
    recipe = made(DrafterRecipe, plan.stage["recipe"], plan.where("recipe"))
    spread = _spread(job, recipe.rows)
    verifier = _built(opened.verifier, job.compute)
    frozen = _digests({"verifier": opened.verifier})
    texts, held = _texts(plan, opened, verifier, config.depth, frozen)
    objective = drafter_objective(config, recipe)
    measure = _evaluation(job, recipe.rows, objective, verifier, texts, held)
    before = measure(initial_drafter(config, job.seed))
    setting = {"recipe": dataclasses.asdict(recipe), "texts": texts.digest, "frozen": frozen}
    with _reports(plan, config, setting) as reports:
        state = train_drafter(
            config,
            verifier,
            texts,
            plan.optimiser,
            recipe,
            seed=job.seed,
            spread=spread,
            **reports,
        )
    after = measure(state.params)
    return {
        **_export(plan, config, state),
        "before": before,
        "after": after,
        "heldout": held is not None,
    }


def _weaver(plan: _Plan) -> dict[str, Any]:
    job = plan.job
    opened = open_trio(directory(job.model))
    if opened.drafter is None:
        raise ValueError(f"{job.model} has no drafter: a Weaver scores a drafter's candidates")
    config, given = _weaver_config(plan, opened)
    check_pair(opened.verifier.config, opened.drafter.config, config)
    recipe = made(WeaverRecipe, plan.stage["recipe"], plan.where("recipe"))
    spread = _spread(job, recipe.rows)
    verifier = _built(opened.verifier, job.compute)
    drafter = _built(opened.drafter, job.compute)
    frozen = _digests({"verifier": opened.verifier, "drafter": opened.drafter})
    texts, held = _texts(plan, opened, verifier, config.depth, frozen)
    networks = Trio(verifier=verifier, drafter=drafter)
    objective = weaver_objective(config, recipe)
    measure = _evaluation(job, recipe.rows, objective, networks, texts, held)
    before = measure(initial_weaver(config, given, job.seed))
    _announce("before", before)
    setting = {
        "recipe": dataclasses.asdict(recipe),
        "texts": texts.digest,
        "frozen": frozen,
        "warm_start": given and digest(given[path].tobytes() for path in sorted(given)),
    }
    with _reports(plan, config, setting) as reports:
        state = train_weaver(
            config,
            verifier,
            drafter,
            texts,
            plan.optimiser,
            recipe,
            start=given,
            seed=job.seed,
            spread=spread,
            **reports,
        )
    after = measure(state.params)
    _announce("after", after)
    return {
        **_export(plan, config, state),
        "before": before,
        "after": after,
        "heldout": held is not None,
    }


def _drafter_config(plan: _Plan, opened: OpenedTrio) -> DrafterConfig:
    if "drafter" in plan.settings:
        return made(DrafterConfig, plan.settings["drafter"], f"{plan.job.config}: drafter")
    if opened.drafter is None:
        raise ValueError(
            f"{plan.job.model} has no drafter to take sizes from: give a configuration with them"
        )
    return opened.drafter.config


def _weaver_config(
    plan: _Plan, opened: OpenedTrio
) -> tuple[WeaverConfig, dict[str, np.ndarray] | None]:
    """Sizes of the Weaver, and the parameters of a warm start."""
    job, config = plan.job, None
    if "weaver" in plan.settings:
        config = made(WeaverConfig, plan.settings["weaver"], f"{job.config}: weaver")
    if job.warm_start is not None:
        start = open_weaver(job.warm_start)
        if config not in (None, start.config):
            raise ConfigError(f"{job.warm_start} is {start.config}, {job.config} asks for {config}")
        return start.config, start.load(check_dtype("float32"))
    if config is None and opened.weaver is None:
        raise ValueError(
            f"{job.model} has no Weaver to take sizes from: give a configuration with them"
        )
    if config is None:
        assert opened.weaver is not None
        config = opened.weaver.config
    return config, None


def _spread(job: Job, rows: int) -> Spread:
    """The job's devices, once it is known that `rows` rows split among them."""
    spread = Spread(count=job.devices)
    spread.check(rows)
    return spread


def _built(opened: Opened, dtype: jnp.dtype) -> Any:
    build = {VerifierConfig: build_verifier, DrafterConfig: build_drafter}[type(opened.config)]
    return build(opened.config, opened.load(np.dtype(dtype)))


def _digests(networks: Mapping[str, Opened]) -> dict[str, str]:
    """SHA-256 of each network's configuration and of its weights as they are stored."""

    def parts(network: Opened) -> Iterator[bytes | memoryview]:
        yield repr(network.config).encode()
        for name in sorted(network.tensors):
            yield name.encode()
            array = np.ascontiguousarray(network.tensors[name])
            yield array.reshape(-1).view(np.uint8).data

    return {name: digest(parts(network)) for name, network in networks.items()}


def _claim(job: Job, sources: Mapping[str, Any]) -> None:
    """Refuses a folder whose checkpoints or texts come from other sources; see `claim`."""
    depends = {"checkpoints": set(sources)}
    if job.texts is None:
        depends["continuations.npz"] = set(sources) - {"drafter"}
        if job.corpus is None:
            depends[f"corpus/{PACKED}"] = {"text", "tokenizer"}
    claim(job.out, sources, depends)


def _texts(
    plan: _Plan,
    opened: OpenedTrio,
    verifier: Verifier,
    depth: int,
    frozen: Mapping[str, str],
) -> tuple[Continuations, Continuations | None]:
    """Continuations to train on and to evaluate on, written first if the job names none."""
    job = plan.job
    networks = {n: {"named": str(job.model), "sha256": found} for n, found in frozen.items()}
    if job.texts is not None:
        texts = Continuations.load(job.texts)
        texts.check(verifier.config.vocab_size)
        parts = hold_back(texts, depth)
        text = {"named": str(job.texts), "sha256": texts.digest}
        _claim(job, {"text": text, **networks})
        return parts
    kept = job.out / "continuations.npz"
    file = opened.text_files / "tokenizer.json"
    tokenizer = file if file.is_file() else None
    options = stage_settings(plan.settings, "continuations")
    total, shortest = options["total"], min(options["shortest"], options["prompt"])
    if max(shortest, 2) - 1 + depth >= total:
        raise ValueError(
            f"{job.config or 'built-in settings'}: continuations of {total} tokens have no room "
            f"for a prompt of {shortest} and {depth} tokens after it"
        )
    sources = corpus_sources(job.corpus, job.text, tokenizer)
    writing = {"seed": job.seed, "dtype": str(job.compute), "continuations": options}
    _claim(job, {**sources, **networks, **writing})
    window = max(options["prompt"], total if options.get("given") else 0) - 1
    corpus = packed_corpus(job.corpus, job.text, tokenizer, job.out / "corpus", window)
    given = given_texts(verifier, corpus, options, seed=job.seed)
    if kept.is_file():
        texts = Continuations.load(kept)
    else:
        texts = write_continuations(
            verifier, corpus, options, seed=job.seed, seconds=options.get("seconds")
        )
        texts.save(kept)
    if given is None:
        return hold_back(texts, depth)
    rest, held = hold_back(texts, depth, share=0.5)
    return rest.joined(given), held


def _evaluation(
    job: Job,
    rows: int,
    loss: Loss,
    frozen: Verifier | Trio,
    texts: Continuations,
    held: Continuations | None,
) -> Callable[[Params], dict[str, Any]]:
    """Metrics on the texts held back, or on the training texts where there are too few."""
    return make_evaluation(loss, frozen, texts if held is None else held, rows, job.compute)


def _announce(when: str, metrics: Mapping[str, Any]) -> None:
    lengths = (f"{n.removeprefix('length_')} {v:.3f}" for n, v in metrics.items() if "length" in n)
    print(f"weaver: expected accepted length {when} training: {', '.join(lengths)}", flush=True)


@contextmanager
def _reports(
    plan: _Plan,
    config: VerifierConfig | DrafterConfig | WeaverConfig,
    setting: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Arguments of a training function that say where it reports and saves to."""
    job = plan.job
    decisive = {
        "network": plan.network,
        "config": dataclasses.asdict(config),
        "optimiser": dataclasses.asdict(plan.optimiser),
        "seconds": plan.seconds,
        "seed": job.seed,
        "dtype": str(job.compute),
        **setting,
    }
    with ExitStack() as stack:
        on_record = None
        if job.tensorboard is not None:
            on_record = stack.enter_context(TensorBoard(job.tensorboard)).add
        job.out.mkdir(parents=True, exist_ok=True)
        folder = job.out / "checkpoints"
        checkpoints = stack.enter_context(Checkpoints(folder, decisive, every=job.save_every))
        if job.resume:
            print(f"{plan.network}: goes on from step {checkpoints.latest or 0}", flush=True)
        yield {
            "log": job.log,
            "log_every": plan.stage["log_every"],
            "seconds": plan.seconds,
            "checkpoints": checkpoints,
            "on_record": on_record,
        }


def _export(
    plan: _Plan, config: VerifierConfig | DrafterConfig | WeaverConfig, state: TrainState
) -> dict[str, Any]:
    """Writes the network and says what training did."""
    params = host_params(state)
    write_hf(plan.job.out / plan.network, config, params, dtype="bfloat16", overwrite=True)
    return {
        "steps": int(state.step),
        "skipped_steps": int(state.skipped),
        "parameters": sum(value.size for value in params.values()),
    }
