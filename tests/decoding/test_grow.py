"""Trees equal the golden ones of independent oracles, bit for bit."""

from __future__ import annotations

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.config import TreeConfig
from tfm_jax.decoding.ddtree import _list_paths, count_paths, ddtree
from tfm_jax.decoding.grow import Expansion, chain, grow, marginal_scorer, slots

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


@pytest.fixture(params=["list", "levels"])
def both_ways(request, monkeypatch):
    """Trees chosen from one list, and level by level as larger budgets are."""
    if request.param == "levels":
        monkeypatch.setattr("tfm_jax.decoding.ddtree._LONGEST_LIST", 0)


@pytest.mark.parametrize("name", SETS + TIES)
def test_ddtree_equals_its_own_rule(fixtures, name, both_ways):
    golden = np.load(fixtures / "tree_rules" / f"build_{name}.npz")
    ids = jnp.asarray(golden["pool_ids"])
    marginal = jnp.where(ids >= 0, golden["marginal_logp"], -jnp.inf)
    for row, budget in enumerate(golden["ddtree_budget"]):
        tree = build_ddtree(golden["root_token"], ids, marginal, int(budget))
        assert_equal(tree, golden, "ddtree", row, int(budget))


def build_ddtree(root, ids, logprobs, budget: int):
    # A new function each time: how the tree is chosen is no argument of it.
    return jax.jit(lambda *args: ddtree(*args, budget))(root, ids, logprobs)


def search(logprobs: np.ndarray, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """The best (score, ranks) by search from a heap, each path offering its children and itself."""
    order = np.argsort(-logprobs, axis=1, kind="stable")
    sorted_ = np.take_along_axis(logprobs, order, axis=1)

    def score(places: tuple[int, ...]) -> np.float32:
        return functools.reduce(lambda s, x: s + x, sorted_[range(len(places)), places])

    heap, found = [(-score((0,)), (0,))], []
    while heap and len(found) < budget:
        negative, places = heapq.heappop(heap)
        found.append((-negative, tuple(int(order[d, c]) for d, c in enumerate(places))))
        further = [(*places[:-1], places[-1] + 1)] if places[-1] + 1 < logprobs.shape[1] else []
        if len(places) < len(logprobs):
            further.append((*places, 0))
        for path in further:
            if score(path) > -np.inf:
                heapq.heappush(heap, (-score(path), path))
    return found


@pytest.mark.parametrize(
    ("depth", "pool", "budget", "step"),
    [(15, 40, 64, 0), (15, 40, 64, 0.25), (4, 300, 100, 0.5), (3, 2, 64, 0), (1, 5, 3, 1)],
)
def test_ddtree_equals_a_search(both_ways, depth, pool, budget, step):
    """Candidates in any order, as noise leaves them, some absent, some equally probable."""
    rng = np.random.default_rng(depth)
    logprobs = -rng.exponential(1.5, (depth, pool)).astype(np.float32)
    if step:  # sums are exact then, and tie
        logprobs = -step * np.round(-logprobs / step)
    logprobs[:, pool // 2] = -np.inf
    ids = rng.permutation(depth * pool).astype(np.int32).reshape(depth, pool)
    tree = arrays(build_ddtree(jnp.int32(7), jnp.asarray(ids), jnp.asarray(logprobs), budget))
    expected = search(logprobs, budget)
    assert int(tree["valid"].sum()) == 1 + len(expected)
    for row, (score, ranks) in enumerate(expected, start=1):
        path, at = [], row
        while at > 0:
            path.append(int(tree["ranks"][at]))
            at = tree["parents"][at]
        assert tuple(path[::-1]) == ranks
        assert tree["scores"][row] == score
        assert tree["depths"][row] == len(ranks)
        assert tree["tokens"][row] == ids[len(ranks) - 1, ranks[-1]]
        assert tree["logprobs"][row] == logprobs[len(ranks) - 1, ranks[-1]]


def test_the_list_of_paths_is_counted_without_making_it():
    for budget, depth, children in ((1, 3, 1), (31, 7, 31), (64, 15, 12)):
        paths = _list_paths(budget, depth, children)
        assert count_paths(budget, depth, children) == len(paths.last)
        names = [tuple(paths.places[:d, i]) for i, d in enumerate(paths.depth)]
        assert names == sorted(set(names))


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
