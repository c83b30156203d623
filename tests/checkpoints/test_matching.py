"""Every published tensor is used, skipped or refused; every parameter is given once."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tfm_jax.checkpoints import CheckpointError
from tfm_jax.checkpoints.opened import open_drafter, open_verifier, open_weaver

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.3.self_attn."


def refusal(directory, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_verifier(directory, **options)
    return str(caught.value)


def test_all_problems_are_in_one_message(verifier_dir, edit):
    def spoil(tensors):
        del tensors[LAYER + "k_norm.weight"]
        del tensors["model.layers.0.linear_attn.A_log"]
        tensors[LAYER + "q_proj.weight"] = tensors[LAYER + "q_proj.weight"][:-32]
        tensors["model.layers.8.mlp.up_proj.weight"] = np.zeros((128, 64), np.float32)
        tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"] = np.zeros((4, 4), np.float32)

    edit(verifier_dir / "model.safetensors", spoil)
    message = refusal(verifier_dir)
    for part in (
        str(verifier_dir),
        "4 problems",
        "layers.3.self_attn.k_norm.weight is missing",
        "layers.0.linear_attn.A_log is missing",
        LAYER + "q_proj.weight is [224, 64], expected [256, 64]",
        "no place for 2 tensors: model.layers.0.linear_attn.in_proj_qkvz.weight, "
        "model.layers.8.mlp.up_proj.weight",
    ):
        assert part in message


def test_unknown_tensors_are_listed_where_not_strict(verifier_dir, edit):
    edit(
        verifier_dir / "model.safetensors",
        lambda tensors: tensors.update({"model.extra": np.zeros(2, np.float32)}),
    )
    assert "no place for 1 tensors: model.extra" in refusal(verifier_dir)
    assert open_verifier(verifier_dir, strict=False).matched.unknown == ("model.extra",)


def test_a_missing_tensor_is_refused_even_if_not_strict(verifier_dir, edit):
    edit(verifier_dir / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    assert "norm.weight is missing" in refusal(verifier_dir, strict=False)


def test_a_tensor_under_both_prefixes_is_refused(verifier_dir, edit):
    edit(
        verifier_dir / "model.safetensors",
        lambda t: t.update({"model.language_model.norm.weight": t["model.norm.weight"]}),
    )
    message = refusal(verifier_dir)
    assert "model.language_model.norm.weight, model.norm.weight" in message


@pytest.mark.parametrize("shape", [(128, 4), (128, 4, 1)])
def test_convolution_must_have_the_published_axes(verifier_dir, edit, shape):
    name = "model.layers.1.linear_attn.conv1d.weight"
    edit(
        verifier_dir / "model.safetensors",
        lambda tensors: tensors.update({name: tensors[name].reshape(shape)}),
    )
    assert f"{name}: expected [C, 1, W], got {list(shape)}" in refusal(verifier_dir)


def test_integers_are_not_weights(verifier_dir, edit):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(
        verifier_dir / "model.safetensors",
        lambda tensors: tensors.update({name: tensors[name].astype(np.int8)}),
    )
    assert f"{name}: stored as int8" in refusal(verifier_dir)


def test_an_untied_model_needs_its_head(verifier_dir, edit):
    edit(verifier_dir / "model.safetensors", lambda tensors: tensors.pop(HEAD))
    assert "lm_head.weight is missing" in refusal(verifier_dir)


def test_a_tied_model_has_no_head_of_its_own(verifier_dir, edit):
    edit(verifier_dir / "config.json", lambda config: config.update(tie_word_embeddings=True))
    assert "tie_word_embeddings is true, but lm_head.weight differs" in refusal(verifier_dir)

    edit(verifier_dir / "model.safetensors", lambda t: t.update({HEAD: t[EMBEDDING]}))
    assert HEAD not in open_verifier(verifier_dir).load()

    edit(verifier_dir / "model.safetensors", lambda tensors: tensors.pop(HEAD))
    assert HEAD not in open_verifier(verifier_dir).load()


def test_a_drafter_with_the_wrong_number_of_features(drafter_dir, edit):
    edit(
        drafter_dir / "config.json",
        lambda config: config["dflash_config"].update(target_layer_ids=[1, 3]),
    )
    with pytest.raises(CheckpointError, match=r"fc\.weight is \[64, 192\], expected \[64, 128\]"):
        open_drafter(drafter_dir)


def test_a_weaver_with_both_variants_or_a_part_missing(fixtures, tmp_path, edit):
    from safetensors.numpy import save_file

    source = fixtures / "weaver_tiny" / "learned_gelu"
    tensors = load_file(source / "weaver.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    file = tmp_path / "model.safetensors"

    both = tensors | {"blocks.0.gate_up_proj.weight": np.zeros((96, 32), np.float32)}
    save_file(both, file)
    with pytest.raises(CheckpointError, match="this one has both"):
        open_weaver(tmp_path)

    save_file({k: v for k, v in tensors.items() if "k_proj" not in k}, file)
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight needs .* each of its parts once"):
        open_weaver(tmp_path)

    fused = {"blocks.0.qkv_proj.weight": np.zeros((96, 32), np.float32)}
    save_file(tensors | fused, file)
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight needs one tensor"):
        open_weaver(tmp_path)

    save_file(tensors, file)
    edit(tmp_path / "config.json", lambda config: config.update(K=9))
    with pytest.raises(CheckpointError, match=r"pos_emb is \[7, 32\], expected \[9, 32\]"):
        open_weaver(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"model_type": "qwen3_5_moe_text"})])
def test_a_configuration_of_something_else(verifier_dir, text):
    (verifier_dir / "config.json").write_text(text)
    assert str(verifier_dir) in refusal(verifier_dir)
