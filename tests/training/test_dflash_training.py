"""The drafter's training: blocks see the text before their anchor, targets are the right ones."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.padding import KNOWN, cut_and_padded
from tfm_jax.decoding.state import Trio
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.dflash import (
    DrafterRecipe,
    accepted_length,
    draft_blocks,
    drafter_loss,
    sample_anchors,
    target_rows,
    train_drafter,
)
from tfm_jax.training.trainer import OptimiserConfig, fill, flatten

RECIPE = DrafterRecipe(rows=2, anchors=5)
ALL = DrafterRecipe(rows=2, anchors=17, distil=False)  # every place where a block fits

loss_of = jax.jit(drafter_loss, static_argnames=("recipe", "vocab_limit"))


def rows(seed: int = 0, length: int = 30, largest: int = 79) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(seed).integers(0, largest + 1, (2, length)).astype(np.int32)
    return {
        "tokens": jnp.asarray(tokens),
        "first": jnp.asarray([6, 9], jnp.int32),
        "temperature": jnp.asarray([1.0, 0.0], jnp.float32),
    }


def test_anchors_are_distinct_sorted_and_inside() -> None:
    drawn = [sample_anchors(jax.random.key(i), jnp.int32(4), 20, 6) for i in range(40)]
    assert all(keep.all() for _, keep in drawn)
    anchors = np.stack([a for a, _ in drawn])
    assert (np.diff(anchors) > 0).all()
    assert set(anchors.ravel()) == set(range(4, 20))


@pytest.mark.parametrize("first", [17, 20, 25])
def test_too_few_anchors_are_marked(first: int) -> None:
    anchors, keep = sample_anchors(jax.random.key(0), jnp.int32(first), 20, 30)
    room = max(20 - first, 0)
    assert int(keep.sum()) == room
    assert anchors[keep].tolist() == list(range(first, 20))[:room]


def test_blocks_do_not_depend_on_what_follows_their_anchor(tiny_trio: Trio) -> None:
    verifier, drafter = tiny_trio.verifier, tiny_trio.drafter
    tokens = rows()["tokens"][0]
    anchors = jnp.asarray([6, 8, 9, 20])  # the first three overlap
    keep = jnp.ones((4,), bool)

    @jax.jit
    def blocks(tokens: jax.Array) -> jax.Array:
        features = verifier.forward(tokens, tiny_trio.taps).features
        return draft_blocks(verifier, drafter, tokens, features, anchors, keep)

    before = blocks(tokens)
    for n, anchor in enumerate(anchors.tolist()):
        after = tokens.at[anchor + 1 :].set((tokens[anchor + 1 :] + 7) % 80)
        np.testing.assert_allclose(blocks(after)[n], before[n], atol=1e-5)
        changed = blocks(tokens.at[anchor].set((tokens[anchor] + 1) % 80))
        assert float(jnp.abs(changed[n] - before[n]).max()) > 1e-2


def test_targets_are_the_distributions_that_the_tokens_were_drawn_from(tiny_trio: Trio) -> None:
    verifier = tiny_trio.verifier
    tokens = rows()["tokens"][0]
    hidden = verifier.forward(tokens)
    state = jax.random.normal(jax.random.key(1), (verifier.config.hidden_size,))
    soft = target_rows(verifier, hidden, tokens, jnp.float32(1), True, vocab_limit=83)
    weights = np.asarray(verifier.output_rows, np.float64)
    z = weights @ np.asarray(state, np.float64)
    log_q = z - np.log(np.exp(z - z.max()).sum()) - z.max()
    for i in (1, 13, 29):
        logits = np.asarray(verifier.logits(hidden.final[i - 1]), np.float64)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        ours = float(soft[i] @ state) - (np.log(np.exp(z - z.max()).sum()) + z.max())
        assert ours == pytest.approx((p * log_q).sum(), abs=2e-4)
    for given in ((jnp.float32(0), True), (jnp.float32(1), False)):
        hard = target_rows(verifier, hidden, tokens, *given, vocab_limit=83)
        np.testing.assert_array_equal(hard, verifier.output_rows[tokens])


def test_loss_is_the_decayed_cross_entropy_of_the_blocks(tiny_trio: Trio) -> None:
    verifier, drafter, batch = tiny_trio.verifier, tiny_trio.drafter, rows()
    value, metrics = loss_of(verifier, drafter, batch, jax.random.key(0), ALL, vocab_limit=83)

    @jax.jit
    def decoded(tokens: jax.Array, anchors: jax.Array) -> jax.Array:
        features = verifier.forward(tokens, tiny_trio.taps).features
        cache = drafter.extend(drafter.empty_cache(30, jnp.float32), features, 0)

        def one(anchor: jax.Array) -> jax.Array:
            block = jnp.full((8,), 82).at[0].set(tokens[anchor])
            out = drafter(verifier.embed_tokens(block), cache, anchor)[1:]
            return jax.nn.log_softmax(verifier.logits(out), axis=-1)

        return jax.vmap(one)(anchors)

    total = weight = 0.0
    hits = np.zeros((2, 30, 7))
    for row, (tokens, first) in enumerate(zip(batch["tokens"], (6, 9), strict=True)):
        for anchor, log_q in enumerate(decoded(tokens, jnp.arange(first, 23)), start=first):
            label = tokens[anchor + 1 : anchor + 8]
            decay = np.exp(-np.arange(7) / ALL.gamma)
            total -= float((decay * log_q[jnp.arange(7), label]).sum())
            weight += decay.sum()
            hits[row, anchor] = log_q.argmax(-1) == label
    assert float(value) == pytest.approx(total / weight, rel=1e-5)
    counted = np.array([hits[0, 6:23].sum(0), hits[1, 9:23].sum(0)]).sum(0) / 31
    np.testing.assert_allclose(metrics["accuracy"], counted, atol=1e-6)
    length = 1 + np.cumprod(hits[1, 9:23], axis=-1).sum(-1).mean()
    assert float(metrics["length_greedy"]) == pytest.approx(length, rel=1e-6)


def test_accepted_length_counts_up_to_the_first_miss() -> None:
    hits = jnp.asarray([[True, True, False, True], [False, True, True, True], [True] * 4])
    counted = jnp.asarray([True, True, False])
    assert float(accepted_length(hits, counted)) == 2.0
    assert float(accepted_length(hits, jnp.zeros((3,), bool))) == 0.0


@functools.partial(jax.jit, static_argnames=("recipe", "vocab_limit"))
def gradient(
    trio: Trio, batch: dict, recipe: DrafterRecipe = RECIPE, vocab_limit: int = 83
) -> tuple[dict, dict]:
    graph, _ = nnx.split(trio.drafter)

    def loss(params):
        given = (fill(graph, params), batch, jax.random.key(0), recipe)
        value, metrics = drafter_loss(trio.verifier, *given, vocab_limit=vocab_limit)
        return value, {"loss": value, **metrics}

    return jax.grad(loss, has_aux=True)(flatten(trio.drafter))


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(RECIPE, id="distilled"),
        pytest.param(ALL, id="drawn", marks=pytest.mark.slow),
    ],
)
def test_padding_of_the_vocabulary_has_no_part(tiny_trio: Trio, recipe: DrafterRecipe) -> None:
    batch = rows(largest=KNOWN - 1)
    cut, padded = cut_and_padded(tiny_trio)
    expected, metrics = gradient(cut, batch, recipe=recipe, vocab_limit=KNOWN)
    found, own = gradient(padded, batch, recipe=recipe, vocab_limit=KNOWN)
    for name, value in metrics.items():
        np.testing.assert_allclose(own[name], value, rtol=1e-5, err_msg=name)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, atol=1e-5, err_msg=path)
    _, heard = gradient(padded, batch, recipe=recipe)
    assert float(heard["loss"]) > 1.2 * float(own["loss"])


def test_labels_that_are_no_token_are_refused_and_harm_nothing(tiny_trio: Trio) -> None:
    batch = rows()
    assert int((batch["tokens"][:, 10:] >= KNOWN).sum()) > 2
    found, metrics = gradient(tiny_trio, batch, vocab_limit=KNOWN)
    assert all(bool(jnp.isfinite(x).all()) for x in (*found.values(), *metrics.values()))
    given = Continuations(
        tokens=np.asarray(batch["tokens"]).astype(np.uint16),
        prompt=np.full((2,), 6, np.int32),
        temperature=np.ones((2,), np.float32),
    )
    warm = dataclasses.replace(given, temperature=np.full((2,), 0.7, np.float32))
    for texts, limit, message in (
        (given, KNOWN, f"hold token {given.tokens.max()}, the verifier's vocabulary has 70 tokens"),
        (warm, 83, "temperature must be 0 or 1, got 0.7"),
    ):
        with pytest.raises(ValueError, match=message):
            train_drafter(
                tiny_trio.drafter.config,
                tiny_trio.verifier,
                texts,
                OptimiserConfig(steps=1),
                RECIPE,
                vocab_limit=limit,
            )


@pytest.mark.parametrize("scale", [0.0, 1e8])
def test_extreme_features_give_finite_gradients(tiny_trio: Trio, scale: float) -> None:
    graph, state = nnx.split(tiny_trio.verifier)
    loud = nnx.merge(graph, state)
    loud.embed_tokens.weight = nnx.Param(scale * tiny_trio.verifier.embed_tokens.weight[...])
    found, _ = gradient(dataclasses.replace(tiny_trio, verifier=loud), rows())
    assert all(bool(jnp.isfinite(g).all()) for g in found.values())


def test_idle_rows_are_counted_and_change_nothing(tiny_trio: Trio) -> None:
    batch = rows() | {"first": jnp.asarray([6, 23])}
    other = batch | {"tokens": batch["tokens"].at[1].set(3)}
    key = jax.random.key(0)
    networks = (tiny_trio.verifier, tiny_trio.drafter)
    one, metrics = loss_of(*networks, batch, key, ALL, vocab_limit=83)
    two, _ = loss_of(*networks, other, key, ALL, vocab_limit=83)
    assert float(two) == float(one) > 0
    assert int(metrics["idle_rows"]) == 1
    found, metrics = gradient(tiny_trio, batch | {"first": jnp.asarray([23, 29])})
    assert int(metrics["idle_rows"]) == 2
    assert all(bool((g == 0).all()) for g in found.values())


def test_texts_without_any_usable_position_are_refused(tiny_trio: Trio) -> None:
    given = Continuations(
        tokens=np.zeros((3, 20), np.uint16),
        prompt=np.full((3,), 15, np.int32),
        temperature=np.ones((3,), np.float32),
    )
    with pytest.raises(ValueError, match="none of the 3 texts"):
        train_drafter(
            tiny_trio.drafter.config,
            tiny_trio.verifier,
            given,
            OptimiserConfig(steps=1),
            RECIPE,
            vocab_limit=83,
        )


def test_recipes_are_checked() -> None:
    with pytest.raises(ValueError, match="set distil = False"):
        DrafterRecipe(loss="dpace")
    with pytest.raises(ValueError, match="decayed or dpace"):
        DrafterRecipe(loss="l2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="positive"):
        DrafterRecipe(anchors=0)
