"""Configurations hold values of the right kind and range, or name the entry that does not."""

from __future__ import annotations

import dataclasses
import fractions
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import DRAFTER, VERIFIER, WEAVER
from tfm_jax.config import (
    MAX_BUDGET,
    ConfigError,
    DrafterConfig,
    Sampling,
    TreeConfig,
    VerifierConfig,
    WeaverConfig,
)

FIXTURES = Path(__file__).parent / "fixtures"
VERIFIER_FILE = FIXTURES / "qwen36_tiny" / "text_f32" / "config.json"
DRAFTER_FILE = FIXTURES / "dflash_tiny" / "config.json"
WEAVER_FILE = FIXTURES / "weaver_tiny" / "learned_gelu" / "config.json"

NO_SIZES = ["4", None, -1, 0, 1.5, [], {}, True, 10**30]
NO_NUMBERS = ["4", None, -1, 0, [], True, float("nan"), float("inf"), 1e31, 10**400]
KINDS = {
    "size": NO_SIZES,
    "number": NO_NUMBERS,
    "epsilon": [*NO_NUMBERS, 1.5],
    "flag": ["4", 0, 1, [], {}],
    "list": ["4", 4, [], {}, [None], [[]], True],
    "object": ["4", 4, 0, [], True],
}
PUBLISHED = [
    ("verifier", "size", "vocab_size"),
    ("verifier", "size", "hidden_size"),
    ("verifier", "size", "num_attention_heads"),
    ("verifier", "size", "num_key_value_heads"),
    ("verifier", "size", "head_dim"),
    ("verifier", "size", "linear_conv_kernel_dim"),
    ("verifier", "size", "num_hidden_layers"),
    ("verifier", "size", "full_attention_interval"),
    ("verifier", "size", "max_position_embeddings"),
    ("verifier", "epsilon", "rms_norm_eps"),
    ("verifier", "flag", "tie_word_embeddings"),
    ("verifier", "list", "layer_types"),
    ("verifier", "object", "rope_parameters"),
    ("verifier", "object", "text_config"),
    ("drafter", "size", "hidden_size"),
    ("drafter", "size", "num_hidden_layers"),
    ("drafter", "size", "block_size"),
    ("drafter", "epsilon", "rms_norm_eps"),
    ("drafter", "flag", "is_causal"),
    ("drafter", "list", "layer_types"),
    ("drafter", "object", "dflash_config"),
    ("weaver", "size", "d_rank"),
    ("weaver", "size", "d_embed"),
    ("weaver", "size", "num_heads"),
    ("weaver", "size", "num_layers"),
    ("weaver", "size", "mlp_dim"),
    ("weaver", "size", "K"),
    ("weaver", "size", "candidate_pool_size"),
    ("weaver", "number", "rope_base"),
]
NESTED = [
    ("verifier", "rope_parameters", "number", "rope_theta"),
    ("verifier", "rope_parameters", "epsilon", "partial_rotary_factor"),
    ("drafter", "dflash_config", "list", "target_layer_ids"),
]


def read(network: str, config: dict):
    if network == "weaver":
        return WeaverConfig.from_published(config, keys={"pos_emb"})
    return {"verifier": VerifierConfig, "drafter": DrafterConfig}[network].from_hf(config)


def published(network: str) -> dict:
    files = {"verifier": VERIFIER_FILE, "drafter": DRAFTER_FILE, "weaver": WEAVER_FILE}
    return json.loads(files[network].read_text())


@pytest.mark.parametrize(("network", "kind", "key"), PUBLISHED)
def test_a_bad_entry_is_refused_by_its_name(network, kind, key):
    for value in KINDS[kind]:
        config = published(network) | {key: value}
        with pytest.raises(ConfigError, match=rf"^(\w+ configuration has no )?{key}( must be|$)"):
            read(network, config)


