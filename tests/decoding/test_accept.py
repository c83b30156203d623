"""The walk down a tree equals golden walks, and emits the target's own distribution."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from tfm_jax.config import Sampling
from tfm_jax.decoding.accept import accept
from tfm_jax.decoding.sampling import choose, filter_logits
from tfm_jax.decoding.state import make_request
from tfm_jax.tree import Tree

ANY = jnp.int32(1000)
NO_END = jnp.asarray([-1])


def make_tree(tokens, parents, depths, valid) -> Tree:
    n = len(tokens)
    return Tree(
        token=jnp.asarray(tokens, jnp.int32),
        parent=jnp.asarray(parents, jnp.int32),
        depth=jnp.asarray(depths, jnp.int32),
        score=jnp.zeros(n),
        logprob=jnp.zeros(n),
        rank=jnp.zeros(n, jnp.int32),
        valid=jnp.asarray(valid),
    )


walk = jax.jit(functools.partial(accept, depth=7))


@pytest.mark.parametrize("rule", ["greedy", "uniform", "gumbel"])
def test_walk_equals_the_oracle(fixtures, rule):
    golden = np.load(fixtures / "tree_rules" / "accept.npz")
    logits = golden["target_logits"].astype(np.float64)
    scaled = logits / golden["temperature"].reshape(-1, 1, 1)
    if rule == "greedy":
        targets = logits.argmax(-1)
    elif rule == "gumbel":
        targets = (scaled + golden["gumbel"]).argmax(-1)
    else:
        p = np.exp(scaled - scaled.max(-1, keepdims=True))
        cumulative = np.cumsum(p / p.sum(-1, keepdims=True), -1)
        targets = (cumulative > golden["uniforms"][..., None]).argmax(-1)
    for case, name in enumerate(golden["case_names"]):
        tree = make_tree(*(golden[key][case] for key in ("tokens", "parents", "depths", "valid")))
        got = walk(tree, jnp.asarray(targets[case]), limit=ANY, end_tokens=NO_END)
        count = int(golden[f"{rule}_count"][case])
        assert int(got.count) == count, name
        nodes = golden[f"{rule}_nodes"][case]
        assert np.asarray(got.path)[:count].tolist() == nodes[nodes >= 0].tolist(), name
        assert int(got.bonus) == int(golden[f"{rule}_bonus"][case]), name


def spine(tokens) -> Tree:
    n = len(tokens)
    return make_tree(tokens, [-1, *range(n - 1)], range(n), [True] * n)


def test_an_end_token_is_never_passed_and_the_limit_never_exceeded():
    tree = spine([9, 1, 2, 3, 4])
    targets = jnp.asarray([1, 2, 3, 4, 5])
    got = walk(tree, targets, limit=ANY, end_tokens=jnp.asarray([3, -1]))
    assert (int(got.count), int(got.bonus)) == (3, 3)
    assert np.asarray(got.emitted)[:3].tolist() == [1, 2, 3]
    got = walk(tree, targets, limit=jnp.int32(2), end_tokens=NO_END)
    assert np.asarray(got.emitted)[: int(got.count)].tolist() == [1, 2]
    got = walk(tree, targets, limit=jnp.int32(1), end_tokens=NO_END)
    assert (int(got.count), int(got.bonus)) == (1, 1)


def request(vocab: int, **settings):
    return make_request(Sampling(**settings), end_tokens=(), vocab_limit=vocab, total=100)


def emitted_counts(tree: Tree, logits: np.ndarray, depth: int, draws: int):
    """How often each outcome (accepted tokens and bonus) is emitted over many seeds."""
    positions = jnp.arange(10, 10 + depth + 1)

    @jax.jit
    @jax.vmap
    def outcome(seed):
        settings = request(logits.shape[-1], temperature=1.0)
        settings = jax.tree.map(lambda x: x, settings)
        settings = type(settings)(**{**vars(settings), "seed": seed})
        targets = choose(jnp.asarray(logits, jnp.float32), tree.depth, positions, settings)
        got = accept(tree, targets, depth=depth, limit=ANY, end_tokens=NO_END)
        return jnp.where(jnp.arange(depth + 1) < got.count, got.emitted, -1)

    rows = np.asarray(outcome(jnp.arange(draws, dtype=jnp.uint32)))
    kinds, counts = np.unique(rows, axis=0, return_counts=True)
    return {
        tuple(int(t) for t in kind if t >= 0): int(c) for kind, c in zip(kinds, counts, strict=True)
    }


def test_emitted_outcomes_follow_the_exact_distribution(fixtures):
    """Chi-square over all outcomes of every fixed tree of the enumeration."""
    cases = json.loads((fixtures / "tree_rules" / "exact.json").read_text())["cases"]
    exact = np.load(fixtures / "tree_rules" / "exact.npz")
    fixed = [case for case in cases if case["rule"] == "target_only"]
    assert len(fixed) > 2
    for case in fixed:
        name, tokens, parents = case["name"], case["tokens"], case["parents"]
        depths = [0] * len(tokens)
        prefixes = [()] * len(tokens)
        for i in range(1, len(tokens)):
            depths[i] = depths[parents[i]] + 1
            prefixes[i] = (*prefixes[parents[i]], tokens[i])
        rows = []
        for prefix in prefixes:
            index = int("".join(map(str, prefix)) or "0", 4)
            rows.append(exact[f"target_level{len(prefix)}"][index])
        tree = make_tree(tokens, parents, depths, [True] * len(tokens))
        draws = 40_000
        counts = emitted_counts(tree, np.log(np.array(rows)), max(depths), draws)
        outcomes = [tuple(int(t) for t in row if t >= 0) for row in exact[f"{name}_emitted"]]
        expected = exact[f"{name}_probability"] * draws
        assert set(counts) <= set(outcomes), name
        observed = np.array([counts.get(outcome, 0) for outcome in outcomes])
        large = expected > 5
        _, p = scipy.stats.chisquare(
            np.append(observed[large], observed[~large].sum() + 1e-9),
            np.append(expected[large], expected[~large].sum() + 1e-9),
            sum_check=False,
        )
        assert p > 1e-4, (name, p)


def test_filters_equal_a_plain_reading_of_their_definition():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(6, 30)).astype(np.float32) * 2
    logits[0, 3] = logits[0, 7] = logits[0].max() + 1  # a tie at the top
    for top_k, top_p, min_p in [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.7, 0.0),
        (4, 0.5, 0.1),
        (99, 1.0, 0.3),
    ]:
        settings = request(30, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        got = np.asarray(filter_logits(jnp.asarray(logits), settings)) > -np.inf
        for row in range(6):
            order = sorted(range(30), key=lambda i: (-logits[row, i], i))
            order = order[:top_k] if top_k else order
            p = np.exp(logits[row, order].astype(np.float64))
            p /= p.sum()
            kept = [
                token
                for token, before, share in zip(order, np.cumsum(p) - p, p, strict=True)
                if before < top_p and share >= min_p * p[0]
            ]
            assert set(np.flatnonzero(got[row])) == set(kept), (top_k, top_p, min_p, row)


def test_chains_and_filters_equal_the_dflash_package(fixtures):
    """24 blocks of 7 drafted tokens: greedy acceptance, and the filtered target distributions."""
    golden = np.load(fixtures / "dflash_tiny" / "acceptance.npz")
    for case in range(24):
        tree = spine([0, *golden["greedy_draft"][case].tolist()])
        targets = jnp.asarray(golden["target_logits"][case].argmax(-1))
        got = walk(tree, targets, limit=ANY, end_tokens=NO_END)
        assert int(got.count) - 1 == int(golden["greedy_accepted"][case])
        assert int(got.bonus) == int(golden["greedy_bonus"][case])

        temperature = float(golden["temperature"][case])
        settings = request(
            40,
            temperature=temperature,
            top_k=int(golden["top_k"][case]),
            top_p=float(golden["top_p"][case]),
        )
        scaled = jnp.asarray(golden["target_logits"][case], jnp.float32) / temperature
        filtered = jax.nn.softmax(filter_logits(scaled, settings), axis=-1)
        np.testing.assert_allclose(filtered, golden["target_probs"][case], atol=2e-6)


def test_greedy_takes_the_lowest_of_tied_ids_and_never_padding():
    logits = jnp.asarray([[1.0, 5.0, 5.0, 9.0], [2.0, 2.0, 2.0, 7.0]])
    got = choose(logits, jnp.zeros(2, jnp.int32), jnp.arange(1), request(3))
    assert np.asarray(got).tolist() == [1, 0]
