"""The public model: what it returns, and what it refuses before any compute."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import tfm_jax
from tests.conftest import worst
from tfm_jax.config import ConfigError
from tfm_jax.decoding.generate import device_loop
from tfm_jax.decoding.state import Trio
from tfm_jax.model import Model

SHAPE = tfm_jax.TreeConfig(budget=6, expand=2, children=3, pool=16)
PROMPT = [7, 11, 13, 17, 19]


@pytest.fixture(scope="module")
def model(tiny_trio) -> Model:
    return Model(trio=tiny_trio, tokenizer=None, end_tokens=(5,))


def test_a_generation_reports_what_it_did(model):
    out = model.generate(PROMPT, max_new_tokens=9, tree=SHAPE, end_tokens=[])
    stats = out.stats
    assert len(out.tokens) == 9
    assert out.finish_reason == "length"
    assert stats.emitted_tokens == sum(stats.accepted_lengths) == 9
    assert stats.rounds == len(stats.accepted_lengths)
    assert stats.mean_accepted_length == 9 / stats.rounds
    assert stats.drafted_nodes == 6 * stats.rounds
    lengths = np.array(stats.accepted_lengths)
    assert stats.acceptance_by_depth[0] == np.mean(lengths > 1)
    assert stats.decode_seconds > 0


def test_new_tokens_are_a_prefix_of_a_longer_run_and_zero_is_empty(model):
    long = model.generate(PROMPT, max_new_tokens=9, tree=SHAPE, end_tokens=[]).tokens
    for count in (1, 4):
        got = model.generate(PROMPT, max_new_tokens=count, tree=SHAPE, end_tokens=[])
        assert got.tokens == long[:count]
    empty = model.generate(PROMPT, max_new_tokens=0, tree=SHAPE)
    assert (empty.tokens, empty.stats.rounds) == ([], 0)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_every_end_token_stops_wherever_it_falls(model, at):
    long = model.generate(PROMPT, max_new_tokens=9, tree=SHAPE, end_tokens=[]).tokens
    end = long[at]
    for method in ("ar", "tfm"):
        got = model.generate(
            PROMPT, max_new_tokens=9, tree=SHAPE, method=method, end_tokens=[81, end]
        )
        assert got.tokens == long[: long.index(end) + 1]
        assert got.finish_reason == "stop"


def test_a_call_does_not_depend_on_earlier_calls(model):
    first = model.generate(PROMPT, max_new_tokens=6, tree=SHAPE).tokens
    model.generate([3, 2, 1], max_new_tokens=6, tree=SHAPE)
    with pytest.raises(ValueError, match="needs at least one token"):
        model.generate([], tree=SHAPE)
    assert model.generate(PROMPT, max_new_tokens=6, tree=SHAPE).tokens == first


def test_no_prompt_seed_or_setting_causes_a_new_program(model):
    model.generate(PROMPT, max_new_tokens=3, tree=SHAPE)
    programs = device_loop()._cache_size()
    for prompt, seed, temperature in (([3] * 40, 0, 0.0), ([9], 4, 1.0), (PROMPT, 7, 0.3)):
        sampling = tfm_jax.Sampling(temperature=temperature, seed=seed, top_p=0.9, top_k=seed)
        model.generate(
            prompt, max_new_tokens=2 + seed, tree=SHAPE, sampling=sampling, end_tokens=[seed]
        )
    assert device_loop()._cache_size() == programs


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_convolution(model, length):
    texts = [
        model.generate(
            PROMPT[:length], max_new_tokens=6, tree=SHAPE, method=method, end_tokens=[]
        ).tokens
        for method in ("ar", "tfm")
    ]
    assert texts[0] == texts[1]
    follow = model.logits([*PROMPT[:length], *texts[0]])[length - 1 : -1, : model.vocab_limit]
    assert follow.argmax(-1).tolist() == texts[0]


def test_logits_do_not_depend_on_the_pieces_a_text_is_run_in(model, prompt):
    text = np.tile(prompt, 4)[:100]  # one whole piece of 64 rows and a padded one
    logits = model.logits(text)
    assert logits.shape == (100, 83)
    assert logits.dtype == np.float32
    assert worst(model.logits(text[:40]), logits[:40]) < 1e-4


def test_streamed_rounds_end_in_the_same_generation(model):
    *_, last = model.stream(PROMPT, max_new_tokens=7, tree=SHAPE, every=1)
    assert last.tokens == model.generate(PROMPT, max_new_tokens=7, tree=SHAPE).tokens


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "medusa"}, ValueError, "method must be one of ar, dflash, ddtree, tfm"),
        ({"prompt": []}, ValueError, "needs at least one token"),
        ({"prompt": [1, 83]}, ValueError, r"0..82, got \[83\]"),
        ({"prompt": [-1]}, ValueError, r"0..82, got \[-1\]"),
        ({"prompt": [1.5]}, TypeError, "integers"),
        ({"prompt": "text"}, ValueError, "no tokenizer"),
        ({"max_new_tokens": -1}, ValueError, "not be negative, got -1"),
        ({"max_new_tokens": 2.0}, TypeError, "integer"),
        ({"max_new_tokens": 396}, ValueError, "5 prompt tokens and 396 new .* 401, .* 400"),
        ({"max_new_tokens": True}, TypeError, "integer"),
        ({"prompt": None}, TypeError, "text or a list of token ids, got NoneType"),
        ({"prompt": [[1, 2]]}, TypeError, "text or a list of token ids"),
        ({"method": ["ar"]}, ValueError, "method must be one of"),
        ({"tree": {"budget": 3}}, TypeError, "tree must be a TreeConfig"),
        ({"sampling": 0}, TypeError, "sampling must be a Sampling"),
        ({"end_tokens": range(9)}, ValueError, "at most 8 end tokens, got 9"),
        ({"end_tokens": [2.5]}, TypeError, "integers"),
        ({"end_tokens": [-5]}, ValueError, r"0..82, got \[-5\]"),
        ({"end_tokens": 7}, TypeError, "list of token ids, got 7"),
        ({"end_tokens": ""}, TypeError, "list of token ids, got ''"),
        ({"prompt": bytearray(b"ab")}, TypeError, "a list of integers, got bytearray"),
    ],
)
def test_bad_arguments_are_refused(model, arguments, error, message):
    arguments = {"prompt": PROMPT, **arguments}
    with pytest.raises(error, match=message):
        model.generate(arguments.pop("prompt"), **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0}, "budget must be a positive integer, got 0"),
        ({"budget": -3}, "budget must be a positive integer, got -3"),
        ({"expand": 1.5}, "expand must be a positive integer"),
        ({"pool": True}, "pool must be a positive integer"),
        ({"pool": 40000}, "pool must be at most 32767, got 40000"),
    ],
)
def test_bad_trees_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tfm_jax.TreeConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1e39},
        {"temperature": "1"},
        {"seed": True},
        {"shared_noise": "no"},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_bad_sampling_is_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        tfm_jax.Sampling(**settings)


def test_integers_of_other_libraries_are_integers(model):
    tree = tfm_jax.TreeConfig(budget=np.int64(6), expand=np.int32(2), children=3, pool=16)
    assert tree == SHAPE
    got = model.generate(np.asarray(PROMPT), max_new_tokens=np.int64(4), tree=tree)
    assert got.tokens == model.generate(PROMPT, max_new_tokens=4, tree=SHAPE).tokens


def test_logits_know_the_limit_too(model):
    with pytest.raises(ValueError, match="401 prompt tokens and 0 new"):
        model.logits([1] * 401)


@pytest.mark.parametrize(
    "coldest", [{"temperature": 2e-38}, {"temperature": 1e-7}, {"temperature": 1.0, "top_p": 1e-46}]
)
def test_extreme_settings_fall_back_to_the_best_token(model, coldest):
    greedy = model.generate(PROMPT, max_new_tokens=5, tree=SHAPE, method="ar").tokens
    sampling = tfm_jax.Sampling(**coldest)
    got = model.generate(
        PROMPT, max_new_tokens=5, tree=SHAPE, method="ar", sampling=sampling
    ).tokens
    assert got == greedy


def test_a_wide_round_is_no_wider_than_its_budget(model):
    wide = tfm_jax.TreeConfig(budget=3, expand=4096, children=3, pool=16)
    tree, _, _ = next(model.rounds(PROMPT, max_new_tokens=3, tree=wide))
    assert tree.rows == 4


def test_methods_need_their_networks(model):
    alone = dataclasses.replace(model, trio=Trio(verifier=model.trio.verifier))
    assert alone.methods == ("ar",)
    with pytest.raises(ValueError, match="needs a drafter and a weaver"):
        alone.generate(PROMPT)
    with pytest.raises(ValueError, match="needs a drafter; none"):
        alone.generate(PROMPT, method="dflash")
