"""The drafter against golden arrays of the reference package, and its masks and cache."""

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

from tfm_jax.config import FULL, SLIDING, DrafterConfig
from tfm_jax.models.dflash import (
    Drafter,
    DrafterCache,
    visible_block,
    visible_context,
)
from tfm_jax.models.layers import RMSNorm

FIXTURE = Path(__file__).parents[1] / "fixtures" / "dflash_tiny"
KINDS = {"full": ("config", "golden"), "sliding": ("config_sliding", "golden_sliding")}
TOLERANCE = 2e-4
CAPACITY = 64
extend = jax.jit(Drafter.extend)
draft = jax.jit(Drafter.__call__)
draft_blocks = jax.jit(Drafter.blocks)


def assign(module: nnx.Module, tensors: dict[str, np.ndarray]) -> None:
    for name, tensor in tensors.items():
        target = module
        for part in name.split("."):
            target = target[int(part)] if part.isdigit() else getattr(target, part)
        assert target.get_value().shape == tensor.shape, name
        target.set_value(jnp.asarray(tensor, jnp.float32))


def read_config(kind: str) -> DrafterConfig:
    return DrafterConfig.from_hf(json.loads((FIXTURE / f"{KINDS[kind][0]}.json").read_text()))


def make_drafter(config: DrafterConfig) -> Drafter:
    drafter = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))
    assign(drafter, load_file(FIXTURE / "model.safetensors"))
    return drafter


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=["published", "serving"])
def drafter(kind, request) -> Drafter:
    drafter = make_drafter(read_config(kind))
    if request.param == "serving":
        drafter.stack()
    return drafter


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / "golden.npz"))


@pytest.fixture(scope="module")
def train() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURE / "train.npz"))


def spoilt_cache(drafter: Drafter) -> DrafterCache:
    cache = drafter.empty_cache(CAPACITY, jnp.float32)
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache)


def pad(features: np.ndarray) -> np.ndarray:
    """Up to 25 rows followed by NaN, so that every test shares one compilation."""
    rows = 25 - len(features)
    return np.pad(features, ((0, rows), (0, 0)), constant_values=np.nan)


def training_blocks(inputs, train) -> np.ndarray:
    ids = np.full((7, 8), 511)
    ids[:, 0] = train["input_ids"][0, train["anchors"][0]]
    ids[~train["block_keep"][0]] = 511
    return inputs["embed_tokens"][ids]


def test_four_drafts_equal_the_golden_arrays(kind, drafter, inputs, monkeypatch):
    golden = dict(np.load(FIXTURE / f"{KINDS[kind][1]}.npz"))
    outputs: list[jax.Array] = []
    after = RMSNorm.after

    def recording(norm, *args):
        outputs.append(after(norm, *args))
        return outputs[-1]

    monkeypatch.setattr(RMSNorm, "after", recording)

    @jax.jit
    def recorded_draft(drafter, block, cache, length):
        hidden = drafter(block, cache, length)
        return hidden, tuple(x for x, _ in outputs[1::2])  # every other sum ends a layer

    cache, length = spoilt_cache(drafter), 0
    for step in "abcd":
        features = inputs[f"target_hidden_{step}"][0]
        block = inputs["embed_tokens"][inputs[f"block_ids_{step}"][0]]
        cache = extend(drafter, cache, pad(features), length)
        length += len(features)
        assert length == inputs[f"position_ids_{step}"][0, len(features)]
        hidden, layers = recorded_draft(drafter, block, cache, length)
        logits = hidden @ inputs["lm_head"].T
        got = {
            "noise_embedding": block,
            "ctx": drafter.context(pad(features))[: len(features)],
            "hidden": hidden,
            "logits": logits,
        }
        for index, layer in enumerate(layers):
            kept = golden[f"cache_k{index}_{step}"].shape[2]
            got[f"layer{index}"] = layer
            got[f"cache_k{index}"] = cache.key[index][:, length - kept : length]
            got[f"cache_v{index}"] = cache.value[index][:, length - kept : length]
        for name, value in got.items():
            expected = golden[f"{name}_{step}"][0]
            np.testing.assert_allclose(value, expected, atol=TOLERANCE, rtol=0, err_msg=name)
        np.testing.assert_array_equal(logits[1:].argmax(-1), golden[f"draft_ids_{step}"][0])


