"""Trees equal the golden ones of independent oracles, bit for bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.config import TreeConfig
from tfm_jax.decoding.grow import Expansion, chain, ddtree, grow, marginal_scorer, slots

SETS = ("flat_d7", "generic_d15", "generic_d7", "narrow_d15", "padded_d7", "peaked_d15")
TIES = ("peaked_d7", "ties_d15", "ties_d7")
FIELDS = ("tokens", "parents", "depths", "scores", "logprobs", "ranks", "valid")


def arrays(tree) -> dict[str, np.ndarray]:
    names = ("token", "parent", "depth", "score", "logprob", "rank", "valid")
    return {
        field: np.asarray(getattr(tree, name)) for field, name in zip(FIELDS, names, strict=True)
    }


def assert_equal(tree, golden, prefix: str, row: int, budget: int) -> None:
    for field, ours in arrays(tree).items():
        if f"{prefix}_{field}" not in golden:  # the ddtree oracle has no ranks
            continue
        theirs = golden[f"{prefix}_{field}"][row][: budget + 1]
        np.testing.assert_array_equal(ours, theirs, err_msg=f"{prefix} row {row} {field}")


def path_scorer(logp: jax.Array):
    """Scores by (depth, state), where the state depends on the whole path from the root."""
    states = logp.shape[1]

    def score(memory: jax.Array, nodes: Expansion):
        below = (31 * memory[jnp.maximum(nodes.parent, 0)] + nodes.token + 7) % states
        state = jnp.where(nodes.parent < 0, nodes.token % states, below)
        memory = jax.lax.dynamic_update_slice_in_dim(memory, state, nodes.start, 0)
        return memory, logp[nodes.depth, state]

    return score


@pytest.mark.parametrize("name", SETS + TIES)
@pytest.mark.parametrize("kind", ["tfm", "marginal"])
def test_growth_equals_the_oracle(fixtures, name, kind):
    golden = np.load(fixtures / "tree_rules" / f"build_{name}.npz")
    ids, root = golden["pool_ids"], golden["root_token"]
    # A candidate that does not exist has no probability.
    conditional = jnp.where(ids[:, None] >= 0, golden["conditional_logp"], -jnp.inf)
    marginal = jnp.where(ids >= 0, golden["marginal_logp"], -jnp.inf)

    @functools.partial(jax.jit, static_argnums=0)
    def build(shape):
        if kind == "marginal":
            return grow(root, jnp.asarray(ids), marginal_scorer(marginal), None, shape)
        memory = jnp.zeros((slots(shape),), jnp.int32)
        return grow(root, jnp.asarray(ids), path_scorer(conditional), memory, shape)

    cases = list(zip(golden["combo_width"], golden["combo_budget"], strict=True))
    for row, (width, budget) in list(enumerate(cases))[:: 2 if name in TIES else 4]:
        shape = TreeConfig(
            budget=int(budget), expand=int(width), children=int(golden["children"]), pool=4096
        )
        assert_equal(build(shape), golden, kind, row, int(budget))


@pytest.mark.parametrize("name", SETS + TIES)
def test_ddtree_equals_its_own_rule(fixtures, name):
    golden = np.load(fixtures / "tree_rules" / f"build_{name}.npz")
    ids = jnp.asarray(golden["pool_ids"])
    marginal = jnp.where(ids >= 0, golden["marginal_logp"], -jnp.inf)
    for row, budget in enumerate(golden["ddtree_budget"]):
        tree = jax.jit(ddtree, static_argnums=3)(golden["root_token"], ids, marginal, int(budget))
        assert_equal(tree, golden, "ddtree", row, int(budget))


def test_chain_is_the_best_token_of_each_depth():
    logp = jnp.log(jnp.asarray([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2], [0.1, 0.2, 0.7]]))
    ids = jnp.asarray([[4, 5, 6], [7, 8, 9], [1, 2, 3]])
    tree = chain(jnp.int32(11), ids, logp, 2)
    assert np.asarray(tree.token).tolist() == [11, 5, 7]
    assert np.asarray(tree.parent).tolist() == [-1, 0, 1]
    np.testing.assert_allclose(tree.score, [0, np.log(0.5), np.log(0.5) + np.log(0.4)], rtol=1e-6)
    assert chain(jnp.int32(11), ids, logp, 64).rows == 4


def test_ddtree_refuses_a_pool_its_sort_key_cannot_hold():
    with pytest.raises(ValueError, match="at most 32767"):
        ddtree(jnp.int32(0), jnp.zeros((1, 40000), jnp.int32), jnp.zeros((1, 40000)), 4)
