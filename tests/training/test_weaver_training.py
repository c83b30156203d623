"""The Weaver's training scores are those of decoding, and training makes decoding accept more."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.padding import KNOWN, cut_and_padded
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.draft import draft
from tfm_jax.decoding.generate import decode, rounds_limit
from tfm_jax.decoding.grow import Expansion, weaver_scorer
from tfm_jax.decoding.prefill import prefill
from tfm_jax.decoding.state import Trio, make_request
from tfm_jax.models.weaver import Weaver
from tfm_jax.training import weaver as training
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.losses import drawing_noise, lk_loss, pool_terms
from tfm_jax.training.trainer import OptimiserConfig, fill, flatten
from tfm_jax.training.weaver import (
    WeaverRecipe,
    kth_largest,
    path_scores,
    train_weaver,
    weaver_loss,
)

RECIPE = WeaverRecipe(rows=2, anchors=4)
ANCHORS = jnp.asarray([3, 11, 12, 17])
KEEP = jnp.ones((4,), bool)

scores_of = jax.jit(functools.partial(path_scores, vocab_limit=83))


def rows(largest: int = 79) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(0, largest + 1, (2, 25)).astype(np.int32)
    return {
        "tokens": jnp.asarray(tokens),
        "first": jnp.asarray([6, 9], jnp.int32),
        "temperature": jnp.asarray([1.0, 0.0], jnp.float32),
    }


@jax.jit
def decoded_scores(trio: Trio, state, request, path: jax.Array):
    """Pool ids and log-probabilities [D, K] along a path, node by node as trees grow."""
    drafted = draft(trio, state, request, 16)
    depth = path.shape[0]
    scorer, memory = weaver_scorer(trio, drafted, state.hidden, depth)
    below = jnp.tril(jnp.ones((depth, depth), bool))
    scores = []
    for d in range(depth):
        node = Expansion(
            start=jnp.int32(d),
            token=path[d, None],
            parent=jnp.asarray([d - 1]),
            depth=jnp.asarray([d]),
            ancestors=below[d, None],
        )
        memory, logprobs = scorer(memory, node)
        scores.append(logprobs[0])
    return drafted.ids, drafted.logits, jnp.stack(scores)


@pytest.mark.parametrize("dense", [True, False])
def test_scores_equal_those_of_decoding(tiny_trio: Trio, monkeypatch, dense: bool) -> None:
    monkeypatch.setattr(training, "_DENSE", 32 if dense else 0)
    tokens = rows()["tokens"][0]
    # A function of its own: programs are cached by function, whatever was patched since.
    run = jax.jit(lambda *arguments: path_scores(*arguments, vocab_limit=83))
    scores = run(tiny_trio, tokens, ANCHORS, KEEP, jnp.float32(1))
    assert scores.ids.shape == (4, 7, 83 if dense else 16)
    log_q = jax.nn.log_softmax(scores.logits, axis=-1)
    verifier = tiny_trio.verifier
    full = jax.nn.log_softmax(verifier.logits(jax.jit(verifier.forward)(tokens).final), axis=-1)
    request = make_request(Sampling(), end_tokens=(), vocab_limit=83, total=60)
    for n, anchor in enumerate(ANCHORS.tolist()):
        state = prefill(tiny_trio, np.asarray(tokens[: anchor + 1]), 64)
        ids, prior, expected = decoded_scores(
            tiny_trio, state, request, tokens[anchor : anchor + 7]
        )
        for d in range(7):
            place = np.argsort(scores.ids[n, d])  # row of each id in ours
            place = place[np.searchsorted(scores.ids[n, d], ids[d], sorter=place)]
            np.testing.assert_allclose(scores.prior[n, d, place], prior[d], atol=1e-4)
            np.testing.assert_allclose(log_q[n, d, place], expected[d], atol=1e-4)
            np.testing.assert_allclose(
                scores.target[n, d, place], full[anchor + d, ids[d]], atol=1e-4
            )
        assert int(jnp.isfinite(scores.logits[n]).sum()) == 7 * 16
        np.testing.assert_array_equal(scores.label[n], tokens[anchor + 1 : anchor + 8])


def test_scores_do_not_depend_on_what_follows_their_path(tiny_trio: Trio) -> None:
    tokens = rows()["tokens"][0]
    before = scores_of(tiny_trio, tokens, ANCHORS, KEEP, jnp.float32(1))
    for d in (0, 3):
        anchor = int(ANCHORS[1])
        changed = tokens.at[anchor + d + 1 :].set(5)
        after = scores_of(tiny_trio, changed, ANCHORS, KEEP, jnp.float32(1))
        known = np.isfinite(before.logits[1, : d + 1])
        np.testing.assert_array_equal(known, np.isfinite(after.logits[1, : d + 1]))
        np.testing.assert_allclose(
            np.where(known, after.logits[1, : d + 1], 0),
            np.where(known, before.logits[1, : d + 1], 0),
            atol=1e-5,
        )
        assert not np.allclose(after.logits[1, d + 1], before.logits[1, d + 1], atol=1e-2)


@pytest.mark.parametrize("noised", [pytest.param(False, marks=pytest.mark.slow), True])
def test_both_ways_to_score_give_one_loss(tiny_trio: Trio, monkeypatch, noised: bool) -> None:
    random = np.random.default_rng(3)
    query = jnp.asarray(random.normal(size=(4, 7, 40)), jnp.float32)
    prior, noise = (jnp.asarray(random.normal(size=(4, 7, 83)), jnp.float32) for _ in range(2))
    target = jax.nn.log_softmax(jnp.asarray(random.normal(size=(4, 7, 83)) * 2, jnp.float32))
    valid = jnp.ones((4, 7), bool).at[1, 3:].set(False)
    label = jnp.argmax(target, axis=-1)
    added = noise if noised else None

    def loss(query: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        ranking = prior if added is None else prior + added
        pool = training._score(tiny_trio.verifier.output_rows, query, prior, ranking, 16)
        assert pool.gathered == (training._DENSE == 0)
        terms = pool_terms(pool.logits, pool.at(target), valid)
        drawn = training._chosen_log_prob(pool, label, added)
        of_pool = jnp.where(pool.of(prior) == -jnp.inf, 0.0, pool.of(prior)).sum(-1)
        return lk_loss(terms, drawn=drawn, share=0.5), (terms.pool_mass, drawn, of_pool)

    found = []
    for dense in (32, 0):
        monkeypatch.setattr(training, "_DENSE", dense)
        found.append(jax.value_and_grad(loss, has_aux=True)(query))
    ((one, facts), gradient), ((other, others), second) = found
    assert float(one) == pytest.approx(float(other), rel=1e-5)
    for fact, also in zip(facts, others, strict=True):
        np.testing.assert_allclose(fact, also, rtol=1e-5)
    np.testing.assert_allclose(gradient, second, atol=1e-6)
    assert float(jnp.abs(gradient).max()) > 1e-3
    assert 0 < np.isfinite(facts[1]).sum() < 28  # some labels are in their pools, some are not


def test_a_path_is_as_probable_as_its_scores_say(tiny_trio: Trio) -> None:
    tokens = rows()["tokens"][0]
    scores = scores_of(tiny_trio, tokens, ANCHORS, KEEP, jnp.float32(1))
    found = np.asarray(scores.drawn)
    whole = np.asarray(jax.nn.log_softmax(scores.logits, axis=-1))
    ids, label = np.asarray(scores.ids), np.asarray(scores.label)
    inside = 0
    for place in np.ndindex(label.shape):
        at = np.flatnonzero(ids[place] == label[place])
        expected = whole[place][at[0]] if at.size else -np.inf
        np.testing.assert_allclose(found[place], expected, atol=1e-5)
        inside += bool(np.isfinite(expected))
    assert 0 < inside < label.size
    given = (tiny_trio, tokens, ANCHORS, KEEP)
    key = jax.random.key(0)
    greedy = scores_of(*given, jnp.float32(0), noise_key=key)
    np.testing.assert_allclose(greedy.drawn, found, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_paths_are_scored_as_a_tree_scores_them_that_knows_the_noise(
    tiny_trio: Trio, padded: bool
) -> None:
    """Pools of the largest sums of prior and noise, and the noise in the scores."""
    trio, limit = (cut_and_padded(tiny_trio)[1], KNOWN) if padded else (tiny_trio, 83)
    run = jax.jit(functools.partial(path_scores, vocab_limit=limit))
    given = (rows(KNOWN - 1)["tokens"][0], ANCHORS, KEEP, jnp.float32(1))
    key = jax.random.key(7)
    # With room for all tokens nothing is left out of the scores without noise.
    wide = run(dataclasses.replace(trio, weaver=widened(trio)), *given)
    plain, scores = run(trio, *given), run(trio, *given, noise_key=key)
    np.testing.assert_allclose(scores.logits, plain.logits, atol=1e-4)
    label = np.asarray(scores.label)
    own = jnp.asarray(label)[..., None] == wide.ids
    noise = np.asarray(drawing_noise(key, wide.target, own))
    sums, logits = np.asarray(wide.prior) + noise, np.asarray(wide.logits) + noise
    assert np.isfinite(sums).sum(axis=-1).min() == limit
    missed = 0
    for place in np.ndindex(label.shape):
        pool = np.argsort(sums[place])[-16:]
        expected = -np.inf
        if label[place] in pool:
            expected = logits[place][label[place]] - np.logaddexp.reduce(logits[place][pool])
        missed += not np.isfinite(expected)
        np.testing.assert_allclose(scores.drawn[place], expected, atol=1e-4)
    assert missed < (~np.isfinite(plain.drawn)).sum() / 2


def widened(trio: Trio) -> Weaver:
    """The trio's Weaver with room for the whole vocabulary in its pools."""
    assert trio.weaver is not None
    config = dataclasses.replace(trio.weaver.config, candidate_pool_size=83)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Weaver(config, rngs=nnx.Rngs(0))))
    return fill(graph, flatten(trio.weaver))


