"""The verifier equals transformers on a tiny Qwen3.6-shaped model, in all its modes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import FIXTURES, worst
from tfm_jax.checkpoints import build_verifier, read_trio
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.commit import advance
from tfm_jax.decoding.generate import decode, rounds_limit, text_so_far
from tfm_jax.decoding.prefill import prefill
from tfm_jax.decoding.state import Trio, make_request
from tfm_jax.models.gated_delta import chunked_delta_rule, unit_length
from tfm_jax.models.qwen36 import LinearCache, Verifier
from tfm_jax.tree import Tree, topology

LOGITS, STATES = 2e-4, 1e-4  # the fixture's own float32 tolerances
ALL_LAYERS = tuple(range(8))


def load(layout: str) -> Verifier:
    part = read_trio(FIXTURES / "qwen36_tiny" / layout, dtype="float32").verifier
    return build_verifier(part.config, part.params)


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return load("text_f32")


@pytest.fixture(scope="module")
def golden():
    return np.load(FIXTURES / "qwen36_tiny" / "golden.npz")


forward = jax.jit(lambda model, tokens: model.forward(tokens, ALL_LAYERS))


def assert_caches(caches, golden, prefix: str, row: int = 0) -> None:
    for i, cache in enumerate(caches):
        where = f"{prefix}/layer{i}"
        if isinstance(cache, LinearCache):
            assert worst(cache.state, golden[f"{where}/recurrent_state"][row]) < STATES, where
            history = golden[f"{where}/conv_state"][row][:, 1:].T
            assert worst(cache.history, history) < STATES, where
        else:
            key, value = golden[f"{where}/key"][row], golden[f"{where}/value"][row]
            assert worst(cache.key[:, : key.shape[1]], key) < STATES, where
            assert worst(cache.value[:, : key.shape[1]], value) < STATES, where


def test_whole_texts(verifier, golden):
    for row in range(2):
        got = forward(verifier, golden["batch/input_ids"][row])
        assert worst(verifier.logits(got.final), golden["batch/logits"][row]) < LOGITS
        assert worst(got.final, golden["batch/final_norm"][row]) < LOGITS
        layers = np.moveaxis(np.asarray(got.features).reshape(37, 8, 64), 1, 0)
        assert worst(layers, golden["batch/hidden"][1:, row]) < LOGITS
    got = forward(verifier, golden["long/input_ids"][0])
    assert worst(verifier.logits(got.final), golden["long/logits"][0]) < LOGITS


def test_three_layouts_of_the_checkpoint_are_one_model(verifier, golden):
    tokens = golden["batch/input_ids"][0]
    reference = verifier.logits(forward(verifier, tokens).final)
    for layout in ("hub_f32", "hub_bf16_sharded"):
        other = load(layout)
        np.testing.assert_array_equal(other.logits(forward(other, tokens).final), reference)


def test_prefill_then_single_steps(verifier, golden):
    """One-token decode is the verification of a tree that is the root alone."""
    plan = jax.jit(Verifier.prefill)
    one = Tree(
        token=jnp.zeros(1, jnp.int32),
        parent=jnp.full(1, -1, jnp.int32),
        depth=jnp.zeros(1, jnp.int32),
        score=jnp.zeros(1),
        logprob=jnp.zeros(1),
        rank=jnp.zeros(1, jnp.int32),
        valid=jnp.ones(1, bool),
    )

    @jax.jit
    def step(model, token, caches, length):
        hidden, pending = model.verify(token[None], caches, length, topology(one, 4))
        path, count = jnp.zeros(1, jnp.int32), jnp.int32(1)
        return model.logits(hidden.final[0]), advance(caches, pending, path, count, length)

    ids, first = golden["decode/input_ids"], int(golden["decode/prefill_len"])
    for row in range(2):
        tokens = np.full(64, 3, np.int32)  # the padding holds real tokens on purpose
        tokens[:first] = ids[row, :first]
        hidden, caches = plan(
            verifier, tokens, verifier.empty_caches(64), jnp.int32(0), jnp.int32(first)
        )
        logits = verifier.logits(hidden.final[:first])
        assert worst(logits, golden["decode/prefill_logits"][row]) < LOGITS
        assert_caches(caches, golden, "decode/cache_after_prefill", row)
        for i in range(first, ids.shape[1]):
            logits, caches = step(verifier, ids[row, i], caches, jnp.int32(i))
            assert worst(logits, golden["decode/step_logits"][row, i - first]) < LOGITS
        assert_caches(caches, golden, "decode/cache_after_steps", row)


def test_greedy_tokens(verifier, golden):
    trio, prompt = Trio(verifier=verifier), golden["greedy/prompt"][0]
    request = make_request(Sampling(), end_tokens=(), vocab_limit=512, total=len(prompt) + 48)
    state = prefill(trio, prompt, 128)
    state = decode(trio, state, request, rounds_limit(), method="ar", shape=TreeConfig())
    assert text_so_far(state, len(prompt)) == golden["greedy/tokens"][0].tolist()


@pytest.mark.parametrize("reordered", [False, True])
def test_tree_rows_equal_plain_passes_over_their_paths(verifier, golden, reordered):
    """The fixture's nodes hang on the last prefix token: that one is our root."""
    prefix = golden["tree/prefix"][0]
    parents = np.r_[-1, golden["tree/parents"] + 1]
    tokens, depths = (
        np.r_[prefix[-1], golden["tree/tokens"]],
        np.r_[0, golden["tree/depth"]],
    )
    order = np.arange(17)
    if reordered:  # any numbering with parents first, here by depth and otherwise reversed
        order = np.lexsort((-order, depths))
    place = np.argsort(order)
    tree = Tree(
        token=jnp.asarray(tokens[order], jnp.int32),
        parent=jnp.asarray(np.where(parents < 0, -1, place[parents])[order], jnp.int32),
        depth=jnp.asarray(depths[order], jnp.int32),
        score=jnp.zeros(17),
        logprob=jnp.zeros(17),
        rank=jnp.zeros(17, jnp.int32),
        valid=jnp.ones(17, bool),
    )
    trio, length = Trio(verifier=verifier), len(prefix) - 1
    state = prefill(trio, prefix, 64)
    run = jax.jit(functools.partial(Verifier.verify, taps=ALL_LAYERS))
    hidden, pending = run(verifier, tree.token, state.caches, jnp.int32(length), topology(tree, 4))
    logits = np.asarray(verifier.logits(hidden.final))[place]
    assert worst(logits[0], golden["tree/prefix_last_logits"]) < LOGITS
    assert worst(logits[1:], golden["tree/node_logits"]) < LOGITS
    layers = np.asarray(hidden.features).reshape(17, 8, 64)[place][1:]
    assert worst(np.moveaxis(layers, 1, 0), golden["tree/node_hidden"][1:]) < LOGITS

    accepted = place[np.r_[0, golden["tree/accepted"] + 1]]
    path = jnp.asarray(np.pad(accepted, (0, 4)), jnp.int32)
    count = jnp.int32(len(accepted))
    caches = advance(state.caches, pending, path, count, jnp.int32(length))
    assert_caches(caches, golden, "tree/cache_after_accept")


