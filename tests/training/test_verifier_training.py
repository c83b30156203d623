"""The verifier's loss is the cross-entropy of its own logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.decoding.state import Trio
from tfm_jax.training.trainer import flatten
from tfm_jax.training.verifier import heldout_loss


def test_loss_is_the_cross_entropy_of_the_next_token(tiny_trio: Trio) -> None:
    verifier = tiny_trio.verifier
    tokens = np.random.default_rng(0).integers(0, 80, (2, 25)).astype(np.int32)

    @jax.jit
    def logits(row: jax.Array) -> jax.Array:
        return verifier.logits(verifier.forward(row).final)

    total = 0.0
    for row in tokens:
        z = np.asarray(logits(jnp.asarray(row)), np.float64)[:-1]
        log_p = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log_p -= z.max(-1, keepdims=True)
        total -= log_p[np.arange(24), row[1:]].mean() / 2
    losses = heldout_loss(verifier.config, flatten(verifier), {"one": tokens, "same": tokens[::-1]})
    assert losses["one"] == losses["same"] == pytest.approx(total, abs=1e-4)
