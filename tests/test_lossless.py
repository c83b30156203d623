"""Speculation gives the text of plain decoding on the embedded trio, float32, on this machine."""

from __future__ import annotations

import pytest

import tfm_jax
from experiments.acceptance import DOMAINS, load_prompts
from tfm_jax.config import Sampling

# By domain: 200 prompts in all.
COUNTS = {"prose": 80, "code": 40, "math": 40, "chat": 40}


@pytest.fixture(scope="module")
def pocket() -> tfm_jax.Model:
    return tfm_jax.load("pocket", dtype="float32")


def texts(model, domain: str, count: int, new_tokens: int, **settings) -> list[list[int]]:
    prompts = load_prompts(model, domain, count, 256)
    return [
        model.generate(prompt, max_new_tokens=new_tokens, end_tokens=[], **settings).tokens
        for prompt in prompts
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("domain", DOMAINS)
def test_greedy_texts_equal_plain_decoding(pocket, domain):
    plain = texts(pocket, domain, COUNTS[domain], 128, method="ar")
    for method in ("dflash", "ddtree", "tfm"):
        assert texts(pocket, domain, COUNTS[domain], 128, method=method) == plain, method


def test_the_embedded_trio_drafts_well_and_changes_nothing(pocket):
    """A floor for acceptance: a fault that keeps texts right would show here.

    Without the noise of the targets the second one would be 2.2.
    """
    tree = tfm_jax.TreeConfig(budget=24, expand=3)
    for sampling, floor in ((Sampling(), 3.0), (Sampling(temperature=1.0, seed=5), 2.7)):
        runs = {
            method: [
                pocket.generate(
                    prompt,
                    max_new_tokens=40,
                    method=method,
                    tree=tree,
                    sampling=sampling,
                    end_tokens=[],
                )
                for prompt in load_prompts(pocket, "code", 3, 40)
            ]
            for method in ("ar", "tfm")
        }
        plain = [run.tokens for run in runs["ar"]]
        assert [run.tokens for run in runs["tfm"]] == plain
        rounds = sum(run.stats.rounds for run in runs["tfm"])
        assert 3 * 40 / rounds > floor, sampling