def gradient(
    trio: Trio, batch: dict, recipe: WeaverRecipe = RECIPE, vocab_limit: int = 83
) -> tuple[dict, dict]:
    """Gradient of the loss by path of the Weaver's parameters, and the loss beside its metrics."""
    graph, _ = nnx.split(trio.weaver)

    def loss(params):
        own = dataclasses.replace(trio, weaver=fill(graph, params))
        value, metrics = weaver_loss(own, batch, jax.random.key(0), recipe, vocab_limit=vocab_limit)
        return value, {"loss": value, **metrics}

    return jax.jit(jax.grad(loss, has_aux=True))(flatten(trio.weaver))


def test_labels_outside_the_pool_are_reported(tiny_trio: Trio) -> None:
    """The pool of a random drafter misses most of the text."""
    batch = rows() | {"first": jnp.asarray([6, 20])}  # the second has no room for a path
    every = dataclasses.replace(RECIPE, anchors=12)
    found, metrics = gradient(tiny_trio, batch, every)
    assert all(bool(jnp.isfinite(x).all()) for x in (*found.values(), *metrics.values()))
    anchors = jnp.arange(6, 18)
    scores = scores_of(tiny_trio, batch["tokens"][0], anchors, anchors > 0, jnp.float32(1))
    offered = np.argsort(np.asarray(scores.prior), axis=-1)[..., -16:]
    inside = (offered == np.asarray(scores.label)[..., None]).any(axis=-1)
    assert 0 < inside.mean() < 0.6
    assert float(metrics["pool_recall"]) == pytest.approx(inside.mean(), rel=1e-5)
    assert int(metrics["idle_rows"]) == 1
    _, nothing = gradient(tiny_trio, batch | {"first": jnp.asarray([20, 20])}, every)
    assert float(nothing["pool_recall"]) == float(nothing["loss"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dense", [True, False])
def test_padding_of_the_vocabulary_has_no_part(tiny_trio: Trio, monkeypatch, dense: bool) -> None:
    monkeypatch.setattr(training, "_DENSE", 32 if dense else 0)
    # Without noise: one key draws other noise for another number of rows.
    recipe = dataclasses.replace(RECIPE, nodes=8)
    batch = rows(KNOWN - 1)
    cut, padded = cut_and_padded(tiny_trio)
    expected, metrics = gradient(cut, batch, recipe, KNOWN)
    found, own = gradient(padded, batch, recipe, KNOWN)
    for name, value in metrics.items():
        np.testing.assert_allclose(own[name], value, rtol=1e-5, err_msg=name)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, atol=1e-5, err_msg=path)
    _, heard = gradient(padded, batch, recipe)
    assert float(heard["pool_mass"]) != pytest.approx(float(own["pool_mass"]), rel=0.1)
    run = jax.jit(lambda *arguments: path_scores(*arguments, vocab_limit=KNOWN))
    scores = run(padded, batch["tokens"][0], ANCHORS, KEEP, jnp.float32(1))
    for name in ("prior", "logits", "target"):
        assert int(scores.ids[jnp.isfinite(getattr(scores, name))].max()) < KNOWN, name
    assert int(jnp.isfinite(scores.prior).sum()) == 4 * 7 * 16


@pytest.mark.parametrize("dense", [True, False])
def test_labels_that_are_no_token_are_missed_and_harm_nothing(
    tiny_trio: Trio, monkeypatch, dense: bool
) -> None:
    monkeypatch.setattr(training, "_DENSE", 32 if dense else 0)
    tokens = rows()["tokens"].at[:, 10:].set(82)
    found, metrics = gradient(
        tiny_trio, rows() | {"tokens": tokens, "first": jnp.asarray([9, 9])}, RECIPE, KNOWN
    )
    assert all(bool(jnp.isfinite(x).all()) for x in (*found.values(), *metrics.values()))
    assert float(metrics["pool_recall"]) == 0
    assert float(metrics["length_greedy"]) == 1


@pytest.mark.parametrize("k", [1, 2, 16, 40])
def test_kth_largest(k: int) -> None:
    values = np.random.default_rng(k).standard_normal((5, 40)).astype(np.float32) * 10.0
    values[1] = -np.abs(values[1])
    values[2] = 1.5
    values[3, ::2] = 0.0
    values[4] *= np.float32(1e30)
    np.testing.assert_array_equal(kth_largest(jnp.asarray(values), k), np.sort(values)[:, -k])


def test_kth_largest_refuses_more_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"1\.\.4, got 5"):
        kth_largest(jnp.zeros((2, 4)), 5)


