"""Networks that were not made for each other are refused with both values."""

import dataclasses
import json

import pytest

from tfm_jax.checkpoints import CheckpointError, check_pair
from tfm_jax.config import DrafterConfig, VerifierConfig, WeaverConfig


@pytest.fixture
def configs(fixtures):
    def read(path):
        return json.loads((fixtures / path).read_text())

    verifier = VerifierConfig.from_hf(read("qwen36_tiny/hub_f32/config.json"))
    drafter = dataclasses.replace(
        DrafterConfig.from_hf(read("dflash_tiny/config.json")),
        num_target_layers=8,
        target_layer_ids=(1, 3, 7),
    )
    weaver = WeaverConfig.from_published(
        read("weaver_tiny/rope_swiglu/config.json"), keys={"blocks.0.gate_up_proj.weight"}
    )
    return verifier, drafter, weaver


def test_a_matching_trio_passes(configs):
    verifier, drafter, weaver = configs
    check_pair(verifier)
    check_pair(verifier, drafter)
    check_pair(verifier, drafter, weaver)
    check_pair(verifier, drafter, dataclasses.replace(weaver, depth=5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, the verifier's hidden_size is 64"),
        ({"vocab_size": 500}, "vocab_size is 500, the verifier's vocab_size is 512"),
        (
            {"num_target_layers": 12},
            "num_target_layers is 12, the verifier's num_hidden_layers is 8",
        ),
        (
            {"num_target_layers": 12, "target_layer_ids": (1, 8, 11)},
            "target_layer_ids [8, 11] lie outside the verifier's layers 0..7",
        ),
        ({"mask_token_id": 512}, "mask_token_id 512 is no row of the verifier's embedding of 512"),
    ],
)
def test_a_drafter_of_another_verifier(configs, changes, message):
    verifier, drafter, _ = configs
    with pytest.raises(CheckpointError) as caught:
        check_pair(verifier, dataclasses.replace(drafter, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 32}, "d_model is 32, the verifier's hidden_size is 64"),
        ({"d_embed": 16}, "d_embed is 16, the verifier's hidden_size is 64"),
        ({"depth": 8}, "depth K is 8, the drafter's block of 8 drafts only 7 positions"),
    ],
)
def test_a_weaver_of_another_pair(configs, changes, message):
    verifier, drafter, weaver = configs
    with pytest.raises(CheckpointError) as caught:
        check_pair(verifier, drafter, dataclasses.replace(weaver, **changes))
    assert message in str(caught.value)


def test_a_weaver_needs_a_drafter(configs):
    verifier, _, weaver = configs
    with pytest.raises(CheckpointError, match="there is no drafter"):
        check_pair(verifier, None, weaver)


def test_all_mismatches_are_in_one_message(configs):
    verifier, drafter, weaver = configs
    with pytest.raises(CheckpointError, match=r"3 problems: .*hidden_size.*mask_token.*d_model"):
        check_pair(
            verifier,
            dataclasses.replace(drafter, hidden_size=32, mask_token_id=600),
            dataclasses.replace(weaver, d_model=32),
        )
