"""Shared small models. Sizes differ from each other so that a swapped axis cannot hide."""

from __future__ import annotations

import dataclasses
import json
import os
from importlib import metadata
from pathlib import Path

# Most of the suite's time is compilation; on a CPU tests need right numbers, not fast programs.
if not Path("/dev/nvidia0").exists():
    flags = ["--xla_backend_optimization_level=0"]
    if metadata.version("jaxlib") < "0.11":  # the option is gone since
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfm_jax.checkpoints import module_params, write_hf
from tfm_jax.config import DrafterConfig, VerifierConfig, WeaverConfig
from tfm_jax.decoding.state import Trio
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.models.weaver import Weaver

FIXTURES = Path(__file__).parent / "fixtures"

VERIFIER = VerifierConfig(
    vocab_size=83,
    hidden_size=40,
    intermediate_size=56,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    max_position_embeddings=400,
    eos_token_ids=(5,),
)
DRAFTER = DrafterConfig(
    hidden_size=40,
    intermediate_size=48,
    layer_types=("sliding_attention", "full_attention"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    target_layer_ids=(0, 2),
    num_target_layers=3,
    mask_token_id=82,
    vocab_size=83,
    block_size=8,
    sliding_window=9,
)
WEAVER = WeaverConfig(
    d_model=40,
    d_embed=40,
    d_rank=32,
    num_heads=4,
    mlp_dim=24,
    depth=7,
    candidate_pool_size=16,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def livelier(module: nnx.Module, seed: int) -> nnx.Module:
    """The module with noise on every parameter, so that no norm or projection is trivial."""
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [
        leaf + 0.2 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, noisy))


@pytest.fixture(scope="session")
def tiny_trio() -> Trio:
    """A random verifier, drafter and Weaver that belong together, float32."""
    return Trio(
        verifier=livelier(Verifier(VERIFIER, rngs=nnx.Rngs(1)), 1),
        drafter=livelier(Drafter(DRAFTER, rngs=nnx.Rngs(2)), 2),
        weaver=livelier(Weaver(WEAVER, rngs=nnx.Rngs(3)), 3),
    )


def write_trio(trio: Trio, folder: Path) -> None:
    """Writes all three networks into a folder, in their published layouts."""
    networks = {"verifier": trio.verifier, "dflash": trio.drafter, "weaver": trio.weaver}
    for name, network in networks.items():
        assert network is not None
        write_hf(folder / name, network.config, module_params(network))


@pytest.fixture(scope="session")
def tiny_preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSON file with the sizes of `tiny_trio`."""
    parts = {"verifier": VERIFIER, "drafter": DRAFTER, "weaver": WEAVER}
    path = tmp_path_factory.mktemp("presets") / "tiny.json"
    path.write_text(json.dumps({name: dataclasses.asdict(part) for name, part in parts.items()}))
    return path


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of golden arrays made by independent implementations."""
    return FIXTURES


@pytest.fixture(scope="session")
def prompt() -> np.ndarray:
    return np.random.default_rng(7).integers(6, 80, 29).astype(np.int32)


def worst(a, b) -> float:
    """Largest absolute difference."""
    return float(jnp.max(jnp.abs(jnp.asarray(a, jnp.float32) - jnp.asarray(b, jnp.float32))))