@pytest.mark.parametrize("length", [1, 7, 64, 130])
def test_chunked_delta_rule_equals_the_recurrence(length):
    golden = np.load(FIXTURES / "qwen36_tiny" / "gdn.npz")
    for row in range(2):
        q, k, v, g, beta, s0 = (
            jnp.asarray(golden[f"T{length}/{name}"][row])
            for name in ("query", "key", "value", "g", "beta", "initial_state")
        )
        out, state = jax.jit(chunked_delta_rule)(
            unit_length(q) * 16**-0.5, unit_length(k), v, g, beta, s0
        )
        assert worst(out, golden[f"T{length}/output_f64"][row]) < 2e-6
        assert worst(state, golden[f"T{length}/final_state_f64"][row]) < 2e-6


@pytest.mark.parametrize("decay", [0.0, -1e-12, -27.0])
def test_chunked_delta_rule_with_alike_keys_and_extreme_decay(decay):
    """Forward equals a float64 recurrence; the gradient is finite."""
    rows, key_size, value_size = 70, 16, 8
    rng = np.random.default_rng(0)
    k = np.tile(rng.normal(size=(1, 1, key_size)), (rows, 1, 1))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(rows, 3, value_size))
    beta = np.full((rows, 3), 0.999)
    g = np.full((rows, 3), decay)
    g[::5] = -0.01
    s0 = rng.normal(size=(3, key_size, value_size))
    state, outs = s0.copy(), []
    for t in range(rows):
        for h in range(3):
            state[h] *= np.exp(g[t, h])
            u = beta[t, h] * (v[t, h] - k[t, 0] @ state[h])
            state[h] += np.outer(k[t, 0], u)
        outs.append([k[t, 0] @ state[h] for h in range(3)])
    as32 = [jnp.asarray(x, jnp.float32) for x in (k, k, v, g, beta, s0)]
    out, final = jax.jit(chunked_delta_rule)(*as32)
    scale = max(1.0, np.abs(outs).max())
    assert worst(out, np.array(outs)) / scale < 1e-5
    assert worst(final, state) / max(1.0, np.abs(state).max()) < 1e-5
    grads = jax.jit(jax.grad(lambda *a: chunked_delta_rule(*a)[0].sum(), argnums=(0, 1, 2, 3, 4)))
    assert all(bool(jnp.isfinite(x).all()) for x in grads(*as32))
