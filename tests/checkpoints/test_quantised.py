"""Block-scaled 8-bit weights are multiplied by their scales, or refused."""

import ml_dtypes
import numpy as np
import pytest

from tfm_jax.checkpoints import CheckpointError
from tfm_jax.checkpoints.opened import open_verifier
from tfm_jax.checkpoints.quantised import dequantise

FLOAT8 = ml_dtypes.float8_e4m3fn
NAME = "model.layers.3.self_attn.q_proj.weight"
OURS = "layers.3.self_attn.q_proj.weight"


def elementwise(weight, scale, block):
    out = np.zeros(weight.shape)
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            out[i, j] = float(weight[i, j]) * float(scale[i // block[0], j // block[1]])
    return out.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((8, 6), (4, 3)), ((9, 7), (4, 3)), ((3, 2), (128, 128)), ((5, 129), (2, 128))],
    ids=["even", "ragged", "one-block", "one-column-over"],
)
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_each_block_has_its_own_scale(shape, block, kind):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=shape).astype(FLOAT8)
    counts = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    scale = rng.uniform(0.5, 40.0, counts).astype(kind)
    out = dequantise(weight, scale, block)
    assert out.dtype == ml_dtypes.bfloat16
    assert np.array_equal(out, elementwise(weight, scale, block))


@pytest.fixture
def fp8_dir(verifier_dir, edit):
    """The verifier with one ragged 8-bit matrix, [256, 64] in blocks of [100, 48]."""

    def quantise(tensors):
        scale = np.random.default_rng(1).uniform(0.01, 0.02, (3, 2)).astype(ml_dtypes.bfloat16)
        wide = np.repeat(np.repeat(scale.astype(np.float32), 100, 0)[:256], 48, 1)[:, :64]
        tensors[NAME] = (tensors[NAME] / wide).astype(FLOAT8)
        tensors[NAME + "_scale_inv"] = scale

    edit(verifier_dir / "model.safetensors", quantise)
    edit(
        verifier_dir / "config.json",
        lambda config: config.update(
            quantization_config={"quant_method": "fp8", "weight_block_size": [100, 48]}
        ),
    )
    return verifier_dir


def test_a_quantised_verifier_comes_near_the_original(fp8_dir, fixtures):
    exact = open_verifier(fixtures / "qwen36_tiny" / "text_f32").load()
    opened = open_verifier(fp8_dir)
    params = opened.load()
    assert params[OURS].dtype == ml_dtypes.bfloat16
    error = params[OURS].astype(np.float32) - exact[OURS]
    # e4m3 has 4 significant bits: half a unit is 1/16 of the value, bfloat16 adds 1/512.
    assert np.all(np.abs(error) <= np.abs(exact[OURS]) * (1 / 16 + 1 / 256) + 1e-4)
    assert np.any(error != 0)
    assert all(np.array_equal(params[path], exact[path]) for path in exact if path != OURS)
    assert opened.matched.unknown == ()


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda t: t.pop(NAME + "_scale_inv"), "8-bit float without its scales"),
        (
            lambda t: t.update({NAME + "_scale_inv": t[NAME + "_scale_inv"][:2]}),
            r"scales of shape \[2, 2\], expected \[3, 2\]",
        ),
        (
            lambda t: t.update({NAME + "_scale_inv": np.ones((3, 2), np.uint8)}),
            "scales stored as uint8",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(FLOAT8)}),
            r"model\.norm\.weight: 8-bit float without its scales",
        ),
        (
            lambda t: t.update({"model.norm.weight_scale_inv": np.ones((1, 1), np.float32)}),
            r"no place for 1 tensors: model\.norm\.weight_scale_inv",
        ),
    ],
    ids=["absent", "shape", "dtype", "norm", "stray"],
)
def test_unusable_scales_are_refused(fp8_dir, edit, change, cause):
    edit(fp8_dir / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=cause):
        open_verifier(fp8_dir)


@pytest.mark.parametrize(
    "settings",
    [{"quant_method": "awq"}, {"weight_block_size": None}, {"weight_block_size": [128, 0]}],
)
def test_other_schemes_are_refused(fp8_dir, edit, settings):
    edit(fp8_dir / "config.json", lambda c: c["quantization_config"].update(settings))
    with pytest.raises(CheckpointError, match=r"quant_method|weight_block_size"):
        open_verifier(fp8_dir)


@pytest.mark.parametrize("value", ["4", [], 0])
def test_a_scheme_is_an_object(fp8_dir, edit, value):
    edit(fp8_dir / "config.json", lambda c: c.update(quantization_config=value))
    with pytest.raises(CheckpointError, match="quantization_config must be an object"):
        open_verifier(fp8_dir)
