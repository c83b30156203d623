"""The Weaver against golden arrays of both published variants, and what a node may see."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tfm_jax.config import WeaverConfig
from tfm_jax.models.weaver import Weaver, WeaverBlock, WeaverMemory, pool_logits

FIXTURE = Path(__file__).parents[1] / "fixtures" / "weaver_tiny"
WEIGHTS = {
    "learned_gelu": "learned_gelu/weaver_fused_qkv.safetensors",
    "rope_swiglu": "rope_swiglu/weaver.safetensors",
}
LOGITS, EXACT_PARTS = 1e-4, 2e-5
node_step = jax.jit(Weaver.node_step)


def assign(module: nnx.Module, tensors: dict[str, np.ndarray]) -> None:
    for name, tensor in tensors.items():
        target = module
        for part in name.split("."):
            target = target[int(part)] if part.isdigit() else getattr(target, part)
        assert target.get_value().shape == tensor.shape, name
        target.set_value(jnp.asarray(tensor))


def make_weaver(variant: str, **changes) -> Weaver:
    tensors = load_file(FIXTURE / WEIGHTS[variant])
    published = json.loads((FIXTURE / variant / "config.json").read_text())
    config = WeaverConfig.from_published(published, keys=set(tensors))
    config = dataclasses.replace(config, **changes)
    weaver = nnx.eval_shape(lambda: Weaver(config, rngs=nnx.Rngs(0)))
    assign(weaver, tensors)
    return weaver


@pytest.fixture(scope="module", params=list(WEIGHTS))
def variant(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def weaver(variant) -> Weaver:
    return make_weaver(variant)


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / "inputs.npz"))


@pytest.fixture(scope="module")
def golden(variant) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / variant / "golden.npz"))


@pytest.fixture(scope="module")
def ancestors(inputs) -> np.ndarray:
    mask = np.eye(12, dtype=bool)
    for node, parent in enumerate(inputs["tree_parents"]):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def root_memory(weaver: Weaver, inputs) -> WeaverMemory:
    return weaver.prefix(
        jnp.asarray(inputs["verifier_hidden"][0]), jnp.asarray(inputs["drafter_hidden"][0]), 12
    )


def whole_tree(weaver: Weaver, inputs, ancestors) -> tuple[WeaverMemory, jax.Array]:
    embeddings = inputs["embed_tokens"][inputs["tree_tokens"]]
    memory = root_memory(weaver, inputs)
    return node_step(weaver, memory, embeddings, inputs["tree_depths"], 0, ancestors)


def logits_of(query, inputs, ids, prior) -> jax.Array:
    return pool_logits(query, jnp.asarray(prior), jnp.asarray(inputs["lm_head"])[ids])


def close(got, expected, tolerance: float, name: str = "") -> None:
    np.testing.assert_allclose(got, expected, atol=tolerance, rtol=0, err_msg=name)


def test_tree_equals_the_golden_arrays(weaver, inputs, golden, ancestors, monkeypatch):
    outputs: list[jax.Array] = []
    block_call = WeaverBlock.__call__

    def recording(block, *args):
        outputs.append(block_call(block, *args))
        return outputs[-1]

    embeddings = inputs["embed_tokens"][inputs["tree_tokens"]]
    hidden = jnp.asarray(inputs["verifier_hidden"][0]), jnp.asarray(inputs["drafter_hidden"][0])
    depths = jnp.asarray(inputs["tree_depths"])
    memory = root_memory(weaver, inputs)
    monkeypatch.setattr(WeaverBlock, "__call__", recording)

    @jax.jit
    def step(weaver, memory):
        memory, query = weaver.node_step(memory, embeddings, depths, 0, ancestors)
        return memory, query, outputs[-1]

    memory, query, out = step(weaver, memory)
    close(weaver.prefix_input(*hidden), golden["prefix_x"], EXACT_PARTS, "prefix_x")
    close(weaver.node_input(embeddings, depths), golden["node_x"], EXACT_PARTS, "node_x")
    for name in ("key", "value"):
        rows = np.stack(getattr(memory, name)).swapaxes(1, 2)
        close(rows[:, :8], golden[f"prefix_{name}s"], EXACT_PARTS, f"prefix_{name}s")
        close(rows[:, 8:], golden[f"node_{name}s"], EXACT_PARTS, f"node_{name}s")
    close(out, golden["node_out"], LOGITS, "node_out")
    close(query, golden["node_query"], LOGITS, "node_query")


def test_pool_logits_equal_the_golden_arrays(weaver, inputs, golden, ancestors):
    _, query = whole_tree(weaver, inputs, ancestors)
    depths = inputs["tree_depths"]
    ids, prior = inputs["pool_ids"][0][depths], inputs["pool_prior"][0][depths]
    residual = logits_of(query, inputs, ids, np.zeros_like(prior))
    logits = logits_of(query, inputs, ids, prior)
    close(residual, golden["node_residual"], LOGITS)
    close(logits, golden["node_logits"], LOGITS)
    close(logits, golden["author_node_logits"], LOGITS)
    close(jax.nn.log_softmax(logits), golden["node_logprobs"], LOGITS)


def test_padded_candidates_get_minus_infinity(weaver, inputs, golden, ancestors):
    _, query = whole_tree(weaver, inputs, ancestors)
    depths = inputs["tree_depths"]
    ids, prior = inputs["masked_pool_ids"][depths], inputs["masked_pool_prior"][depths]
    expected = golden["masked_node_logits"]
    assert np.isneginf(expected).sum() == 24
    close(logits_of(query, inputs, ids, prior), expected, LOGITS)
    head_rows = jnp.asarray(inputs["lm_head"])[ids]
    for bad in (jnp.nan, jnp.inf):
        spoilt = jnp.where(jnp.isfinite(prior), prior, bad)
        close(pool_logits(query, spoilt, head_rows), expected, LOGITS)


def test_bfloat16_matrices_are_accumulated_in_float32(weaver, inputs, golden, ancestors):
    _, query = whole_tree(weaver, inputs, ancestors)
    depths = inputs["tree_depths"]
    prior = jnp.asarray(inputs["pool_prior"][0][depths])
    head_rows = jnp.asarray(inputs["lm_head"], jnp.bfloat16)[inputs["pool_ids"][0][depths]]
    logits = pool_logits(query, prior, head_rows)
    assert logits.dtype == jnp.float32
    rounded = query.astype(jnp.bfloat16).astype(jnp.float32)
    exact = jnp.einsum("wd,wpd->wp", rounded, head_rows.astype(jnp.float32)) + prior
    close(logits, exact, 1e-5)
    # The authors' module returns the product in bfloat16: at most one step of 2^-8 apart.
    step = 2.0**-8 * np.abs(golden["node_residual"]) + 1e-3
    assert np.all(np.abs(logits - golden["author_node_logits_bf16"]) <= step)


def test_gelu_is_a_switch(inputs, ancestors):
    golden = dict(np.load(FIXTURE / "learned_gelu" / "golden.npz"))
    depths = inputs["tree_depths"]
    _, query = whole_tree(make_weaver("learned_gelu", gelu="erf"), inputs, ancestors)
    logits = logits_of(
        query, inputs, inputs["pool_ids"][0][depths], inputs["pool_prior"][0][depths]
    )
    assert np.abs(golden["node_logits_erf"] - golden["node_logits"]).max() > 2 * LOGITS
    close(logits, golden["node_logits_erf"], LOGITS)


def test_growing_in_rounds_equals_the_whole_tree_at_once(weaver, inputs, ancestors):
    expected_memory, expected = whole_tree(weaver, inputs, ancestors)
    memory = root_memory(weaver, inputs)
    embeddings = inputs["embed_tokens"][inputs["tree_tokens"]]
    for start in range(0, 12, 3):
        nodes = slice(start, start + 3)
        memory, query = node_step(
            weaver, memory, embeddings[nodes], inputs["tree_depths"][nodes], start, ancestors[nodes]
        )
        close(query, expected[nodes], 1e-5)
    jax.tree.map(lambda got, want: close(got, want, 1e-5), memory, expected_memory)


def test_a_node_sees_its_ancestors_only(weaver, inputs, ancestors):
    _, before = whole_tree(weaver, inputs, ancestors)
    for node in (0, 4, 7):
        changed = dict(inputs, tree_tokens=inputs["tree_tokens"].copy())
        changed["tree_tokens"][node] = (changed["tree_tokens"][node] + 1) % 512
        _, after = whole_tree(weaver, changed, ancestors)
        moved = np.asarray(jnp.any(before != after, axis=-1))
        np.testing.assert_array_equal(moved, ancestors[:, node])


def test_nodes_below_the_depth_limit_are_clipped_to_it(weaver, inputs, ancestors):
    deep = dict(inputs, tree_depths=np.full(12, 6, np.int32))
    deeper = dict(inputs, tree_depths=np.full(12, 9, np.int32))
    queries = [whole_tree(weaver, x, ancestors)[1] for x in (deep, deeper)]
    np.testing.assert_array_equal(*queries)


def test_chain_equals_the_golden_logits_and_the_node_step(weaver, inputs, golden):
    tokens = np.concatenate([inputs["root_token"][:, None], inputs["true_tokens"][:, :-1]], axis=1)
    embeddings = jnp.asarray(inputs["embed_tokens"])[tokens]
    hidden = jnp.asarray(inputs["verifier_hidden"]), jnp.asarray(inputs["drafter_hidden"])
    chain = jax.jit(lambda weaver, *args: jax.vmap(weaver.chain)(*args))
    query = chain(weaver, *hidden, embeddings)
    prior = inputs["pool_prior"]
    logits = jax.vmap(pool_logits)(query, prior, jnp.asarray(inputs["lm_head"])[inputs["pool_ids"]])
    close(logits, golden["chain_logits"], LOGITS)

    memory = weaver.prefix(hidden[0][1], hidden[1][1], 7)
    lower = np.tri(7, dtype=bool)
    for depth in range(7):
        rows = slice(depth, depth + 1)
        memory, one = node_step(
            weaver, memory, embeddings[1, rows], np.full(1, depth, np.int32), depth, lower[rows]
        )
        close(one[0], query[1, depth], 1e-5)


def test_an_untrained_weaver_gives_the_marginals_and_learns_from_its_query_first(inputs):
    weaver = Weaver(make_weaver("learned_gelu").config, rngs=nnx.Rngs(1))
    embeddings = jnp.asarray(inputs["embed_tokens"])[inputs["true_tokens"][0]]
    hidden = jnp.asarray(inputs["verifier_hidden"][0]), jnp.asarray(inputs["drafter_hidden"][0])
    head_rows = jnp.asarray(inputs["lm_head"])[inputs["pool_ids"][0]]

    @jax.jit
    def gradient(weaver):
        def score(weaver):
            logits = pool_logits(
                weaver.chain(*hidden, embeddings), inputs["pool_prior"][0], head_rows
            )
            return jnp.sum(logits**2), logits

        return jax.grad(score, has_aux=True)(weaver)

    grads, logits = gradient(weaver)
    np.testing.assert_array_equal(logits, inputs["pool_prior"][0])
    assert jnp.any(grads.lm_head_query_in.weight[...] != 0)
    grads.lm_head_query_in.weight[...] = jnp.zeros_like(grads.lm_head_query_in.weight[...])
    assert all(not jnp.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("variant", "mlp_dim", "parameters"),
    [
        ("learned_gelu", 2048, 56_694_784),
        ("rope_swiglu", 2048, 60_860_416),
    ],
)
def test_the_27b_weaver_has_the_published_size(variant, mlp_dim, parameters):
    config = WeaverConfig(
        d_model=5120, d_embed=5120, d_rank=2048, num_heads=16, mlp_dim=mlp_dim, variant=variant
    )
    leaves = jax.tree.leaves(nnx.eval_shape(lambda: Weaver(config, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in leaves) == parameters


def test_float32_products_are_exact(weaver, inputs):
    def step(weaver, hidden, drafted, embeddings, head_rows):
        memory = weaver.prefix(hidden, drafted, 4)
        _, query = weaver.node_step(
            memory, embeddings, jnp.zeros(2, jnp.int32), 0, jnp.ones((2, 4), bool)
        )
        return pool_logits(query, jnp.zeros((2, 3)), head_rows)

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(64,), (7, 64), (2, 64), (2, 3, 64)]
    ]
    text = jax.jit(step).lower(weaver, *shapes).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_wrong_shapes_are_refused_before_compute(weaver):
    with pytest.raises(ValueError, match="verifier_hidden"):
        weaver.prefix(jnp.zeros(32), jnp.zeros((7, 64)), 4)
    with pytest.raises(ValueError, match="K at most 7"):
        weaver.prefix(jnp.zeros(64), jnp.zeros((8, 64)), 4)
    memory = weaver.prefix(jnp.zeros(64), jnp.zeros((7, 64)), 4)
    depths, see = jnp.zeros(2, jnp.int32), jnp.ones((2, 4), bool)
    with pytest.raises(ValueError, match="token embeddings"):
        weaver.node_step(memory, jnp.zeros((2, 32)), depths, 0, see)
    with pytest.raises(ValueError, match="ancestors"):
        weaver.node_step(memory, jnp.zeros((2, 64)), depths, 0, jnp.ones((2, 12), bool))