def test_training_makes_decoding_accept_nearly_whole_blocks(
    tiny_trio: Trio, capsys: pytest.CaptureFixture
) -> None:
    """A Weaver overfitted to two greedy texts."""
    prompts = np.random.default_rng(5).integers(6, 80, (2, 6)).astype(np.int32)
    shape = TreeConfig(budget=14, expand=1, children=2, pool=83)
    # The pool is the whole vocabulary, so that a random drafter hides no token.
    config = dataclasses.replace(tiny_trio.weaver.config, candidate_pool_size=83)

    def write(weaver: Weaver) -> tuple[np.ndarray, float]:
        """Two greedy texts of 40 tokens and the mean accepted length."""
        trio = dataclasses.replace(tiny_trio, weaver=weaver)
        request = make_request(Sampling(), end_tokens=(), vocab_limit=83, total=40)
        texts, rounds = [], 0
        for prompt in prompts:
            state = prefill(trio, prompt, 64)
            state = decode(trio, state, request, rounds_limit(), method="tfm", shape=shape)
            texts.append(np.asarray(state.tokens)[:40])
            rounds += int(state.rounds)
        return np.stack(texts), 2 * 34 / rounds

    untrained = Weaver(config, rngs=nnx.Rngs(0))  # gives the drafter's marginals
    written, length_before = write(untrained)
    texts = Continuations(
        tokens=written.astype(np.uint16),
        prompt=np.full((2,), 6, np.int32),
        temperature=np.zeros((2,), np.float32),
    )
    state = train_weaver(
        config,
        tiny_trio.verifier,
        tiny_trio.drafter,
        texts,
        OptimiserConfig(steps=150),
        WeaverRecipe(rows=2, anchors=10),
        vocab_limit=83,
        log_every=150,
    )
    again, length_after = write(fill(nnx.split(untrained)[0], state.params))
    np.testing.assert_array_equal(again, written)
    assert length_after > 6  # of 8
    assert length_after > 2 * length_before
    assert "weaver:" in capsys.readouterr().out