def test_training_masks_and_hidden_states_equal_the_golden_arrays(kind, drafter, inputs, train):
    anchors, keep = jnp.asarray(train["anchors"][0]), jnp.asarray(train["block_keep"][0])
    layer = drafter.config.layer_types.index(FULL if kind == "full" else SLIDING)
    seen, own = drafter.block_masks(layer, 48, 8, anchors, keep)
    dense = np.zeros((7, 8, 7, 8), bool)
    dense[np.arange(7), :, np.arange(7), :] = own
    mask = np.concatenate([np.reshape(seen, (56, 48)), dense.reshape(56, 56)], axis=1)
    np.testing.assert_array_equal(mask, train[f"mask_{kind}"])

    features, blocks = jnp.asarray(train["target_hidden"][0]), training_blocks(inputs, train)
    hidden = draft_blocks(drafter, features, blocks, anchors, keep)
    np.testing.assert_allclose(hidden, train[f"hidden_{kind}"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("is_causal", [True, False])
def test_training_form_equals_the_cached_form(inputs, train, is_causal):
    drafter = make_drafter(dataclasses.replace(read_config("sliding"), is_causal=is_causal))
    features, blocks = jnp.asarray(train["target_hidden"][0]), training_blocks(inputs, train)
    anchors = np.asarray([0, 1, 7, 10, 11, 30, 48], np.int32)
    hidden = draft_blocks(drafter, features, blocks, anchors)
    cache = extend(drafter, spoilt_cache(drafter), features, 0)
    for row, anchor in enumerate(anchors):
        cached = draft(drafter, blocks[row], cache, anchor)
        np.testing.assert_allclose(hidden[row], cached, atol=1e-4, rtol=0)

    without_context = draft(drafter, blocks[0], spoilt_cache(drafter), 0)
    np.testing.assert_allclose(hidden[0], without_context, atol=1e-4, rtol=0)

    changed = blocks[0].copy()
    changed[-1] += 1.0
    same = draft(drafter, changed, cache, 0)[:-1] == draft(drafter, blocks[0], cache, 0)[:-1]
    assert bool(jnp.all(same)) == is_causal


def test_a_window_wider_than_the_cache_reads_all_of_it(inputs):
    drafter = make_drafter(dataclasses.replace(read_config("sliding"), sliding_window=16))
    features, block = inputs["target_hidden_a"][0], inputs["noise_embedding_a"][0]

    @jax.jit
    def draft_in(drafter, features, block):
        caches = [drafter.empty_cache(rows, jnp.float32) for rows in (12, CAPACITY)]
        return [drafter(block, drafter.extend(cache, features, 0), 12) for cache in caches]

    tight, wide = draft_in(drafter, features, block)
    np.testing.assert_allclose(tight, wide, atol=1e-5, rtol=0)


def test_the_serving_form_reads_the_context_by_one_product(inputs):
    drafter = make_drafter(read_config("full"))
    cache = drafter.empty_cache(CAPACITY, jnp.float32)

    def products() -> int:
        text = str(jax.make_jaxpr(Drafter.extend)(drafter, cache, inputs["target_hidden_a"][0], 0))
        return text.count("dot_general")

    layers = len(drafter.layers)
    assert products() == 1 + 2 * layers
    drafter.stack()
    assert products() == 2


def test_a_block_ignores_every_feature_from_its_anchor_on(drafter, inputs, train):
    features, blocks = train["target_hidden"][0], training_blocks(inputs, train)
    anchors = jnp.asarray([20, 22, 25, 20, 31, 40, 47], jnp.int32)
    changed = features.copy()
    changed[20:] *= -3.0
    keep = jnp.ones(7, bool)
    before, after = (
        draft_blocks(drafter, jnp.asarray(x), blocks, anchors, keep) for x in (features, changed)
    )
    np.testing.assert_array_equal(before[jnp.asarray([0, 3])], after[jnp.asarray([0, 3])])
    assert jnp.all(jnp.any(before[4:] != after[4:], axis=(1, 2)))


def test_rejected_rows_leave_no_trace_in_later_drafts(drafter, inputs):
    """A cache that took eight rows a round and kept few equals one made from the kept text."""
    kept = np.concatenate([inputs[f"target_hidden_{step}"][0] for step in "abcd"])
    block = inputs["embed_tokens"][inputs["block_ids_d"][0]]
    rng = np.random.default_rng(0)
    cache, length = extend(drafter, spoilt_cache(drafter), pad(kept[:12]), 0), 12
    for accepted in (1, 8, 3):
        rows = rng.normal(size=(8, kept.shape[1])).astype(np.float32)
        rows[:accepted] = kept[length : length + accepted]
        cache = extend(drafter, cache, pad(rows), length)
        length += accepted
        fresh = extend(drafter, spoilt_cache(drafter), pad(kept[:length]), 0)
        np.testing.assert_allclose(
            draft(drafter, block, cache, length),
            draft(drafter, block, fresh, length),
            atol=1e-5,
            rtol=0,
        )


@pytest.mark.parametrize("window", [None, 1, 3, 10])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_equal_their_definition(window, causal):
    anchor, size, positions = 9, 6, np.arange(4, 13)
    reach = 10**6 if window is None else window
    context = [[k < anchor and anchor + j - k < reach for k in positions] for j in range(size)]
    block = [
        [abs(j - k) < reach and (k <= j or not causal) for k in range(size)] for j in range(size)
    ]
    np.testing.assert_array_equal(
        visible_context(anchor, size, jnp.asarray(positions), window), context
    )
    np.testing.assert_array_equal(visible_block(size, causal=causal, window=window), block)


def test_float32_products_are_exact_and_bfloat16_stays_bfloat16():
    config = read_config("sliding")
    shapes = (
        jax.ShapeDtypeStruct((5, 192), jnp.float32),
        jax.ShapeDtypeStruct((8, 64), jnp.float32),
    )

    def draft(drafter, features, block):
        cache = drafter.empty_cache(40, block.dtype)
        return drafter(block, drafter.extend(cache, features, 0), 5)

    drafter = Drafter(config, rngs=nnx.Rngs(0))
    products = [
        line
        for line in jax.jit(draft).lower(drafter, *shapes).as_text().splitlines()
        if "dot_general" in line
    ]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
    half = Drafter(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    low = [jax.ShapeDtypeStruct(s.shape, jnp.bfloat16) for s in shapes]
    assert jax.eval_shape(draft, half, *low).dtype == jnp.bfloat16


def test_the_27b_drafter_has_the_published_tensors():
    config = DrafterConfig(
        hidden_size=5120,
        intermediate_size=17408,
        layer_types=(SLIDING,) * 4 + (FULL,),
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        mask_token_id=248070,
        vocab_size=248320,
        sliding_window=2048,
    )
    leaves = jax.tree.leaves(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    assert len(leaves) == 58
    assert sum(leaf.size for leaf in leaves) == 1_730_213_120


def test_wrong_shapes_are_refused_before_compute():
    drafter = Drafter(read_config("full"), rngs=nnx.Rngs(0))
    cache = drafter.empty_cache(4, jnp.float32)
    with pytest.raises(ValueError, match="192"):
        drafter.extend(cache, jnp.zeros((2, 128)), 0)
    with pytest.raises(ValueError, match="do not fit a cache of 4"):
        drafter.extend(cache, jnp.zeros((5, 192)), 0)
    with pytest.raises(ValueError, match="H = 64"):
        drafter(jnp.zeros((8, 32)), cache, 0)
    with pytest.raises(ValueError, match="capacity"):
        drafter.empty_cache(0, jnp.float32)
