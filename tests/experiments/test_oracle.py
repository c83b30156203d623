"""Ceilings of drafts that do not see their path, against values worked out by hand and by an LP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from experiments.oracle import best_draft, best_oracle, marginal_oracle, overlap

# A chain of two tokens: the first is A with probability 0.6, else B; then x or y.
AFTER_A, AFTER_B = [0.9, 0.1], [0.2, 0.8]
CHAIN = jnp.asarray(2 * [AFTER_A, AFTER_A, AFTER_A, AFTER_B, AFTER_B])


def test_a_chain_of_two_tokens():
    # The marginal is x 0.62, y 0.38; it misses 0.28 after A and 0.42 after B.
    expected = 1 - (0.6 * 0.28 + 0.4 * 0.42)
    marginal = jnp.asarray([0.62, 0.38])
    assert overlap(CHAIN, marginal).mean() == pytest.approx(expected)
    oracle = marginal_oracle(CHAIN)
    assert oracle.in_sample == pytest.approx(expected)
    # One of ten left out: x has 5.3 / 9 for an A and 6 / 9 for a B.
    left_out = 0.6 * (5.3 / 9 + 0.1) + 0.4 * (0.2 + 3 / 9)
    assert oracle.held_out == pytest.approx(left_out)
    # For q(x) = t in 0.2 .. 0.9 acceptance is 0.54 + 0.2 t, beyond it falls.
    np.testing.assert_allclose(best_draft(CHAIN), AFTER_A, atol=1e-6)
    best = best_oracle(CHAIN)
    assert best.in_sample == pytest.approx(0.72)
    assert best.held_out == pytest.approx(0.72)  # both halves are the whole distribution
    # A point mass on x is accepted with 0.62: worse than either here.
    assert overlap(CHAIN, jnp.asarray([1.0, 0.0])).mean() == pytest.approx(0.62)


def test_a_point_mass_may_beat_the_marginal():
    # Half of the paths are certain of token 0, the others of a token each.
    p = jnp.eye(5)[jnp.asarray([0, 1, 0, 2, 0, 3, 0, 4])]
    assert marginal_oracle(p).in_sample == pytest.approx((0.5 + 0.125) / 2)
    assert overlap(p, jnp.eye(5)[0]).mean() == 0.5
    np.testing.assert_allclose(best_draft(p), jnp.eye(5)[0], atol=1e-6)
    assert best_oracle(p).in_sample == pytest.approx(0.5)


@pytest.mark.parametrize("concentration", [0.05, 0.5, 5.0])
def test_no_draft_is_better_than_the_best(concentration):
    samples, vocab = 6, 9
    random = np.random.default_rng(0)
    p = random.dirichlet([concentration] * vocab, samples)
    # Variables q [V], then t [N, V] with t <= p and t <= q; the mean of t is acceptance.
    rows = np.concatenate([np.tile(-np.eye(vocab), (samples, 1)), np.eye(samples * vocab)], axis=1)
    solved = linprog(
        np.concatenate([np.zeros(vocab), np.full(samples * vocab, -1 / samples)]),
        A_ub=rows,
        b_ub=np.zeros(samples * vocab),
        A_eq=np.concatenate([np.ones(vocab), np.zeros(samples * vocab)])[None],
        b_eq=[1.0],
        bounds=[(0, 1)] * vocab + [(0, x) for x in p.reshape(-1)],
    )
    q = best_draft(jnp.asarray(p, jnp.float32))
    assert q.sum() == pytest.approx(1, abs=1e-5)
    assert q.min() >= 0
    assert best_oracle(jnp.asarray(p, jnp.float32)).in_sample == pytest.approx(
        -solved.fun, abs=1e-5
    )


def test_certain_and_equal_conditionals_are_always_accepted():
    for row in ([1.0, 0.0, 0.0], [0.2, 0.3, 0.5]):
        p = jnp.broadcast_to(jnp.asarray(row), (4, 3))
        for bracket in (marginal_oracle(p), best_oracle(p)):
            assert bracket.held_out == pytest.approx(1, abs=1e-6)
            assert bracket.in_sample == pytest.approx(1, abs=1e-6)


def test_brackets_hold_the_truth_of_a_known_population():
    random = np.random.default_rng(1)
    population = random.dirichlet([0.2] * 12, 16).astype(np.float32)
    marginal = np.minimum(population, population.mean(0)).sum(-1).mean()
    best = float(overlap(population, best_draft(jnp.asarray(population))).mean())
    groups = jnp.asarray(population[random.integers(16, size=(400, 8))])
    a, b = jax.vmap(lambda p: (marginal_oracle(p), best_oracle(p)))(groups)
    found = [a.held_out, a.in_sample, b.held_out, b.in_sample]
    low, high, best_low, best_high = (float(x.mean()) for x in found)
    # Far apart for eight samples, so that exchanged sides or a leak between halves would show.
    assert low + 0.01 < marginal < high - 0.01
    assert best_low + 0.01 < best < best_high - 0.01


def test_refuses_samples_that_do_not_suffice():
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        marginal_oracle(jnp.ones((1, 3)) / 3)
    with pytest.raises(ValueError, match="even number of samples, got 3"):
        best_oracle(jnp.ones((3, 3)) / 3)
