"""Whole rounds lower for Hopper on a CPU, on the kernels and not on their XLA forms."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import choice
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.generate import run_rounds
from tfm_jax.decoding.prefill import append
from tfm_jax.decoding.state import empty_state, make_request, networks_for
from tfm_jax.model import random_model

SHAPE = TreeConfig(budget=16, expand=4, children=5, pool=16)
# Launches of one round of the tiny trio: two DeltaNet layers, one attention layer.
KERNELS = {
    "ar": (
        *("gdn_inputs", "gdn_tree_verify", "gdn_output"),
        *("attention_inputs", "tree_attention_splits", "tree_attention_join"),
        *("add_norm", "commit_linear", "commit_kv"),
    ),
    "dflash": ("top_k_maxima", "top_k_rank"),
    "tfm": ("weaver_take", "weaver_attend", "weaver_project", "weaver_score", "weaver_offer"),
}


@pytest.fixture(scope="module")
def trio(tiny_preset):
    trio = random_model(tiny_preset, dtype="bfloat16").trio
    embeddings = trio.verifier.embed_tokens.weight[...]
    growth = trio.weaver.growth_weights(embeddings, trio.verifier.output_rows)
    return dataclasses.replace(trio, growth=growth)


@pytest.fixture
def lower(monkeypatch):
    """Lowers a function as if an H200 were the default device."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")

    def lower(function, *args, **options) -> str:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(choice, "_unsupported_device", lambda platform: None)
        mesh = AbstractMesh((), (), abstract_device=device)
        with use_abstract_mesh(mesh), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
            traced = jax.jit(function, static_argnames=tuple(options)).trace(*args, **options)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    return lower


@pytest.mark.parametrize("method", KERNELS)
def test_a_round_runs_on_the_kernels(trio, lower, method):
    networks = networks_for(trio, method)
    state = empty_state(networks, 256)
    request = make_request(Sampling(), end_tokens=(), vocab_limit=83, total=200)
    text = lower(run_rounds, networks, state, request, jnp.int32(1), method=method, shape=SHAPE)
    assert all(name in text for name in KERNELS["ar"])
    assert all(name in text for name in KERNELS[method])


def test_a_block_runs_on_the_attention_kernels(trio, lower):
    """The drafter alone: the verifier has launches of the same names."""
    state = empty_state(networks_for(trio, "dflash"), 256)
    block = jnp.zeros((4, trio.drafter.config.hidden_size), jnp.bfloat16)
    call = lambda drafter, *args: drafter(*args)
    text = lower(call, trio.drafter, block, state.context, jnp.int32(5))
    assert all(name in text for name in ("attention_inputs", "tree_attention_splits"))


def test_a_prompt_runs_on_the_attention_kernel(trio, lower):
    networks = networks_for(trio, "dflash")
    state = empty_state(networks, 256)
    text = lower(append, networks, state, jnp.zeros(64, jnp.int32), jnp.int32(5))
    assert "tree_attention_splits" in text
