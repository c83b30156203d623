"""Trains one network, from text to a published checkpoint, in one folder that can be resumed.

The folder holds `checkpoints/`, `training.jsonl`, what had to be made (`corpus/`,
`continuations.npz`) and what from (`sources.json`), the network itself under its name, and
`summary.json`.
"""

from __future__ import annotations

import dataclasses
import json
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
from tfm_jax.files import whole_file
from tfm_jax.model import POCKET, default_dtype, directory
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.presets import geometry
from tfm_jax.training.batches import MIXTURE, PACKED, TokenBatches
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.dflash import (
    DrafterRecipe,
    drafter_objective,
    initial_drafter,
    train_drafter,
)
from tfm_jax.training.evaluation import hold_back, make_evaluation
from tfm_jax.training.leftovers import (
    CHECKPOINTS,
    LOG,
    check_results,
    claim,
    network_digest,
)
from tfm_jax.training.pair import (
    PairRecipe,
    joined,
    pair_objective,
    pair_recipe,
    parted,
    train_pair,
)
from tfm_jax.training.parallel import Spread
from tfm_jax.training.plots import plot_training, require_matplotlib
from tfm_jax.training.settings import (
    check_lengths,
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
    heldout_windows,
    packed_corpus,
    training_streams,
    vocab_limit_of,
    write_continuations,
)
from tfm_jax.training.tokenizer import check_known, check_tokens, domain_shares
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

Network = Literal["verifier", "dflash", "weaver", "pair"]
Config = VerifierConfig | DrafterConfig | WeaverConfig
# Options that training does not read.
_UNREAD = {
    "verifier": ("texts", "warm_start"),
    "dflash": ("warm_start",),
    "weaver": (),
    "pair": ("warm_start",),
}
_SUMMARY, _PLOT = "summary.json", "training.svg"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to train against and on, for how long, and where to.

    Attributes:
      out: folder of everything that the run writes.
      model: "pocket", also if not given, or a directory with the frozen networks. It lends a
        verifier its tokenizer, unless the corpus has one.
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
    model: str | Path | None = None
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
    def frozen(self) -> str | Path:
        """The model's name or directory."""
        return POCKET if self.model is None else self.model

    @property
    def log(self) -> Path:
        return self.out / LOG

    def where(self, part: str) -> str:
        """What messages call a part of the settings."""
        return f"{self.config or 'built-in settings'}: {part}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Texts:
    """What a drafter or a Weaver is trained on and evaluated on.

    Attributes:
      train: continuations, then windows of the corpus as they are.
      windows: how many rows of `train` are such windows.
      held: continuations held back; None where there are too few.
    """

    train: Continuations
    windows: int = 0
    held: Continuations | None

    def facts(self, depth: int) -> dict[str, Any]:
        """Whether any are held back; how many are trained on, left out for want of room, held."""
        room = self.train.room(depth)
        window = np.arange(room.size) >= room.size - self.windows
        cold = self.train.temperature == 0
        kinds = {
            "corpus_windows": window,
            "continuations_at_0": ~window & cold,
            "continuations_at_1": ~window & ~cold,
        }
        counts = {
            **{name: int((room & kind).sum()) for name, kind in kinds.items()},
            "left_out": int((~room).sum()),
            "held_back": 0 if self.held is None else len(self.held.tokens),
        }
        return {"heldout": self.held is not None, "texts": counts}


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
        return self.job.where(f"{self.network}.{part}")


def written(network: Network) -> tuple[str, ...]:
    """The folders that training writes networks to."""
    return ("dflash", "weaver") if network == "pair" else (network,)


