"""The Weaver's training scores are those of decoding, and training makes decoding accept more."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.draft import draft
from tfm_jax.decoding.generate import decode, rounds_limit
from tfm_jax.decoding.grow import Expansion, weaver_scorer
from tfm_jax.decoding.prefill import prefill
from tfm_jax.decoding.state import Trio, make_request
from tfm_jax.models.weaver import Weaver
from tfm_jax.training import weaver as training
from tfm_jax.training.continuations import Continuations, write_on
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


def rows() -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(0, 80, (2, 25)).astype(np.int32)
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
    run = jax.jit(lambda *arguments: path_scores(*arguments))
    scores = run(tiny_trio, tokens, ANCHORS, jnp.ones((4,), bool), jnp.float32(1))
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
    run = jax.jit(path_scores)
    keep = jnp.ones((4,), bool)
    before = run(tiny_trio, tokens, ANCHORS, keep, jnp.float32(1))
    for d in (0, 3):
        anchor = int(ANCHORS[1])
        changed = tokens.at[anchor + d + 1 :].set(5)
        after = run(tiny_trio, changed, ANCHORS, keep, jnp.float32(1))
        known = np.isfinite(before.logits[1, : d + 1])
        np.testing.assert_array_equal(known, np.isfinite(after.logits[1, : d + 1]))
        np.testing.assert_allclose(
            np.where(known, after.logits[1, : d + 1], 0),
            np.where(known, before.logits[1, : d + 1], 0),
            atol=1e-5,
        )
        assert not np.allclose(after.logits[1, d + 1], before.logits[1, d + 1], atol=1e-2)


def test_both_ways_to_score_give_one_loss(tiny_trio: Trio, monkeypatch) -> None:
    found = []
    for dense in (32, 0):
        monkeypatch.setattr(training, "_DENSE", dense)

        @jax.jit
        def run(trio: Trio):
            graph, _ = nnx.split(trio.weaver)

            def loss(params):
                whole = dataclasses.replace(trio, weaver=fill(graph, params))
                return weaver_loss(whole, rows(), jax.random.key(0), RECIPE)

            return jax.value_and_grad(loss, has_aux=True)(flatten(trio.weaver))

        found.append(run(tiny_trio))
    (one, one_metrics), one_gradient = found[0]
    (two, two_metrics), two_gradient = found[1]
    assert float(one) == pytest.approx(float(two), rel=1e-5)
    for name in one_metrics:
        np.testing.assert_allclose(one_metrics[name], two_metrics[name], rtol=1e-4, err_msg=name)
    for name in one_gradient:
        np.testing.assert_allclose(one_gradient[name], two_gradient[name], atol=1e-5)
    # A random drafter misses most labels: the loss is finite and the misses are reported.
    assert 0 < float(one_metrics["pool_recall"]) < 0.6
    assert np.isfinite(float(one))


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
    """A Weaver overfitted to two greedy texts, beside the drafter's marginals alone."""
    verifier, drafter = tiny_trio.verifier, tiny_trio.drafter
    prompts = np.random.default_rng(5).integers(6, 80, (2, 6)).astype(np.int32)
    greedy = np.zeros((2,), np.float32)
    lengths = np.full((2,), 6, np.int32)
    written = jax.jit(write_on, static_argnames="total")(
        verifier, prompts, lengths, greedy, lengths.astype(np.uint32), total=40
    )
    texts = Continuations(
        tokens=np.asarray(written).astype(np.uint16), prompt=lengths, temperature=greedy
    )
    # The pool is the whole vocabulary, so that a random drafter hides no token.
    config = dataclasses.replace(tiny_trio.weaver.config, candidate_pool_size=83)
    state = train_weaver(
        config,
        verifier,
        drafter,
        texts,
        OptimiserConfig(steps=200),
        WeaverRecipe(rows=2, anchors=10),
        log_every=200,
    )
    graph, _ = nnx.split(Weaver(config, rngs=nnx.Rngs(0)))
    trio = dataclasses.replace(tiny_trio, weaver=fill(graph, state.params))
    shape = TreeConfig(budget=14, expand=1, children=2, pool=83)
    lengths = {}
    for method in ("ddtree", "tfm"):
        rounds = 0
        for row in range(2):
            request = make_request(Sampling(), end_tokens=(), vocab_limit=83, total=40)
            state = prefill(trio, prompts[row], 64)
            state = decode(trio, state, request, rounds_limit(), method=method, shape=shape)
            np.testing.assert_array_equal(np.asarray(state.tokens)[:40], written[row])
            rounds += int(state.rounds)
        lengths[method] = 2 * 34 / rounds
    assert lengths["tfm"] > 6  # of 8
    assert lengths["tfm"] > 2 * lengths["ddtree"]
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
    with pytest.raises(ValueError, match="none of the 3 texts"):
        train_weaver(config, *networks, texts, optimiser, RECIPE)
    deeper = dataclasses.replace(config, depth=8)
    with pytest.raises(ValueError, match="8 depths, the drafter drafts 7"):
        train_weaver(deeper, *networks, texts, optimiser, RECIPE)
    given = dataclasses.replace(texts, prompt=np.full((3,), 4, np.int32))
    start = {"pos_emb": np.zeros((7, 32))}
    with pytest.raises(ValueError, match="do not fit the configuration"):
        train_weaver(config, *networks, given, optimiser, RECIPE, start=start)
