"""A trio in larger sizes computes what the small one does, with every weight in use."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import tfm_jax
from experiments import embedding_check, full_cost
from experiments.embedding import embed, place, widened
from experiments.widening import PADDING, Axis, evenly, grouped, norm, product, spread
from tfm_jax.checkpoints import module_params, read_trio
from tfm_jax.config import ConfigError, Sampling, TreeConfig
from tfm_jax.decoding.generate import Stats
from tfm_jax.model import directory
from tfm_jax.presets import Geometry, geometry

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
LAYERS = (LINEAR, LINEAR, LINEAR, FULL, LINEAR, FULL, LINEAR, LINEAR, LINEAR, FULL)
HELD = (0, 1, 2, 3, 4, None, 5, None, 6, 7)  # small layers; the others add nothing
TEXT = (
    "The first railway of the country was opened in 1835 between two towns.\n"
    "def total(values):\n    return sum(values) / len(values)\n"
    "How many apples are left if 12 of 30 are eaten? The answer is 18.\n"
)


@pytest.fixture(scope="module")
def sizes() -> Geometry:
    """Larger than the pocket trio in every size that may be larger, by uneven factors."""
    small = geometry("pocket")
    return Geometry(
        verifier=dataclasses.replace(
            small.verifier,
            vocab_size=9000,
            hidden_size=1280,
            intermediate_size=2000,
            layer_types=LAYERS,
            num_attention_heads=12,
            num_key_value_heads=2,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            tie_word_embeddings=False,
        ),
        drafter=dataclasses.replace(
            small.drafter,
            vocab_size=9000,
            hidden_size=1280,
            intermediate_size=1800,
            layer_types=(SLIDING,) * 4 + (FULL,),
            num_attention_heads=8,
            num_key_value_heads=2,
            num_target_layers=10,
            target_layer_ids=(1, 3, 7, 8, 9),
            mask_token_id=8999,
        ),
        weaver=dataclasses.replace(
            small.weaver, d_model=1280, d_embed=1280, d_rank=896, num_heads=7, mlp_dim=1000
        ),
    )


@pytest.fixture(scope="module")
def small():
    return read_trio(directory("pocket"), dtype="float32")


@pytest.fixture(scope="module")
def pocket():
    return tfm_jax.load("pocket", dtype="float32")


@pytest.fixture(scope="module")
def wide(small, sizes):
    """The embedded trio, in the form that an accelerator decodes with."""
    model = embed(small, sizes)
    verifier, weaver = model.trio.verifier, model.trio.weaver
    growth = weaver.growth_weights(verifier.embed_tokens.weight[...], verifier.output_rows)
    return dataclasses.replace(model, trio=dataclasses.replace(model.trio, growth=growth))


@pytest.mark.parametrize("copies", [[1, 2, 3], [4, 5, 6, 7], [16, 22, 23]])
def test_what_reads_an_axis_keeps_the_value_or_cancels(copies):
    source = np.concatenate([[PADDING], np.repeat(np.arange(len(copies)), copies)])
    source = np.random.default_rng(0).permutation(source).astype(np.int32)
    axis = Axis(real=len(copies), source=source)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(5, axis.real)), jnp.bfloat16)
    out = Axis(real=5, source=np.array([4, 0, 1, 2, 3, 0], np.int32))
    result = np.asarray(product(out, axis)(weight, jax.random.key(0)), np.float64)
    for channel in range(axis.real):  # exact: what the copies of one value add up to
        total = result[:, source == channel].sum(axis=1)
        assert np.array_equal(total, np.asarray(weight, np.float64)[out.source, channel])
    assert np.count_nonzero(result) == result.size
    if min(copies) > 1:
        result = np.asarray(product(out, axis, cancelled=True)(weight, jax.random.key(0)))
        result = result.astype(np.float64)
        for channel in range(axis.real):
            assert not result[:, source == channel].sum(axis=1).any()
        assert np.count_nonzero(result) == result.size
    else:
        with pytest.raises(ConfigError, match="one copy alone cannot be cancelled"):
            product(out, axis, cancelled=True)(weight, jax.random.key(0))


def test_padded_outputs_are_zero_for_every_input():
    reads, out = spread(3, 8), evenly(4, 10)
    assert out.source.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, PADDING, PADDING]
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(4, 3)), jnp.bfloat16)
    result = np.asarray(product(out, reads)(weight, jax.random.key(0)), np.float64)
    x = np.random.default_rng(3).integers(-8, 8, 3).astype(np.float64)
    assert not (result @ x[reads.source])[-2:].any()
    assert np.count_nonzero(result[-2:]) == 16


@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_over_a_padded_axis_gives_what_the_small_one_gives(centred):
    axis = evenly(3, 8)
    rng = np.random.default_rng(4)
    x, weight = rng.normal(size=3), rng.normal(size=3)
    gain = 1 + weight if centred else weight
    expected = x / np.sqrt((x * x).mean()) * gain
    new = np.asarray(norm(axis, zero_centred=centred)(jnp.asarray(weight), jax.random.key(0)))
    padded = np.where(axis.padded, 0, x[axis.source])
    found = padded / np.sqrt((padded * padded).mean()) * (1 + new if centred else new)
    assert np.allclose(found, np.where(axis.padded, 0, expected[axis.source]), atol=1e-6)


def test_heads_stay_with_the_heads_that_they_share():
    # Two key heads with three value heads each become four with three.
    owners = spread(2, 4)
    assert grouped(owners, 3, 3).source.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    # One with two becomes two with six: each pair of copies three times in a group.
    assert grouped(spread(1, 2), 2, 6).source.tolist() == [0, 1] * 6
    with pytest.raises(ConfigError, match="no copy of"):
        grouped(spread(2, 4), 3, 1)
    assert spread(1, 2).blocks(3).source.tolist() == [0, 1, 2, 0, 1, 2]


def test_layers_are_placed_so_that_features_agree():
    wide, small = geometry("qwen3.6-27b"), geometry("pocket")
    held = place(
        small.verifier.layer_types,
        wide.verifier.layer_types,
        small.drafter.target_layer_ids,
        wide.drafter.target_layer_ids,
    )
    found = {layer: i for i, layer in enumerate(held) if layer is not None}
    assert found == {0: 0, 1: 1, 2: 2, 3: 3, 4: 17, 5: 18, 6: 32, 7: 47}
    for tap, wide_tap in zip((1, 3, 5, 6, 7), (1, 16, 31, 46, 61), strict=True):
        assert [i for i in held[: wide_tap + 1] if i is not None] == list(range(tap + 1))
    drafters = place(small.drafter.layer_types, wide.drafter.layer_types)
    assert drafters == (0, 1, None, None, 2)


def test_a_layer_without_a_place_is_named():
    with pytest.raises(ConfigError, match=r"layer 1 needs a full_attention layer among 1\.\.2"):
        place((LINEAR, FULL), (LINEAR, LINEAR, LINEAR, FULL), (1,), (2,))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("verifier", {"head_dim": 128}, "head_dim = 128, the small one 256"),
        ("verifier", {"tie_word_embeddings": True}, "ties its output matrix"),
        ("verifier", {"intermediate_size": 700}, "768 channels do not fit 700"),
        ("verifier", {"num_key_value_heads": 1}, "two groups of heads, got 1"),
        ("drafter", {"block_size": 12}, "block_size = 12, the small one 16"),
        ("drafter", {"target_layer_ids": (1, 3, 6)}, "reads 3 verifier layers, the small 5"),
        ("drafter", {"target_layer_ids": (1, 2, 7, 8, 9)}, "layer 3 needs a full_attention"),
        ("weaver", {"depth": 9}, "depth = 9, the small one 15"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(small, sizes, part, change, message):
    changed = dataclasses.replace(getattr(sizes, part), **change)

    with pytest.raises(ConfigError, match=message):
        widened(small, dataclasses.replace(sizes, **{part: changed}))


@pytest.mark.slow
def test_the_comparison_tells_which_part_differs(small, sizes, pocket, monkeypatch):
    name = "layers.5.mlp.down_proj.weight"
    params = small.verifier.params | {name: 1.01 * small.verifier.params[name]}
    wrong = dataclasses.replace(small, verifier=small.verifier._replace(params=params))
    assert widened(small, sizes).verifier.held == HELD
    monkeypatch.setattr(
        embedding_check, "widened", lambda small, sizes, seed: widened(wrong, sizes, seed=seed)
    )
    found = embedding_check.largest_differences(small, sizes, pocket.encode(TEXT).tolist())
    assert found.pop("layers") > 1e-4
    assert set(found) == {"extra_layers", "logits", "drafter", "weaver"}
    assert found["extra_layers"] < 1e-6
    assert max(found.values()) < 1e-5


def test_no_weight_is_idle(wide):
    """No zeros but the biases of padding; no constant stretch in any matrix."""
    padding = 1 - 2 * 384 / 896
    for network in (wide.trio.verifier, wide.trio.drafter, wide.trio.weaver):
        for name, x in module_params(network).items():
            idle = np.mean(x == 0)
            if x.ndim == 1 or "pos_emb" in name:
                assert idle <= padding, name
                assert x.std() > 0, name
                continue
            assert idle < 1e-4, name
            block = min(16, *x.shape)
            blocks = [n // block * block for n in x.shape]
            tiles = x[: blocks[0], : blocks[1]].reshape(blocks[0] // block, block, -1, block)
            assert tiles.std(axis=(1, 3)).min() > 0, name


def test_shapes_and_special_tokens(wide, sizes, pocket):
    verifier, drafter = wide.trio.verifier, wide.trio.drafter
    assert verifier.output_rows.shape == (9000, 1280)
    assert len(verifier.layers) == len(LAYERS)
    assert drafter.config.mask_token_id == pocket.trio.drafter.config.mask_token_id
    assert drafter.config.target_layer_ids == sizes.drafter.target_layer_ids
    assert wide.end_tokens == pocket.end_tokens
    assert wide.vocab_limit == pocket.vocab_limit == 8192


def test_logits_are_those_of_the_small_model(wide, pocket):
    tokens = pocket.encode(TEXT)
    expected = pocket.logits(tokens)
    found = wide.logits(tokens)[:, : pocket.vocab_limit]
    assert abs(expected).max() > 10
    assert abs(found - expected).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "ddtree", "tfm"])
def test_methods_draft_and_accept_the_same(wide, pocket, method):
    """Pools decide the tokens of a tree, marginals or Weaver their probabilities."""
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        request = {
            "max_new_tokens": 16,
            "method": method,
            "tree": TreeConfig(budget=12, expand=2),
            "sampling": sampling,
            "end_tokens": [],
        }
        rounds = 0
        for expected, found in zip(
            pocket.rounds(TEXT, **request), wide.rounds(TEXT, **request), strict=True
        ):
            rounds += 1
            for name in ("token", "parent", "rank", "valid"):
                assert np.array_equal(getattr(found[0], name), getattr(expected[0], name)), name
            apart = abs(found[0].logprob - expected[0].logprob)[expected[0].valid]
            assert apart.max() < 1e-4
            count = int(expected[1].count)
            assert found[1].count == count
            assert np.array_equal(found[1].emitted[:count], expected[1].emitted[:count])
        assert rounds == 16 if method == "ar" else rounds < 14


@pytest.mark.slow
def test_whole_texts_of_chains_are_the_same(wide, pocket):
    request = {"max_new_tokens": 32, "method": "dflash", "end_tokens": []}
    expected, found = (model.generate(TEXT, **request) for model in (pocket, wide))
    assert found.tokens == expected.tokens
    assert found.stats.accepted_lengths == expected.stats.accepted_lengths


def test_texts_longer_than_a_window_are_refused(small, sizes):
    full_cost.check_lengths(small, sizes, 496)
    with pytest.raises(ValueError, match=r"at most 496, as the small drafter's window is 512"):
        full_cost.check_lengths(small, sizes, 497)


def run(tokens: list[int], rounds: int, seconds: float) -> full_cost.Run:
    stats = Stats(
        rounds=rounds,
        emitted_tokens=len(tokens),
        drafted_nodes=0,
        accepted_lengths=(),
        acceptance_by_depth=(),
        mean_accepted_length=len(tokens) / rounds,
        prefill_seconds=9.0,
        decode_seconds=seconds,
        compile_seconds=9.0,
    )
    return full_cost.Run(tokens=tokens, stats=stats)


def test_rows_and_means():
    plain = {"code": [run([1] * 8, 8, 2.0), run([2] * 8, 8, 2.0)], "math": [run([3] * 8, 8, 1.0)]}
    fast = {
        "code": [run([1] * 8, 2, 0.5), run([2] * 7 + [1], 2, 0.5)],
        "math": [run([3] * 8, 1, 0.25)],
    }
    setting = full_cost.Setting(method="tfm", budget=64)
    assert setting.shape == TreeConfig(budget=64, expand=4)
    code, math = full_cost.rows_of(setting, 0.0, fast, plain)
    assert code == {
        "domain": "code",
        "temperature": 0.0,
        "budget": 64,
        "method": "tfm",
        "tokens_per_second": 16.0,
        "mean_accepted_length": 4.0,
        "round_ms": 250.0,
        "speedup": 4.0,
        "prompts": 2,
        "differing_prompts": 1,
    }
    (mean,) = full_cost.macro([code, math])
    assert mean["speedup"] == 4.0
    assert mean["mean_accepted_length"] == 6.0
    assert mean["tokens_per_second"] == 24.0


def test_a_further_run_is_added_beside_the_first():
    plain = {"code": [run([1] * 8, 8, 2.0)]}
    common = dict.fromkeys(full_cost.COMMON, "same")

    def result(commit, budget, rounds, plain_seconds):
        texts = {"code": [run([1] * 8, rounds, 1.0)]}
        reference = {"code": [run([1] * 8, 8, plain_seconds)]}
        rows = full_cost.rows_of(full_cost.Setting(method="ar", budget=0), 0.0, reference, plain)
        setting = full_cost.Setting(method="tfm", budget=budget)
        rows += full_cost.rows_of(setting, 0.0, texts, reference)
        apart = [{"method": "tfm", "budget": budget, "gap": 0.1}]
        setting = common | {"commit": commit}
        return {"setting": setting, "rows": rows, "macro": full_cost.macro(rows)} | {
            "differences": apart
        }

    first, second = result("one", 64, 2, 2.0), result("two", 63, 4, 4.0)
    full_cost.check_joins(first, second["setting"])
    both = full_cost.joined(first, second)
    assert [(row["method"], row["budget"], row.get("run")) for row in both["macro"]] == [
        ("ar", 0, None),
        ("tfm", 64, None),
        ("tfm", 63, 2),
    ]
    assert both["macro"][2]["speedup"] == 4.0  # over its own run's plain decoding
    (entry,) = both["setting"]["runs"]
    assert entry == {"run": 2, "commit": "two", "plain_round_ms": {"0": 500.0}}
    assert [one.get("run") for one in both["differences"]] == [None, 2]
    assert [r["run"] for r in full_cost.joined(both, second)["setting"]["runs"]] == [2, 3]
    with pytest.raises(ValueError, match="the dtype of the result that is there, 'same', got 'x'"):
        full_cost.check_joins(first, common | {"dtype": "x"})


@pytest.mark.slow
def test_the_experiment_runs_without_a_gpu(tmp_path, sizes, capsys):
    preset = tmp_path / "sizes.json"
    preset.write_text(json.dumps(dataclasses.asdict(sizes)))
    options = {"--preset": preset, "--out": tmp_path, "--count": 1, "--new-tokens": 12}
    options |= {"--budgets": 8, "--longest-prompt": 64}
    arguments = [str(x) for pair in options.items() for x in pair]
    full_cost.main([*arguments, "--check", "--json"])
    result = json.loads((tmp_path / "full_cost_cpu.json").read_text())
    assert result == json.loads(capsys.readouterr().out)
    assert result["setting"]["timed"] is False
    assert len(result["rows"]) == 4 * 2 * 4  # methods, temperatures, domains
    assert not any(row["differing_prompts"] for row in result["rows"])
    assert result["differences"] == []
    assert result["setting"]["checks"]["logits"]["same_best_token"] == 4
    assert max(result["setting"]["checks"]["float32"].values()) < 1e-4
    more = ["--add", "--methods", "ar", "tfm", "--temperatures", "0"]
    full_cost.main([*arguments, *more])
    added = json.loads((tmp_path / "full_cost_cpu.json").read_text())
    assert added["rows"][:32] == result["rows"]
    assert [(row["method"], row["run"]) for row in added["rows"][32:]] == [("tfm", 2)] * 4


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--count", "0"), "count must be at least 1, got 0"),
        (("--new-tokens", "0"), "new_tokens must be at least 1, got 0"),
        (("--budgets", "0"), "budget"),
        (("--temperatures", "-1"), "temperature"),
    ],
)
def test_numbers_that_no_run_could_have(option, message, capsys):
    with refused(capsys, message):
        full_cost.main(list(option))
