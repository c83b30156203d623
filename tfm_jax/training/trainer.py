"""One trainer for verifier, drafter and Weaver.

Parameters and optimiser state are float32, compute is bfloat16 unless asked otherwise. Matrices
follow Muon, all other parameters AdamW, both under one warm-up/stable/decay schedule. A step whose
loss, gradient or result is not finite changes nothing and is reported.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tfm_jax.training.arithmetic import count_flops
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.parallel import Spread
from tfm_jax.training.report import Record, Reporter, rewind
from tfm_jax.training.settings import check_count, check_number, check_share

Params = dict[str, jax.Array]
BFLOAT16 = jnp.dtype(jnp.bfloat16)
Module = TypeVar("Module", bound=nnx.Module)
# Tables and depthwise taps are no linear maps: orthogonal updates make no sense for them.
_NOT_MATRICES = ("embed_tokens.weight", "conv1d.weight", "pos_emb")
_KEPT_FLOAT32 = ("A_log", "dt_bias", "linear_attn.norm.weight")
_WARM = 20  # steps after which the rate of steps is taken as known


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """Optimiser, schedule and length of a run.

    Attributes:
      steps: optimiser steps; a first guess where a run is given a time instead.
      matrix_rate: peak rate of Muon.
      other_rate: peak rate of AdamW.
      warmup: share of the steps with a rising rate.
      decay: share of the steps, at the end, with a falling rate.
      weight_decay: of matrices.
      clip: largest global gradient norm.
    """

    steps: int
    matrix_rate: float = 2e-2
    other_rate: float = 3e-3
    warmup: float = 0.02
    decay: float = 0.4
    weight_decay: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        for name in ("matrix_rate", "other_rate", "weight_decay", "clip"):
            check_number(name, getattr(self, name))
        if self.clip == 0:
            raise ValueError("clip must be positive, got 0: no gradient would be left")
        check_share("warmup", self.warmup)
        check_share("decay", self.decay)
        if self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup and decay are shares of the run, got {self.warmup} and {self.decay}"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a run needs to go on: the next batch depends on `step` alone.

    Attributes:
      params: float32 arrays by dotted path.
      optimiser: optax state.
      step: int32 scalar, steps done.
      total: int32 scalar, steps of the whole run, which the schedule is made for.
      skipped: int32 scalar, steps that were not finite.
      last_skipped: int32 scalar, number of the newest of them, from 1; 0 if there is none.
    """

    params: Params
    optimiser: optax.OptState
    step: jax.Array
    total: jax.Array
    skipped: jax.Array
    last_skipped: jax.Array


