"""Metrics of held-back texts count every text once, each temperature on its own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.training.continuations import Continuations
from tfm_jax.training.evaluation import hold_back, make_evaluation


def texts(rows: int, hot: int) -> Continuations:
    """Row i is i, i, ...; the last `hot` rows are of temperature 1; row 5 has no room."""
    prompt = np.full(rows, 4, np.int32)
    prompt[5] = 19
    return Continuations(
        tokens=np.repeat(np.arange(rows), 20).reshape(rows, 20).astype(np.uint16),
        prompt=prompt,
        temperature=(np.arange(rows) >= rows - hot).astype(np.float32),
    )


def loss(params, batch, key):
    del key
    frozen, rows = batch
    value = rows["tokens"][:, 0].astype(jnp.float32)
    greedy = rows["temperature"] == 0
    metrics = {
        "vector": value.mean() * jnp.ones(2),
        "length_greedy": jnp.sum(value * greedy) / jnp.maximum(greedy.sum(), 1),
        "length_sampled": jnp.sum(value * ~greedy) / jnp.maximum((~greedy).sum(), 1),
    }
    return params["x"].astype(jnp.float32) * frozen, metrics


@pytest.mark.parametrize("size", [3, 4, 100])
def test_means_do_not_depend_on_the_batches(size: int) -> None:
    run = make_evaluation(loss, jnp.float32(2), texts(11, 3), size, jnp.dtype(jnp.float32))
    found = run({"x": jnp.float32(1.5)})
    assert found["loss"] == 3.0
    assert found["vector"] == [5.0, 5.0]
    assert found["length_greedy"] == pytest.approx(3.5)
    assert found["length_sampled"] == pytest.approx(9.0)


def test_a_temperature_that_does_not_occur_is_left_out() -> None:
    run = make_evaluation(loss, jnp.float32(2), texts(8, 0), 4, jnp.dtype(jnp.float32))
    assert "length_sampled" not in run({"x": jnp.float32(1)})


def test_held_back_texts_are_usable_and_not_trained_on() -> None:
    given = texts(40, 20)
    rest, held = hold_back(given, 7)
    assert held is not None
    assert sorted([*rest.tokens[:, 0], *held.tokens[:, 0]]) == list(range(40))
    assert len(held.tokens) == 4
    assert 5 not in held.tokens[:, 0]
    assert set(held.temperature) == {0, 1}
    assert hold_back(texts(16, 8), 7)[1] is None
    half = hold_back(given, 7, share=0.5)[1]
    assert half is not None
    assert (len(half.tokens), half.temperature.mean()) == (19, pytest.approx(0.5, abs=0.05))
    many, held = hold_back(texts(1000, 500), 7)
    assert held is not None
    assert (len(held.tokens), len(many.tokens)) == (64, 936)
    with pytest.raises(ValueError, match="none of the 40 texts"):
        hold_back(given, 20)
