"""Trains a small verifier from scratch on token streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tfm_jax.config import VerifierConfig
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.parallel import Spread
from tfm_jax.training.report import Record
from tfm_jax.training.trainer import (
    BFLOAT16,
    Loss,
    OptimiserConfig,
    Params,
    TrainState,
    fill,
    fit,
    flatten,
)


def train_verifier(
    config: VerifierConfig,
    batches: Callable[[int], np.ndarray],
    optimiser: OptimiserConfig,
    *,
    seed: int = 0,
    log: Path | None = None,
    log_every: int = 50,
    seconds: float | None = None,
    dtype: jnp.dtype = BFLOAT16,
    checkpoints: Checkpoints | None = None,
    on_record: Callable[[Record], None] | None = None,
    spread: Spread | None = None,
) -> TrainState:
    """Next-token training from scratch; the state holds float32 parameters.

    Args:
      config: of the new model.
      batches: step number -> tokens [B, T + 1] int32.
      optimiser: optimiser and number of steps.
      seed: of the initial weights.
      log, log_every, seconds, dtype, checkpoints, on_record, spread: see `fit`.
    """
    spread = spread or Spread()
    return fit(
        flatten(Verifier(config, rngs=nnx.Rngs(seed))),
        verifier_objective(config),
        lambda step: spread.split(batches(step)),
        optimiser,
        seed=seed,
        log=log,
        log_every=log_every,
        title="verifier",
        seconds=seconds,
        dtype=dtype,
        tokens=batches(0)[:, 1:].size,
        checkpoints=checkpoints,
        on_record=on_record,
        spread=spread,
    )


def verifier_objective(config: VerifierConfig) -> Loss:
    """`next_token_loss` as a function of parameters, tokens [B, T + 1] and an unused key."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Verifier(config, rngs=nnx.Rngs(0))))

    def loss(
        params: Params, tokens: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        del key
        value = next_token_loss(fill(graph, params), tokens)
        return value, {"bits_per_token": value / jnp.log(2.0)}

    return loss


def next_token_loss(verifier: Verifier, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of tokens [B, T + 1] given those before them."""

    def one(row: jax.Array) -> jax.Array:
        hidden = verifier.forward(row[:-1])
        logits = verifier.logits(hidden.final)
        chosen = jnp.take_along_axis(logits, row[1:, None], axis=-1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()

    return jax.vmap(one)(tokens).mean()


def heldout_loss(
    config: VerifierConfig, params: Params, texts: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Mean cross-entropy in nats of held-back tokens [B, T + 1], for each name."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Verifier(config, rngs=nnx.Rngs(0))))
    return text_losses(fill(graph, params), texts)


def text_losses(verifier: Verifier, texts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Mean cross-entropy in nats of tokens [B, T + 1], for each name."""
    loss = jax.jit(next_token_loss)
    return {name: round(float(loss(verifier, tokens)), 4) for name, tokens in texts.items()}