def train_network(network: Network, job: Job) -> dict[str, Any]:
    """Trains a network and returns the summary that is stored beside it.

    The network lies in `<out>/<network>/` in its published layout, bfloat16; those of a pair lie in
    `<out>/dflash/` and `<out>/weaver/`. The summary has steps, skipped steps, metrics before and
    after on texts held back, how many texts of each kind there were, and the setting: whatever
    decides the run's numbers, and the devices.

    Raises:
      ValueError, OSError, ImportError: bad input, before any compute.
    """
    begin = time.monotonic()
    if job.plot:
        require_matplotlib()
    if job.tensorboard is not None:
        require_tensorboard()
    plan = _plan(network, job)
    run = {"verifier": _verifier, "dflash": _drafter, "weaver": _weaver, "pair": _pair}[network]
    summary = {
        "network": network,
        **run(plan),
        "seconds": round(time.monotonic() - begin, 1),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    with whole_file(job.out / _SUMMARY) as partial:
        partial.write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    if job.plot:
        plot_training(job.log, job.out / _PLOT)
    return summary


def _plan(network: Network, job: Job) -> _Plan:
    unread = [name for name in _UNREAD[network] if getattr(job, name) is not None]
    if unread:
        raise ValueError(f"training a {network} reads no {' and no '.join(unread)}: leave it out")
    if job.out.resolve() == directory(job.frozen).resolve():
        raise ValueError(f"{job.out} is the model itself: name another folder to write")
    if (job.out / CHECKPOINTS).is_dir() and not job.resume:
        raise ValueError(f"{job.out} holds a run already: resume it, or name another folder")
    check_results(job.out, network, (*written(network), _SUMMARY, _PLOT))
    settings = {} if job.config is None else read_settings(job.config)
    stage = stage_settings(settings, network)
    entries = stage["optimiser"] | ({} if job.steps is None else {"steps": job.steps})
    return _Plan(
        job=job,
        network=network,
        settings=settings,
        stage=stage,
        optimiser=made(OptimiserConfig, entries, job.where(f"{network}.optimiser")),
    )


def _verifier(plan: _Plan) -> dict[str, Any]:
    job, stage = plan.job, plan.stage
    if "verifier" in plan.settings:
        config = made(VerifierConfig, plan.settings["verifier"], f"{job.config}: verifier")
    else:
        config = geometry("pocket").verifier
    source = _tokenizer(job)
    check_tokens(source, config)
    tokenizer = source.read_bytes()
    rows, length = stage["rows"], stage["length"]
    spread = _spread(job, rows)
    _claim(plan, corpus_sources(job.corpus, job.text, source))
    corpus = packed_corpus(job.corpus, job.text, source, job.out / "corpus", length)
    streams = training_streams(corpus, length)
    check_known(corpus, streams, config.vocab_size)
    mixture = domain_shares(stage.get("mixture", MIXTURE), list(streams))
    batches = TokenBatches(streams, mixture, length, rows, job.seed)
    texts = heldout_windows(corpus, length, rows)
    if not texts:
        print(
            f"verifier: nothing is held back: no domain of {corpus} has more than {2 * length} "
            "tokens of held-back text",
            flush=True,
        )
    setting = _setting(
        plan,
        dataclasses.asdict(config),
        rows=rows,
        length=length,
        mixture=mixture,
        text=digest([(corpus / PACKED).read_bytes()]),
    )
    with _reports(plan, setting) as reports:
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
    return {
        **_export(
            plan,
            {"verifier": (config, host_params(state))},
            state,
            setting,
            beside={"tokenizer.json": tokenizer},
        ),
        "after": after,
        "heldout": bool(texts),
        "texts": {
            "corpus_tokens": {name: len(streams[name]) for name in mixture},
            "held_back": {name: len(windows) for name, windows in texts.items()},
        },
    }


def _tokenizer(job: Job) -> Path:
    """The file of a new verifier's tokenizer: the corpus's own, else the model's."""
    if job.corpus is not None and (job.corpus / "tokenizer.json").is_file():
        if job.model is not None:
            raise ValueError(
                f"{job.corpus} has a tokenizer of its own, and model ({job.model}) would lend "
                "another: give one of the two"
            )
        return job.corpus / "tokenizer.json"
    return open_trio(directory(job.frozen)).text_files / "tokenizer.json"


def _drafter(plan: _Plan) -> dict[str, Any]:
    job = plan.job
    opened = open_trio(directory(job.frozen))
    config = _drafter_config(plan, opened)
    check_pair(opened.verifier.config, config)
    recipe = made(DrafterRecipe, plan.stage["recipe"], plan.where("recipe"))
    spread = _spread(job, recipe.rows)
    verifier = _built(opened.verifier, job.compute)
    frozen = {"verifier": network_digest(opened.verifier)}
    limit = vocab_limit_of(opened.text_files, verifier.config.vocab_size)
    texts = _texts(plan, opened, verifier, config.depth, frozen, limit)
    objective = drafter_objective(config, recipe, vocab_limit=limit)
    measure = _evaluation(job, recipe.rows, objective, verifier, texts)
    before = measure(initial_drafter(config, job.seed))
    setting = _setting(
        plan,
        dataclasses.asdict(config),
        **_lessons(recipe, texts, frozen, verifier, limit),
    )
    with _reports(plan, setting) as reports:
        state = train_drafter(
            config,
            verifier,
            texts.train,
            plan.optimiser,
            recipe,
            vocab_limit=limit,
            seed=job.seed,
            spread=spread,
            **reports,
        )
    after = measure(state.params)
    return {
        **_export(plan, {"dflash": (config, host_params(state))}, state, setting),
        "before": before,
        "after": after,
        **texts.facts(config.depth),
    }


def _weaver(plan: _Plan) -> dict[str, Any]:
    job = plan.job
    opened = open_trio(directory(job.frozen))
    if opened.drafter is None:
        raise ValueError(f"{job.frozen} has no drafter: a Weaver scores a drafter's candidates")
    config, given = _weaver_config(plan, opened)
    check_pair(opened.verifier.config, opened.drafter.config, config)
    recipe = made(WeaverRecipe, plan.stage["recipe"], plan.where("recipe"))
    spread = _spread(job, recipe.rows)
    verifier = _built(opened.verifier, job.compute)
    drafter = _built(opened.drafter, job.compute)
    frozen = {
        "verifier": network_digest(opened.verifier),
        "drafter": network_digest(opened.drafter),
    }
    limit = vocab_limit_of(opened.text_files, verifier.config.vocab_size)
    texts = _texts(plan, opened, verifier, config.depth, frozen, limit)
    networks = Trio(verifier=verifier, drafter=drafter)
    objective = weaver_objective(config, recipe, vocab_limit=limit)
    measure = _evaluation(job, recipe.rows, objective, networks, texts)
    before = measure(initial_weaver(config, given, job.seed))
    _announce(plan, "before", before)
    setting = _setting(
        plan,
        dataclasses.asdict(config),
        **_lessons(recipe, texts, frozen, verifier, limit),
        warm_start=given and digest(given[path].tobytes() for path in sorted(given)),
    )
    with _reports(plan, setting) as reports:
        state = train_weaver(
            config,
            verifier,
            drafter,
            texts.train,
            plan.optimiser,
            recipe,
            vocab_limit=limit,
            start=given,
            seed=job.seed,
            spread=spread,
            **reports,
        )
    after = measure(state.params)
    _announce(plan, "after", after)
    return {
        **_export(plan, {"weaver": (config, host_params(state))}, state, setting),
        "before": before,
        "after": after,
        **texts.facts(config.depth),
    }


def _pair(plan: _Plan) -> dict[str, Any]:
    job = plan.job
    opened = open_trio(directory(job.frozen))
    if opened.drafter is None or opened.weaver is None:
        missing = "drafter" if opened.drafter is None else "Weaver"
        raise ValueError(f"{job.frozen} has no {missing}: a pair is trained from the model's own")
    drafter, weaver = opened.drafter.config, opened.weaver.config
    for name, own in (("drafter", drafter), ("weaver", weaver)):
        if name in plan.settings:
            asked = made(type(own), plan.settings[name], f"{job.config}: {name}")
            if asked != own:
                raise ConfigError(f"{job.frozen} has {own}, {job.config} asks for {asked}")
    check_pair(opened.verifier.config, drafter, weaver)
    recipe = pair_recipe(plan.stage["recipe"], plan.where("recipe"))
    spread = _spread(job, recipe.rows)
    verifier = _built(opened.verifier, job.compute)
    networks = {name: network_digest(network) for name, network in opened.parts().items()}
    limit = vocab_limit_of(opened.text_files, verifier.config.vocab_size)
    texts = _texts(plan, opened, verifier, drafter.depth, networks, limit)
    exact = check_dtype("float32")
    start = joined(opened.drafter.load(exact), opened.weaver.load(exact))
    objective = pair_objective(drafter, weaver, recipe, vocab_limit=limit)
    measure = _evaluation(job, recipe.rows, objective, verifier, texts)
    before = measure({path: jnp.asarray(value) for path, value in start.items()})
    _announce(plan, "before", before)
    configs = {"drafter": dataclasses.asdict(drafter), "weaver": dataclasses.asdict(weaver)}
    lessons = _lessons(recipe, texts, networks, verifier, limit)
    setting = _setting(plan, configs, **lessons)
    with _reports(plan, setting) as reports:
        state = train_pair(
            drafter,
            weaver,
            verifier,
            texts.train,
            plan.optimiser,
            recipe,
            start=start,
            vocab_limit=limit,
            seed=job.seed,
            spread=spread,
            **reports,
        )
    after = measure(state.params)
    _announce(plan, "after", after)
    if after["loss"] > before["loss"]:
        print(
            f"pair: the loss rose from {before['loss']:.3f} to {after['loss']:.3f}: the pair was "
            "better before; lower rates, more texts or more steps may help",
            flush=True,
        )
    drafters, weavers = parted(host_params(state))
    made_networks = {"dflash": (drafter, drafters), "weaver": (weaver, weavers)}
    return {
        **_export(plan, made_networks, state, setting),
        "before": before,
        "after": after,
        **texts.facts(drafter.depth),
    }


def _drafter_config(plan: _Plan, opened: OpenedTrio) -> DrafterConfig:
    if "drafter" in plan.settings:
        return made(DrafterConfig, plan.settings["drafter"], f"{plan.job.config}: drafter")
    if opened.drafter is None:
        raise ValueError(
            f"{plan.job.frozen} has no drafter to take sizes from: give a configuration with them"
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
            f"{job.frozen} has no Weaver to take sizes from: give a configuration with them"
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


def _lessons(
    recipe: DrafterRecipe | WeaverRecipe | PairRecipe,
    texts: _Texts,
    frozen: Mapping[str, str],
    verifier: Verifier,
    limit: int,
) -> dict[str, Any]:
    """What decides the numbers of a run along a verifier's texts."""
    return {
        "recipe": dataclasses.asdict(recipe),
        "texts": texts.train.digest,
        "frozen": frozen,
        # Rows of the vocabulary that stand for no token; None where all do.
        "padding": verifier.config.vocab_size - limit or None,
    }


def _claim(plan: _Plan, sources: Mapping[str, Any]) -> None:
    """Refuses a folder whose checkpoints or texts come from other sources; see `claim`."""
    job, sources = plan.job, {"network": plan.network, **sources}
    depends = {CHECKPOINTS: set(sources)}
    if job.texts is None:
        depends["continuations.npz"] = set(sources) - {"network", "drafter", "weaver"}
        if job.corpus is None:
            depends[f"corpus/{PACKED}"] = {"text", "tokenizer"}
    claim(job.out, sources, depends)


def _texts(
    plan: _Plan,
    opened: OpenedTrio,
    verifier: Verifier,
    depth: int,
    frozen: Mapping[str, str],
    limit: int,
) -> _Texts:
    """Texts to train on and to evaluate on, written first if the job names none."""
    job = plan.job
    networks = {n: {"named": str(job.frozen), "sha256": found} for n, found in frozen.items()}
    if job.texts is not None:
        texts = Continuations.load(job.texts)
        texts.check(limit)
        rest, held = hold_back(texts, depth)
        text = {"named": str(job.texts), "sha256": texts.digest}
        _claim(plan, {"text": text, **networks})
        return _Texts(train=rest, held=held)
    kept = job.out / "continuations.npz"
    file = opened.text_files / "tokenizer.json"
    tokenizer = file if file.is_file() else None
    options = stage_settings(plan.settings, "continuations")
    check_lengths(options, depth, job.where("continuations"))
    sources = corpus_sources(job.corpus, job.text, tokenizer)
    writing = {"seed": job.seed, "dtype": str(job.compute), "continuations": options}
    _claim(plan, {**sources, **networks, **writing})
    window = (options["total"] if options.get("given") else options["prompt"]) - 1
    corpus = packed_corpus(job.corpus, job.text, tokenizer, job.out / "corpus", window)
    given = given_texts(corpus, options, vocab_limit=limit, seed=job.seed)
    if kept.is_file():
        texts = Continuations.load(kept)
    else:
        texts = write_continuations(
            verifier,
            corpus,
            options,
            vocab_limit=limit,
            seed=job.seed,
            seconds=options.get("seconds"),
        )
        texts.save(kept)
    if given is None:
        rest, held = hold_back(texts, depth)
        return _Texts(train=rest, held=held)
    rest, held = hold_back(texts, depth, share=0.5)
    return _Texts(train=rest.joined(given), windows=len(given.tokens), held=held)


def _evaluation(
    job: Job,
    rows: int,
    loss: Loss,
    frozen: Verifier | Trio,
    texts: _Texts,
) -> Callable[[Params], dict[str, Any]]:
    """Metrics on the texts held back, or on the training texts where there are too few."""
    measured = texts.train if texts.held is None else texts.held
    return make_evaluation(loss, frozen, measured, rows, job.compute)


def _announce(plan: _Plan, when: str, metrics: Mapping[str, Any]) -> None:
    lengths = (f"{n.removeprefix('length_')} {v:.3f}" for n, v in metrics.items() if "length" in n)
    what = f"{plan.network}: expected accepted length {when} training"
    print(f"{what}: {', '.join(lengths)}", flush=True)


def _setting(plan: _Plan, config: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Whatever decides a run's numbers, `own` being what other networks do not have."""
    return {
        "network": plan.network,
        "config": config,
        "optimiser": dataclasses.asdict(plan.optimiser),
        "seconds": plan.seconds,
        "seed": plan.job.seed,
        "dtype": str(plan.job.compute),
        **own,
    }


@contextmanager
def _reports(plan: _Plan, setting: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments of a training function that say where it reports and saves to."""
    job = plan.job
    with ExitStack() as stack:
        job.out.mkdir(parents=True, exist_ok=True)
        folder = job.out / CHECKPOINTS
        checkpoints = stack.enter_context(Checkpoints(folder, setting, every=job.save_every))
        done = checkpoints.latest or 0
        if job.resume:
            print(f"{plan.network}: goes on from step {done}", flush=True)
        on_record = None
        if job.tensorboard is not None:
            # A folder for each network: from its first step on a resumed run hides all else there.
            board = TensorBoard(job.tensorboard / plan.network, done + 1 if job.resume else None)
            on_record = stack.enter_context(board).add
        yield {
            "log": job.log,
            "log_every": plan.stage["log_every"],
            "seconds": plan.seconds,
            "checkpoints": checkpoints,
            "on_record": on_record,
        }


def _export(
    plan: _Plan,
    networks: Mapping[str, tuple[Config, Mapping[str, np.ndarray]]],
    state: TrainState,
    setting: Mapping[str, Any],
    beside: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """Writes networks by folder and says what training did, and in which setting."""
    for folder, (config, params) in networks.items():
        write_hf(
            plan.job.out / folder,
            config,
            params,
            dtype="bfloat16",
            beside=beside,
            overwrite=plan.job.resume,
        )
    return {
        "steps": int(state.step),
        "skipped_steps": int(state.skipped),
        "parameters": sum(value.size for value in state.params.values()),
        "setting": {**setting, "devices": plan.job.devices},
    }
