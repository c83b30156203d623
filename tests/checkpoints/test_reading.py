"""Published layouts are read to the values that the safetensors library finds in them."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tfm_jax.checkpoints import CheckpointError, build_verifier, module_params, read_trio
from tfm_jax.checkpoints.build import build_drafter, build_weaver
from tfm_jax.checkpoints.opened import open_drafter, open_verifier, open_weaver

LAYOUTS = ("text_f32", "hub_f32", "hub_bf16_sharded")
KEPT = ("A_log", "dt_bias", "linear_attn.norm.weight")


def published_values(directory):
    """Our path -> array, by string surgery on names instead of the tables under test."""
    values = {}
    for file in directory.glob("*.safetensors"):
        for name, array in load_file(file).items():
            if name.startswith(("mtp.", "model.visual.")):
                continue
            path = name.replace("language_model.", "").removeprefix("model.")
            values[path] = array.reshape(128, 4) if "conv1d" in name else array
    return values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verifier_holds_the_stored_bits(fixtures, layout):
    directory = fixtures / "qwen36_tiny" / layout
    params = open_verifier(directory).load()
    expected = published_values(directory)
    assert params.keys() == expected.keys()
    assert len(params) == 6 * 14 + 2 * 11 + 3
    for path, array in params.items():
        assert array.dtype == expected[path].dtype, path
        assert array.tobytes() == expected[path].tobytes(), path


def test_all_verifier_layouts_hold_the_same_numbers(fixtures):
    first, *others = (open_verifier(fixtures / "qwen36_tiny" / layout).load() for layout in LAYOUTS)
    for other in others:
        assert first.keys() == other.keys()
        for path in first:
            assert np.array_equal(first[path], other[path].astype(np.float32)), path


def test_vision_and_mtp_tensors_are_skipped_and_listed(fixtures):
    matched = open_verifier(fixtures / "qwen36_tiny" / "hub_bf16_sharded").matched
    assert {pattern: len(names) for pattern, names in matched.ignored.items()} == {
        r"model\.visual\..*": 21,
        r"mtp\..*": 15,
    }
    assert matched.unknown == ()


def test_a_narrower_dtype_spares_the_decay_and_the_gated_norm(fixtures):
    stored = read_trio(fixtures / "qwen36_tiny" / "text_f32").verifier.params
    params = read_trio(fixtures / "qwen36_tiny" / "text_f32", dtype="bfloat16").verifier.params
    kept = [path for path in params if path.endswith(KEPT)]
    assert len(kept) == 6 * 3
    for path, array in params.items():
        if path in kept:
            assert array.dtype == np.float32
            assert array.tobytes() == stored[path].tobytes()
        else:
            assert array.dtype == ml_dtypes.bfloat16, path


def test_float32_widens_everything(fixtures):
    params = read_trio(fixtures / "qwen36_tiny" / "hub_bf16_sharded", dtype="float32").verifier[1]
    assert {array.dtype for array in params.values()} == {np.dtype(np.float32)}


def test_16_bit_decay_is_accepted(verifier_dir, edit):
    name = "model.layers.0.linear_attn.A_log"

    def narrow(tensors):
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    edit(verifier_dir / "model.safetensors", narrow)
    assert read_trio(verifier_dir).verifier.params["layers.0.linear_attn.A_log"].dtype == (
        ml_dtypes.bfloat16
    )


@pytest.mark.parametrize("dtype", ["float16", "int8", "fp32"])
def test_other_dtypes_are_refused(fixtures, dtype):
    with pytest.raises(ValueError, match="bfloat16, float32"):
        read_trio(fixtures / "qwen36_tiny" / "text_f32", dtype=dtype)


def test_drafter_holds_the_stored_bits(fixtures):
    expected = load_file(fixtures / "dflash_tiny" / "model.safetensors")
    params = open_drafter(fixtures / "dflash_tiny").load()
    assert params.keys() == expected.keys()
    assert all(params[path].tobytes() == expected[path].tobytes() for path in params)


@pytest.mark.parametrize(("variant", "blocks"), [("learned_gelu", 1), ("rope_swiglu", 2)])
def test_weaver_files_agree(fixtures, variant, blocks):
    folder = fixtures / "weaver_tiny" / variant
    expected = load_file(folder / "weaver.safetensors")
    if variant == "learned_gelu":
        separate = [expected.pop(f"blocks.0.{name}_proj.weight") for name in "qkv"]
        expected["blocks.0.qkv_proj.weight"] = np.concatenate(separate)
    files = sorted(f for f in folder.iterdir() if f.suffix in (".pth", ".safetensors"))
    assert len(files) == (3 if variant == "learned_gelu" else 2)
    for file in files:
        opened = open_weaver(file)
        params = opened.load()
        assert opened.config.variant == variant
        assert opened.config.num_layers == blocks
        assert params.keys() == expected.keys()
        for path, array in params.items():
            assert np.array_equal(array, expected[path]), (file.name, path)


def test_a_directory_with_several_weavers_is_ambiguous(fixtures):
    with pytest.raises(CheckpointError, match=r"weaver\.pth.*name the file"):
        open_weaver(fixtures / "weaver_tiny" / "learned_gelu")


def test_modules_hold_exactly_the_parameters(trio_dir):
    trio = read_trio(trio_dir)
    assert trio.drafter is not None
    assert trio.weaver is not None
    for module, params in (
        (build_verifier(*trio.verifier), trio.verifier.params),
        (build_drafter(*trio.drafter), trio.drafter.params),
        (build_weaver(*trio.weaver), trio.weaver.params),
    ):
        held = module_params(module)
        assert held.keys() == params.keys()
        for path, array in held.items():
            assert array.dtype == params[path].dtype
            assert array.tobytes() == params[path].tobytes()


def test_a_module_does_not_alias_its_arrays(fixtures):
    config, stored = read_trio(fixtures / "qwen36_tiny" / "text_f32").verifier
    params = {}
    for path, array in stored.items():
        # A CPU device takes memory on a boundary of 64 bytes without copying it.
        room = np.empty(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        params[path] = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        params[path][...] = array
    module = build_verifier(config, params)
    for array in params.values():
        array[...] = 0
    for path, held in module_params(module).items():
        assert np.array_equal(held, stored[path]), path


def test_building_refuses_what_does_not_fit(fixtures):
    config, params = read_trio(fixtures / "qwen36_tiny" / "text_f32").verifier
    params = dict(params)
    del params["norm.weight"]
    params["layers.0.extra"] = np.zeros(3, np.float32)
    params["lm_head.weight"] = params["lm_head.weight"][:5]
    with pytest.raises(CheckpointError) as caught:
        build_verifier(config, params)
    for part in (
        "3 problems",
        "norm.weight is missing",
        "no place for layers.0.extra",
        "lm_head.weight is [5, 64], expected [512, 64]",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(7, (7,)), ([7, 9], (7, 9)), (None, (508,)), ("absent", (508,))],
    ids=["scalar", "list", "null", "absent"],
)
def test_generation_settings_win_over_the_config(verifier_dir, edit, value, expected):
    path = verifier_dir / "generation_config.json"
    if value == "absent":
        path.unlink()
    else:
        edit(path, lambda settings: settings.update(eos_token_id=value))
    assert read_trio(verifier_dir).eos_token_ids == expected


@pytest.mark.parametrize("value", ["4", [1.5], True, -1, [10**9], 2**70, list(range(9)), [None]])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_impossible_stop_tokens_are_refused(verifier_dir, edit, name, value):
    edit(verifier_dir / name, lambda settings: settings.update(eos_token_id=value))
    message = rf"/{name}: eos_token_id must be an id or a list of at most 8 ids in 0\.\.511, got"
    with pytest.raises(CheckpointError, match=message):
        read_trio(verifier_dir)


@pytest.mark.parametrize("part", ["verifier", "dflash", "weaver"])
@pytest.mark.parametrize("text", ["[" * 100_000, "{", "4", "null"])
def test_what_is_no_json_object_is_refused(trio_dir, part, text):
    (trio_dir / part / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"{part}/config\.json (is not JSON|holds no JSON)"):
        read_trio(trio_dir)


@pytest.mark.parametrize(
    ("part", "key"), [("verifier", "hidden_size"), ("dflash", "block_size"), ("weaver", "K")]
)
def test_a_bad_entry_is_named_with_its_file(trio_dir, edit, part, key):
    edit(trio_dir / part / "config.json", lambda config: config.update({key: "4"}))
    with pytest.raises(CheckpointError, match=rf"{part}/config\.json: {key} must be .*, got '4'"):
        read_trio(trio_dir)


def test_a_trio_is_found_by_its_folders(trio_dir):
    (trio_dir / "verifier" / "tokenizer.json").write_text("{}")
    trio = read_trio(trio_dir)
    assert trio.tokenizer == trio_dir / "verifier" / "tokenizer.json"
    assert trio.drafter is not None
    assert trio.drafter.config.target_layer_ids == (1, 3, 6)
    assert trio.weaver is not None
    assert trio.weaver.config.variant == "rope_swiglu"


def test_drafter_and_weaver_may_be_absent(verifier_dir):
    for path in (verifier_dir, verifier_dir.parent):
        trio = read_trio(path)
        assert trio.drafter is None
        assert trio.weaver is None
        assert trio.tokenizer is None
