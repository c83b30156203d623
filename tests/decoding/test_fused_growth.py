"""Growth from folded tables gives the trees, and decoding the tokens, of the plain modules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.round import speculate
from tfm_jax.decoding.state import Trio
from tfm_jax.model import Model
from tfm_jax.models.weaver import Weaver

SHAPE = TreeConfig(budget=11, expand=3, children=5, pool=16)


def fused(trio: Trio) -> Trio:
    verifier = trio.verifier
    embeddings = verifier.embed_tokens.weight[...]
    growth = trio.weaver.growth_weights(embeddings, verifier.output_rows)
    return dataclasses.replace(trio, growth=growth)


@pytest.fixture(scope="module")
def rotary(tiny_trio) -> Trio:
    config = dataclasses.replace(tiny_trio.weaver.config, variant="rope_swiglu", num_layers=2)
    weaver = Weaver(config, rngs=nnx.Rngs(5))
    weaver.lm_head_query_in.weight[...] = 0.3 * jax.random.normal(jax.random.key(0), (40, 32))
    return dataclasses.replace(tiny_trio, weaver=weaver)


@pytest.mark.parametrize("variant", ["learned", pytest.param("rotary", marks=pytest.mark.slow)])
def test_trees_are_those_of_the_module(tiny_trio, rotary, prompt, variant):
    trio = tiny_trio if variant == "learned" else rotary
    states = Model(trio=trio, tokenizer=None, end_tokens=()).rounds(
        prompt, max_new_tokens=20, method="tfm", tree=SHAPE
    )
    *_, state = next(states)
    run = Model(trio=trio, tokenizer=None, end_tokens=())._prepare(
        prompt, 20, "tfm", SHAPE, Sampling(temperature=0.7), None
    )
    round_ = jax.jit(speculate, static_argnums=(3, 4))
    _, plain, _ = round_(trio, state, run.request, "tfm", SHAPE)
    _, folded, _ = round_(fused(trio), state, run.request, "tfm", SHAPE)
    for name in ("token", "parent", "depth", "rank", "valid"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(folded, name), name)
    np.testing.assert_allclose(plain.score, folded.score, atol=1e-4)


def test_tokens_are_those_of_plain_decoding(tiny_trio, prompt):
    model = Model(trio=fused(tiny_trio), tokenizer=None, end_tokens=())
    plain = model.generate(prompt, max_new_tokens=24, method="ar")
    drafted = model.generate(prompt, max_new_tokens=24, method="tfm", tree=SHAPE)
    assert drafted.tokens == plain.tokens


def test_tables_are_folded_a_part_at_a_time(tiny_trio, monkeypatch):
    monkeypatch.setattr("tfm_jax.models.weaver._FOLDED", 32)
    verifier, weaver = tiny_trio.verifier, tiny_trio.weaver
    rows = verifier.embed_tokens.weight[...]
    growth = weaver.growth_weights(rows, verifier.output_rows)
    inputs = weaver.token_in(weaver.embed_norm(rows))
    np.testing.assert_allclose(growth.table, inputs, atol=1e-5)
    head = jnp.asarray(
        np.float64(verifier.output_rows) @ np.float64(weaver.lm_head_query_in.weight)
    )
    np.testing.assert_allclose(growth.head, head, atol=1e-4)
