"""Drafter and Weaver trained together: each learns what its own loss says, and no marginal more."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.test_weaver_training import rows
from tfm_jax.decoding.state import Trio
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.dflash import DrafterRecipe, drafter_objective
from tfm_jax.training.pair import (
    PairRecipe,
    joined,
    pair_objective,
    pair_recipe,
    parted,
    train_pair,
)
from tfm_jax.training.trainer import OptimiserConfig, flatten
from tfm_jax.training.weaver import WeaverRecipe, weaver_objective

RECIPE = PairRecipe(
    drafter=DrafterRecipe(rows=2, anchors=4),
    weaver=WeaverRecipe(rows=2, anchors=4, nodes=8, noise=0.5),
    weight=3.0,
)


def test_each_network_learns_from_its_losses(tiny_trio: Trio) -> None:
    drafter, weaver = tiny_trio.drafter, tiny_trio.weaver
    assert drafter is not None
    assert weaver is not None
    batch, key = rows(), jax.random.key(4)
    first, second = jax.random.split(key)
    params = joined(flatten(drafter), flatten(weaver))
    frozen = Trio(verifier=tiny_trio.verifier, drafter=drafter)

    def found(recipe: PairRecipe):
        loss = pair_objective(drafter.config, weaver.config, recipe, vocab_limit=83)
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(
            params, (tiny_trio.verifier, batch), key
        )

    def alone(loss, own, networks, key):
        return jax.jit(jax.grad(loss, has_aux=True))(own, (networks, batch), key)

    (value, metrics), gradient = found(RECIPE)
    (_, _), unweighted = found(dataclasses.replace(RECIPE, weight=0.0))
    of_drafter, of_weaver = parted(gradient)
    assert float(value) == pytest.approx(
        float(metrics["loss_drafter"] + 3 * metrics["loss_weaver"]), rel=1e-5
    )
    marginal = drafter_objective(drafter.config, RECIPE.drafter, vocab_limit=83)
    expected, _ = alone(marginal, flatten(drafter), tiny_trio.verifier, first)
    for path, value in expected.items():
        np.testing.assert_allclose(parted(unweighted)[0][path], value, atol=1e-5, err_msg=path)
    conditional = weaver_objective(weaver.config, RECIPE.weaver, vocab_limit=83)
    expected, _ = alone(conditional, flatten(weaver), frozen, second)
    for path, value in expected.items():
        np.testing.assert_allclose(of_weaver[path], 3 * value, atol=1e-4, err_msg=path)
    moved = {path: of_drafter[path] - parted(unweighted)[0][path] for path in of_drafter}
    assert max(float(jnp.abs(change).max()) for change in moved.values()) > 1e-3


def test_marginals_learn_nothing_from_the_weavers_loss(tiny_trio: Trio) -> None:
    """A Weaver without a query scores by the marginals alone, so nothing of its loss gets there."""
    drafter, weaver = tiny_trio.drafter, tiny_trio.weaver
    assert drafter is not None
    assert weaver is not None
    blank = flatten(weaver)
    blank["lm_head_query_in.weight"] = jnp.zeros_like(blank["lm_head_query_in.weight"])

    def loss(own, weight):
        recipe = dataclasses.replace(RECIPE, weight=weight)
        objective = pair_objective(drafter.config, weaver.config, recipe, vocab_limit=83)
        both = joined(own, blank)
        return objective(both, (tiny_trio.verifier, rows()), jax.random.key(1))[0]

    own = flatten(drafter)
    with_weaver, without = (jax.jit(jax.grad(lambda x, w=w: loss(x, w)))(own) for w in (5.0, 0.0))
    for path, value in without.items():
        np.testing.assert_allclose(with_weaver[path], value, atol=1e-6, err_msg=path)
    assert max(float(jnp.abs(value).max()) for value in without.values()) > 1e-3


def test_parameters_are_joined_and_parted(tiny_trio: Trio) -> None:
    own = flatten(tiny_trio.drafter), flatten(tiny_trio.weaver)
    for part, expected in zip(parted(joined(*own)), own, strict=True):
        assert part.keys() == expected.keys()
        assert all(part[path] is expected[path] for path in expected)


def test_recipes_have_one_number_of_rows() -> None:
    found = pair_recipe({"rows": 8, "weaver": {"anchors": 3}, "weight": 2}, "here")
    assert (found.rows, found.weaver.rows, found.weaver.anchors, found.weight) == (8, 8, 3, 2)
    with pytest.raises(ValueError, match="the same rows, got 64 and 8"):
        PairRecipe(drafter=DrafterRecipe(), weaver=WeaverRecipe(rows=8))
    with pytest.raises(ValueError, match="weight must be finite and at least 0, got nan"):
        dataclasses.replace(RECIPE, weight=float("nan"))


def test_what_cannot_be_trained_on_is_refused(tiny_trio: Trio) -> None:
    drafter, weaver = tiny_trio.drafter, tiny_trio.weaver
    assert drafter is not None
    assert weaver is not None
    texts = Continuations(
        tokens=np.full((2, 25), 7, np.uint16),
        prompt=np.full(2, 24, np.int32),
        temperature=np.ones(2, np.float32),
    )

    def train(depth: int) -> None:
        train_pair(
            drafter.config,
            dataclasses.replace(weaver.config, depth=depth),
            tiny_trio.verifier,
            texts,
            OptimiserConfig(steps=1),
            RECIPE,
            start=joined(flatten(drafter), flatten(weaver)),
            vocab_limit=83,
        )

    with pytest.raises(ValueError, match="none of the 2 texts of 25 tokens"):
        train(weaver.config.depth)
    with pytest.raises(ValueError, match="scores 9 depths, the drafter"):
        train(9)