def test_refuses_what_cannot_be_trained(tiny_trio: Trio) -> None:
    texts = Continuations(
        tokens=np.zeros((3, 20), np.uint16),
        prompt=np.full((3,), 15, np.int32),
        temperature=np.ones((3,), np.float32),
    )
    config = tiny_trio.weaver.config
    optimiser = OptimiserConfig(steps=1)
    networks = (tiny_trio.verifier, tiny_trio.drafter)
    settled = {"optimiser": optimiser, "recipe": RECIPE, "vocab_limit": KNOWN}
    with pytest.raises(ValueError, match="none of the 3 texts"):
        train_weaver(config, *networks, texts, **settled)
    deeper = dataclasses.replace(config, depth=8)
    with pytest.raises(ValueError, match="8 depths, the drafter drafts 7"):
        train_weaver(deeper, *networks, texts, **settled)
    given = dataclasses.replace(texts, prompt=np.full((3,), 4, np.int32))
    start = {"pos_emb": np.zeros((7, 32))}
    with pytest.raises(ValueError, match="do not fit the configuration"):
        train_weaver(config, *networks, given, **settled, start=start)
    padding = dataclasses.replace(given, tokens=np.full((3, 20), KNOWN, np.uint16))
    with pytest.raises(ValueError, match="hold token 70, the verifier's vocabulary has 70 tokens"):
        train_weaver(config, *networks, padding, **settled)
    warm = dataclasses.replace(given, temperature=np.full((3,), 0.7, np.float32))
    with pytest.raises(ValueError, match=r"temperature must be 0 or 1, got 0\.7"):
        train_weaver(config, *networks, warm, **settled)