def flatten(module: nnx.Module) -> Params:
    """A module's parameters as arrays by dotted path."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


def fill(graph: nnx.GraphDef[Module], params: Params) -> Module:
    """The module of `graph` with these parameters; the inverse of `flatten`."""

    def key(part: str) -> str | int:
        return int(part) if part.isdigit() else part

    flat = [
        (tuple(key(p) for p in path.split(".")), nnx.Param(value)) for path, value in params.items()
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def compute_copy(params: Params, dtype: jnp.dtype = BFLOAT16) -> Params:
    """Copies in `dtype` of all parameters that the model may hold in 16 bits."""
    return {
        path: value if path.endswith(_KEPT_FLOAT32) else value.astype(dtype)
        for path, value in params.items()
    }


def make_optimiser(config: OptimiserConfig) -> optax.GradientTransformation:
    """Muon for matrices, AdamW with Nesterov momentum for the rest, at peak rates.

    Gradients pass a clip of their global norm first.
    """

    def numbers(packed: Any) -> Any:
        matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
        # Optax asks a second time with placeholders for parameters of the other kind.
        return {k: matrix if getattr(v, "ndim", 0) == 3 else None for k, v in packed.items()}

    inner = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.contrib.muon(
            config.matrix_rate,
            adam_learning_rate=config.other_rate,
            weight_decay=config.weight_decay,
            adam_b2=0.99,
            muon_weight_dimension_numbers=numbers,
        ),
    )

    def init(params: Any) -> optax.OptState:
        return inner.init(_pack(params))

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, Any]:
        packed, state = inner.update(_pack(updates), state, _pack(params))
        return _unpack(packed, params), state

    return optax.GradientTransformation(init, update)


def rate_share(config: OptimiserConfig, step: jax.Array, total: jax.Array) -> jax.Array:
    """Share of the peak rate at step 0, 1, ... of `total`: rising, constant, falling to zero."""
    warmup = jnp.maximum(1.0, config.warmup * total)
    decay = jnp.maximum(1.0, config.decay * total)
    return jnp.clip(jnp.minimum((step + 1) / warmup, (total - step) / decay), 0.0, 1.0)


def _pack(params: Params) -> Params:
    """Equal-shaped matrices stacked [n, out, in]: one batched product in place of n small ones."""
    packed = {path: value for path, value in params.items() if not _is_matrix(path, value)}
    for shape, paths in _shapes(params).items():
        packed["x".join(map(str, shape))] = jnp.stack([params[path] for path in paths])
    return packed


def _unpack(packed: Any, like: Params) -> Params:
    params = {path: packed[path] for path in like if path in packed}
    for shape, paths in _shapes(like).items():
        params.update(zip(paths, packed["x".join(map(str, shape))], strict=True))
    return {path: params[path] for path in like}


def _shapes(params: Params) -> dict[tuple[int, ...], list[str]]:
    shapes: dict[tuple[int, ...], list[str]] = {}
    for path in sorted(params):
        if _is_matrix(path, params[path]):
            shapes.setdefault(params[path].shape, []).append(path)
    return shapes


def _is_matrix(path: str, value: jax.Array) -> bool:
    return value.ndim == 2 and not path.endswith(_NOT_MATRICES)


Loss = Callable[[Params, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def make_step(
    loss: Loss,
    optimiser: optax.GradientTransformation,
    config: OptimiserConfig,
    seed: int,
    dtype: jnp.dtype = BFLOAT16,
    spread: Spread | None = None,
) -> Step:
    """A jitted training step.

    Args:
      loss: (copies of the parameters in `dtype`, batch, random key) -> (scalar, metrics).
      optimiser: as made by `make_optimiser`.
      config: gives the schedule.
      seed: of the loss's random keys, one a step.
      dtype: to compute in.
      spread: devices that hold copies of the state, and parts of the batch.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)

        def objective(params: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            return loss(compute_copy(params, dtype), batch, key)

        (value, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
        norm = optax.tree.norm(gradient)
        updates, optimiser_state = optimiser.update(gradient, state.optimiser, state.params)
        share = rate_share(config, state.step, state.total)
        changed = jax.tree.map(lambda old, change: old + share * change, state.params, updates)
        results = (value, norm, optax.tree.norm(changed))
        finite = jnp.isfinite(jnp.stack(results)).all()

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old)

        state = TrainState(
            params=jax.tree.map(keep, changed, state.params),
            optimiser=jax.tree.map(keep, optimiser_state, state.optimiser),
            step=state.step + 1,
            total=state.total,
            skipped=state.skipped + ~finite,
            last_skipped=jnp.where(finite, state.last_skipped, state.step + 1),
        )
        own = {"loss": value, "gradient_norm": norm, "rate_share": share}
        counts = {"skipped": state.skipped, "last_skipped": state.last_skipped}
        return state, {**own, **metrics, **counts}

    everywhere = spread and spread.everywhere
    return jax.jit(step, donate_argnums=0, out_shardings=everywhere)


def host_params(state: TrainState) -> dict[str, np.ndarray]:
    """A state's parameters on the host, to be published.

    Raises:
      ValueError: one of them is not finite.
    """
    params = {path: np.asarray(value) for path, value in state.params.items()}
    broken = [path for path, value in params.items() if not np.isfinite(value).all()]
    if broken:
        raise ValueError(
            f"after {int(state.step)} steps {len(broken)} of {len(params)} parameters are not "
            f"finite, the first is {broken[0]}: nothing is published; try lower rates"
        )
    return params


def start(params: Params, optimiser: optax.GradientTransformation, total: int) -> TrainState:
    """The state before the first of `total` steps; parameters become float32."""
    params = {path: jnp.asarray(value, jnp.float32) for path, value in params.items()}
    return TrainState(
        params=params,
        optimiser=optimiser.init(params),
        step=jnp.int32(0),
        total=jnp.int32(total),
        skipped=jnp.int32(0),
        last_skipped=jnp.int32(0),
    )


def fit(
    params: Params,
    loss: Loss,
    batches: Callable[[int], Any],
    config: OptimiserConfig,
    *,
    seed: int = 0,
    log: Path | None = None,
    log_every: int = 50,
    title: str = "training",
    seconds: float | None = None,
    dtype: jnp.dtype = BFLOAT16,
    tokens: int = 0,
    facts: Mapping[str, int] | None = None,
    checkpoints: Checkpoints | None = None,
    on_record: Callable[[Record], None] | None = None,
    spread: Spread | None = None,
    step: Step | None = None,
) -> TrainState:
    """Trains for `config.steps` steps, or for as many as fit into a time.

    Args:
      params: initial parameters by dotted path.
      loss: see `make_step`.
      batches: step number -> batch; a batch depends on nothing else.
      config: optimiser and schedule.
      seed: of the loss's random keys.
      log: JSON-lines file to append metrics to.
      log_every: steps between log lines.
      title: of the progress bar and of the log lines.
      seconds: time for the whole run, compilation included. The number of steps, and with it the
        schedule, is fitted to the measured rate until the falling part begins. The run can be
        repeated with the `steps` of its last log line.
      dtype: to compute in.
      tokens: of a batch, for the rate.
      facts: further entries of every log line, beside the `flops_per_step` (see `count_flops`).
      checkpoints: where the run goes on from, if there are any, and saves its state to. With a
        number of steps (no `seconds`) it ends in the same bits as one that was never stopped.
      on_record: called with what each log line holds.
      spread: devices to train on; `batches` puts batches there, see `Spread.split`.
      step: what `make_step` made of the same arguments, where it was compiled ahead; its
        operations are not counted.
    """
    spread = spread or Spread()
    optimiser = make_optimiser(config)
    ahead = step is not None
    step = step or make_step(loss, optimiser, config, seed, dtype, spread)
    state, elapsed = spread.copy(start(params, optimiser, config.steps)), 0.0
    if checkpoints is not None:
        state, elapsed = checkpoints.restore(state) or (state, elapsed)
        if log is not None:
            rewind(log, title, int(state.step))
    done = int(state.step)
    pace = _Pace(first=done, begin=time.monotonic() - elapsed, seconds=seconds)
    facts = dict(facts or {})
    if not ahead:
        facts["flops_per_step"] = count_flops(step, state, batches(0))
    state = dataclasses.replace(state, total=jnp.int32(pace.least(int(state.total))))
    total = int(state.total)
    reporter = Reporter(title, log=log, on_record=on_record, skipped=int(state.skipped))
    with reporter:
        while done < total:
            state, metrics = step(state, batches(done))
            done += 1
            if done == pace.first + 1:
                jax.block_until_ready(metrics)
                pace.warm = time.monotonic()
            reporter.advance(done, total, _per_second(pace.rate(done), tokens))
            if done % log_every == 0 or done in (pace.known, total):
                values = {name: np.asarray(value).tolist() for name, value in metrics.items()}
                total = pace.plan(done, total, config.decay)
                state = dataclasses.replace(state, total=jnp.int32(total))
                rates = _per_second(pace.rate(done), tokens)
                reporter.record(
                    {
                        "step": done,
                        "steps": total,
                        "seconds": round(pace.elapsed, 1),
                        **{f"{name}_per_second": round(rate, 3) for name, rate in rates.items()},
                        **facts,
                        **values,
                    }
                )
            if checkpoints is not None and (checkpoints.due or done == total):
                checkpoints.save(done, state, pace.elapsed)
    return spread.gather(state)


@dataclasses.dataclass(kw_only=True)
class _Pace:
    """Rate of a run, and how many steps fit into its time.

    Attributes:
      first: steps done before this process.
      begin: when the run began, or would have begun had it not been stopped.
      seconds: time for the whole run, if it is limited.
      warm: when the first step of this process was done.
    """

    first: int
    begin: float
    seconds: float | None
    warm: float = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begin

    @property
    def known(self) -> int:
        """The step from which the rate counts as known."""
        return _WARM if self.seconds is None else self.first + _WARM

    def rate(self, done: int) -> float:
        """Steps a second, compilation left out."""
        return (done - self.first - 1) / max(time.monotonic() - self.warm, 1e-9)

    def least(self, total: int) -> int:
        """Steps to begin with: a first guess must last until the rate is known."""
        if self.seconds is None or self.first >= _WARM:
            return total
        return max(total, self.known + 1)

    def plan(self, done: int, total: int, decay: float) -> int:
        """Steps of the whole run, fitted to its time unless the rate is falling already."""
        guessed = done == self.known and self.first < _WARM
        if self.seconds is None or done < self.known:
            return total
        if not guessed and done >= (1 - decay) * total:
            return total
        return max(done, done + int(self.rate(done) * (self.seconds - self.elapsed)))


def _per_second(steps: float, tokens: int) -> dict[str, float]:
    """Steps a second, and tokens a second if a batch has any."""
    return {"steps": steps, **({"tokens": steps * tokens} if tokens else {})}
