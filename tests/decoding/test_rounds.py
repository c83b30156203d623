"""Rounds leave every state as a fresh prefill would, whatever was drafted and accepted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.accept import accept
from tfm_jax.decoding.commit import commit
from tfm_jax.decoding.draft import draft
from tfm_jax.decoding.generate import bucket, decode, rounds_limit, text_so_far
from tfm_jax.decoding.prefill import _set_anchor, plan, prefill, rows_touched
from tfm_jax.decoding.round import METHODS, shape_for, speculate
from tfm_jax.decoding.sampling import position_noise
from tfm_jax.decoding.state import DecodeState, Trio, make_request, networks_for
from tfm_jax.decoding.verify import verify
from tfm_jax.tree import Tree

SHAPE = TreeConfig(budget=11, expand=3, children=4, pool=16)
CAPACITY = 128
TOLERANCE = 1e-4  # float32, relative to max(1, scale)


def request_for(prompt: np.ndarray, new: int, sampling: Sampling | None = None, ends=()):
    return make_request(
        sampling or Sampling(), end_tokens=ends, vocab_limit=82, total=len(prompt) + new
    )


def assert_like_fresh(trio: Trio, state: DecodeState) -> None:
    """Every cache equals that of a prefill over the text committed so far."""
    length = int(state.length)
    fresh = prefill(trio, np.asarray(state.tokens)[: length + 1], CAPACITY)
    assert int(fresh.length) == length
    compared = {"hidden": (state.hidden, fresh.hidden)}
    for i, (ours, theirs) in enumerate(zip(state.caches, fresh.caches, strict=True)):
        for field in dataclasses.fields(ours):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            if field.name in ("key", "value"):
                a, b = a[:, :length], b[:, :length]
            compared[f"layer {i} {field.name}"] = (a, b)
    if state.context is not None:
        for name in ("key", "value"):
            pairs = zip(getattr(state.context, name), getattr(fresh.context, name), strict=True)
            for i, (a, b) in enumerate(pairs):
                compared[f"drafter {i} {name}"] = (a[:, :length], b[:, :length])
    for name, (a, b) in compared.items():
        error = np.abs(np.asarray(a) - np.asarray(b)).max() / max(1.0, np.abs(b).max())
        assert error < TOLERANCE, f"{name}: {error}"


def plain_text(trio: Trio, prompt: np.ndarray, new: int, sampling=None, ends=()) -> list[int]:
    """Independent of trees and caches: a whole forward pass for each token, argmax in numpy."""
    assert sampling is None
    tokens = list(map(int, prompt))
    forward = jax.jit(lambda v, t: v.logits(v.forward(t).final))
    for _ in range(new):
        padded = np.zeros(CAPACITY, np.int32)
        padded[: len(tokens)] = tokens
        row = np.asarray(forward(trio.verifier, padded))[len(tokens) - 1, :82]
        tokens.append(int(row.argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("method", METHODS)
def test_every_round_leaves_the_state_of_a_fresh_prefill(tiny_trio, prompt, method):
    trio = networks_for(tiny_trio, method)
    request = request_for(prompt, 20)
    step = jax.jit(speculate, static_argnames=("method", "shape"))
    state = prefill(trio, prompt, CAPACITY)
    for _ in range(4):
        state, _, _ = step(trio, state, request, method=method, shape=SHAPE)
        assert_like_fresh(trio, state)


def hand_made(tokens: list[int], parents: list[int], invalid: tuple[int, ...] = ()) -> Tree:
    depths = [0] * len(tokens)
    for i, parent in enumerate(parents[1:], start=1):
        depths[i] = depths[parent] + 1 if parent >= 0 else 0
    valid = np.ones(len(tokens), bool)
    valid[list(invalid)] = False
    zeros = jnp.zeros(len(tokens))
    return Tree(
        token=jnp.asarray(tokens, jnp.int32),
        parent=jnp.asarray(parents, jnp.int32),
        depth=jnp.asarray(depths, jnp.int32),
        score=zeros,
        logprob=zeros,
        rank=jnp.zeros(len(tokens), jnp.int32),
        valid=jnp.asarray(valid),
    )


def trees(root: int, truth: list[int]) -> dict[str, tuple[Tree, list[int]]]:
    """Trees around the true continuation, with the path that must be accepted."""
    t, wrong = truth, [(x + 1) % 80 for x in truth]
    spine = hand_made([root, *t[:7]], [-1, 0, 1, 2, 3, 4, 5, 6])
    return {
        "full": (spine, [0, 1, 2, 3, 4, 5, 6, 7]),
        "root only": (hand_made([root, wrong[0], t[1], t[2]], [-1, 0, 1, 2]), [0]),
        "partial": (hand_made([root, t[0], t[1], wrong[2], t[3]], [-1, 0, 1, 2, 3]), [0, 1, 2]),
        "scattered": (
            hand_made(
                [root, wrong[0], t[0], wrong[1], t[1], wrong[1], wrong[2], t[2], t[3], wrong[4]],
                [-1, 0, 0, 1, 2, 2, 4, 4, 7, 8],
            ),
            [0, 2, 4, 7, 8],
        ),
        "padding lures": (
            hand_made([root, 0, t[0], t[0], t[1], t[2]], [-1, -1, 0, 0, 2, 4], invalid=(1, 3)),
            [0, 2, 4, 5],
        ),
    }


@pytest.mark.parametrize("case", ["full", "root only", "partial", "scattered", "padding lures"])
def test_forced_acceptance_commits_the_path_alone(tiny_trio, prompt, case):
    truth = plain_text(tiny_trio, prompt, 12)
    tree, path = trees(int(prompt[-1]), truth)[case]
    request = request_for(prompt, 100)

    @jax.jit
    def one_round(trio, state, tree):
        verification = verify(trio, state, tree, request, 7)
        acceptance = accept(
            tree, verification.targets, depth=7, limit=jnp.int32(90), end_tokens=jnp.array([-1])
        )
        return commit(trio, state, tree, verification, acceptance, request), acceptance

    state, acceptance = one_round(tiny_trio, prefill(tiny_trio, prompt, CAPACITY), tree)
    count = int(acceptance.count)
    assert np.asarray(acceptance.path)[:count].tolist() == path
    assert text_so_far(state, len(prompt)) == truth[: len(path)]
    assert_like_fresh(tiny_trio, state)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("new", [1, 2, 23])
def test_greedy_text_is_that_of_whole_forward_passes(tiny_trio, prompt, method, new):
    trio = networks_for(tiny_trio, method)
    state = prefill(trio, prompt, CAPACITY)
    state = decode(
        trio, state, request_for(prompt, new), rounds_limit(), method=method, shape=SHAPE
    )
    assert text_so_far(state, len(prompt)) == plain_text(tiny_trio, prompt, new)
    assert bool(state.finished)


def test_sampled_text_is_the_same_in_every_method(tiny_trio, prompt):
    texts = {}
    for shared in (False, True):
        sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=11, shared_noise=shared)
        for method in METHODS:
            trio = networks_for(tiny_trio, method)
            state = prefill(trio, prompt, CAPACITY)
            request = request_for(prompt, 24, sampling)
            state = decode(trio, state, request, rounds_limit(), method=method, shape=SHAPE)
            texts[method, shared] = text_so_far(state, len(prompt))
    assert len(set(map(tuple, texts.values()))) == 1, texts


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_know_the_temperature_and_the_noise_of_their_targets(
    tiny_trio, prompt, temperature, shared
):
    """Row d of the pools stands for position length + 1 + d, where the target adds that noise."""
    sampling = Sampling(temperature=temperature, seed=3, shared_noise=shared)
    request = request_for(prompt, 24, sampling)
    state = prefill(networks_for(tiny_trio, "tfm"), prompt, CAPACITY)
    drafted = draft(tiny_trio, state, request, 16)
    positions = len(prompt) + jnp.arange(tiny_trio.depth)  # the anchor is the prompt's last token
    noise = np.zeros((tiny_trio.depth, 83))
    if shared and temperature:
        noise = np.asarray(position_noise(request, positions, 83))
    ids = np.asarray(drafted.ids)
    every = draft(tiny_trio, state, request, 83)
    sums = np.full((tiny_trio.depth, 84), -np.inf)  # the last column is no token
    np.put_along_axis(sums, np.asarray(every.ids), np.asarray(every.logits), axis=1)
    sums = sums[:, :83] / (temperature or 1) + noise
    np.testing.assert_array_equal(ids, np.argsort(-sums, axis=1, kind="stable")[:, :16])
    # To a rounding of float32: the two are compiled apart.
    np.testing.assert_allclose(drafted.noise, np.take_along_axis(noise, ids, axis=1), atol=3e-7)
    assert float(drafted.temperature) == (np.float32(temperature) if temperature else 1)
    scores = np.asarray(drafted.logits) / float(drafted.temperature) + drafted.noise
    expected = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(drafted.marginals, expected, atol=1e-5)


def test_a_prompt_is_read_without_a_second_copy_of_the_caches(tiny_trio, prompt):
    trio = networks_for(tiny_trio, "ar")
    state = prefill(trio, prompt, CAPACITY)
    held = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.caches)]
    state = _set_anchor(state, jnp.int32(1))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.caches)] == held


@pytest.mark.parametrize(
    ("length", "pieces"),
    [
        (0, []),
        (64, [(0, 64, 64)]),
        (65, [(0, 64, 64), (64, 64, 1)]),
        (192, [(0, 64, 64), (64, 64, 64), (128, 64, 64)]),
        (193, [(0, 512, 193)]),
        (577, [(0, 512, 512), (512, 64, 64), (576, 64, 1)]),
    ],
)
def test_a_prompt_is_cut_into_few_rows(length, pieces):
    assert list(plan(length)) == pieces
    assert rows_touched(length) == sum(rows for _, rows, _ in pieces)


@pytest.mark.parametrize(
    ("prompt", "total", "depth", "rows"),
    [
        (10, 20, 0, 256 + 64),
        (10, 256, 15, 256 + 64),
        (10, 257, 15, 512 + 64),
        (300, 301, 15, 512 + 64),
        (9, 4096, 15, 4096 + 64),  # not twice as many for a round beyond the text
        (9, 262144, 70, 262144 + 128),
    ],
)
def test_caches_are_of_a_few_sizes(prompt, total, depth, rows):
    assert bucket(prompt, total, depth) == rows
    assert rows >= max(total + depth + 1, rows_touched(prompt - 1))


def test_shapes_that_grow_the_same_trees_are_one(tiny_trio):
    many = TreeConfig(budget=3, expand=4096, children=99, pool=500)
    assert shape_for(tiny_trio, "tfm", many) == TreeConfig(budget=3, expand=3, children=83, pool=83)
    for method, budget in (("dflash", tiny_trio.depth), ("ddtree", 63)):
        found = shape_for(tiny_trio, method, TreeConfig(budget=63, expand=7, pool=16))
        assert found == TreeConfig(budget=budget, pool=16)
    assert shape_for(tiny_trio, "ar", many) == TreeConfig()


def test_noise_is_gumbels_has_no_ceiling_and_knows_no_vocabulary(prompt):
    request = request_for(prompt, 24, Sampling(temperature=1.0, seed=1))
    noise = np.asarray(position_noise(request, jnp.arange(4), 2**22), np.float64)
    # With 23 bits no draw would exceed 15.95; of 17 million some do.
    assert noise.max() > 15.95
    assert np.isfinite(noise).all()
    np.testing.assert_array_equal(position_noise(request, jnp.arange(4), 83), noise[:, :83])
    at = np.array([-2.0, -1.0, 0.0, 1.0, 3.0, 8.0, 12.0])
    below = np.array([(noise < x).mean() for x in at])
    expected = np.exp(-np.exp(-at))
    spread = np.sqrt(expected * (1 - expected) / noise.size)
    assert (abs(below - expected) < 5 * spread + 1e-9).all()