@pytest.mark.parametrize(("network", "section", "kind", "key"), NESTED)
def test_a_bad_nested_entry_is_refused_by_its_name(network, section, kind, key):
    for value in KINDS[kind]:
        config = published(network)
        config[section] = config.get(section, {}) | {key: value}
        with pytest.raises(ConfigError, match=f"^{key} must be"):
            read(network, config)


@pytest.mark.parametrize("network", ["verifier", "drafter", "weaver"])
def test_published_configurations_are_read(network):
    config = read(network, published(network))
    written = config.to_published() if network == "weaver" else config.to_hf()
    assert read(network, json.loads(json.dumps(written))) == config


@pytest.mark.parametrize("config", [VERIFIER, DRAFTER, WEAVER])
def test_every_number_and_flag_has_a_rule(config):
    for field in dataclasses.fields(config):
        if field.name not in ("variant", "gelu"):
            with pytest.raises(ConfigError, match=field.name):
                dataclasses.replace(config, **{field.name: object()})


def test_lists_and_numbers_of_other_libraries_are_taken():
    same = dataclasses.replace(
        VERIFIER,
        hidden_size=np.int64(VERIFIER.hidden_size),
        layer_types=list(VERIFIER.layer_types),
        eos_token_ids=[np.int32(5)],
        rope_theta=np.float64(VERIFIER.rope_theta),
    )
    assert same == VERIFIER
    assert hash(same) == hash(VERIFIER)
    assert type(same.hidden_size) is int


def test_a_width_without_rotation_is_refused():
    with pytest.raises(ConfigError, match=r"must be even and positive, got 24 \* 0\.01"):
        dataclasses.replace(VERIFIER, partial_rotary_factor=0.01)


@pytest.mark.parametrize("network", ["verifier", "drafter"])
@pytest.mark.parametrize(
    ("section", "entries", "message"),
    [
        ("rope_scaling", {"type": "yarn", "factor": 4}, "rope_scaling.type must be 'default'"),
        ("rope_scaling", {"rope_type": "yarn"}, "rope_scaling.rope_type must be 'default'"),
        ("rope_scaling", {"factor": 4.0}, "rope_scaling.factor is not supported, got 4.0"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_parameters.rope_type must be 'default'"),
        ("rope_parameters", {"factor": 64}, "rope_parameters.factor is not supported, got 64"),
    ],
)
def test_other_rotary_positions_are_refused_wherever_they_are_named(
    network, section, entries, message
):
    config = published(network)
    config[section] = (config.get(section) or {}) | entries
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(network, config)
    default = {"rope_type": "default", "type": "default", "factor": 1}
    config[section] |= default
    read(network, config)


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (VERIFIER, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2"),
        (DRAFTER, {"head_dim": 15}, "head_dim must be even, got 15"),
        (
            WEAVER,
            {"variant": "rope_swiglu", "d_rank": 27, "num_heads": 3},
            "must be of even size, got d_rank / num_heads = 27 / 3",
        ),
    ],
)
def test_sizes_that_no_layer_takes_are_refused(config, sizes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataclasses.replace(config, **sizes)


@pytest.mark.parametrize("budget", [MAX_BUDGET + 1, 1_000_000, 2**31])
def test_budgets_have_a_bound(budget):
    with pytest.raises(ConfigError, match=f"budget must be at most {MAX_BUDGET}, got {budget}"):
        TreeConfig(budget=budget)


def test_expand_and_children_are_bound_by_what_there_is():
    assert TreeConfig(budget=MAX_BUDGET, expand=2**31, children=2**31).expand == 2**31


@pytest.mark.parametrize("value", [np.float16("inf"), np.float32("nan"), 10**400])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_numbers_that_are_not_finite_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must"):
        Sampling(**{name: value})


def test_numbers_are_kept_as_floats():
    found = Sampling(temperature=np.float16(0.5), top_p=fractions.Fraction(1, 2))
    assert found == Sampling(temperature=0.5, top_p=0.5)
    assert type(found.temperature) is float
