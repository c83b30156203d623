"""`tfm generate` and `tfm info`."""

from __future__ import annotations

import io
import math

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import tfm_jax
from tests.cli.conftest import SMALL
from tfm_jax.checkpoints import parameter_shapes
from tfm_jax.checkpoints.opened import open_verifier
from tfm_jax.cli.trees import describe_tree, draw_tree
from tfm_jax.decoding.accept import Acceptance
from tfm_jax.decoding.state import Trio
from tfm_jax.model import Model
from tfm_jax.tree import Tree

PROMPT = "def fibonacci(n):"


@pytest.fixture
def generate(run, trio_dir):
    def call(prompt=PROMPT, *arguments):
        size = ["--max-new-tokens", "6", "--model", str(trio_dir)]
        return run("generate", prompt, *SMALL, *size, *arguments)

    return call


def test_json_is_one_object_with_the_library_s_own_result(generate, trio_dir):
    result = generate(PROMPT, "--json")
    assert (result.status, result.err) == (0, "")
    found = result.json
    expected = tfm_jax.load(trio_dir).generate(
        PROMPT,
        max_new_tokens=6,
        tree=tfm_jax.TreeConfig(budget=4, expand=2, children=2, pool=8),
    )
    assert found["text"] == expected.text
    assert found["tokens"] == expected.tokens
    assert found["finish_reason"] == expected.finish_reason
    stats = found["stats"]
    assert stats["rounds"] == expected.stats.rounds
    assert stats["accepted_lengths"] == list(expected.stats.accepted_lengths)
    assert stats["mean_accepted_length"] == len(expected.tokens) / expected.stats.rounds
    assert stats["tokens_per_second"] > 0
    assert set(found) == {"text", "tokens", "finish_reason", "stats"}


def test_text_and_then_a_line_of_figures(generate):
    text = generate(PROMPT, "--json").json["text"]
    out = generate().out
    assert out.startswith(f"{text}\n\n6 tokens, ")
    assert out.count("mean accepted length") == 1
    assert " tokens/s, prefill " in out.splitlines()[-1]


def test_the_prompt_can_come_from_standard_input_or_as_ids(generate, trio_dir, monkeypatch):
    expected = generate(PROMPT, "--json").json["tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert generate("-", "--json").json["tokens"] == expected
    ids = tfm_jax.load(trio_dir).tokenizer.encode(PROMPT)
    given = ", ".join(map(str, ids))
    assert generate(given, "--token-ids", "--json").json["tokens"] == expected


def test_ids_are_printed_where_there_is_no_tokenizer(generate, damaged):
    (damaged / "verifier" / "tokenizer.json").unlink()
    out = generate("5 6 7", "--token-ids", "--model", str(damaged)).out
    assert len(out.splitlines()[0].split()) == 6
    assert all(word.isdigit() for word in out.splitlines()[0].split())


def test_the_drawn_round_is_that_of_the_text(generate):
    found = generate(PROMPT, "--method", "dflash", "--json", "--show-tree").json
    tree = found["tree"]
    assert [node["parent"] for node in tree["nodes"]] == [None, 0, 1, 2]
    path = [node for node in tree["nodes"] if node["accepted"]]
    first = found["stats"]["accepted_lengths"][0]
    emitted = [node["token"] for node in path[1:]] + [tree["bonus"]["token"]]
    assert emitted == found["tokens"][:first]
    out = generate(PROMPT, "--method", "dflash", "--show-tree").out
    assert "round 1: 3 drafted" in out
    assert out.count("✓") == first
    result = generate(PROMPT, "--method", "dflash", "--show-tree", "--tree-round", "7")
    assert result.status == 2
    assert result.err == "error: there is no round 7 to draw: generation ended before it\n"


def test_a_drawing_marks_the_accepted_path_and_leaves_padding_out():
    numbers = np.array([10, 11, 12, 13, 14])
    tree = Tree(
        token=jnp.asarray(numbers),
        parent=jnp.array([-1, 0, 0, -1, 2]),
        depth=jnp.array([0, 1, 1, 0, 2]),
        score=jnp.zeros(5),
        logprob=jnp.array([0.0, -2.5, -0.5, -jnp.inf, -0.125]),
        rank=jnp.zeros(5, jnp.int32),
        valid=jnp.array([True, True, True, False, True]),
    )
    acceptance = Acceptance(
        path=jnp.array([0, 2, 0]),
        count=jnp.int32(2),
        emitted=jnp.array([12, 77, 0]),
        bonus=jnp.int32(77),
    )
    silent = Model(trio=Trio(verifier=None), tokenizer=None, end_tokens=())
    found = describe_tree(silent, tree, acceptance, 3)
    assert [node["row"] for node in found["nodes"]] == [0, 1, 2, 4]
    assert [node["parent"] for node in found["nodes"]] == [None, 0, 0, 2]
    assert [node["accepted"] for node in found["nodes"]] == [True, False, True, False]
    assert found["bonus"] == {"after": 2, "token": 77, "text": "77"}

    console = Console(file=io.StringIO(), width=80)
    console.print(draw_tree(found))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == [
        "round 3: 3 drafted, 1 accepted, then '77'",
        "└── '10' ✓",
        "    ├── '12' -0.50 ✓",
        "    │   ├── '14' -0.12",
        "    │   └── '77' the verifier's own",
        "    └── '11' -2.50",
    ]


def test_info_knows_the_trio_without_its_weights(run, trio_dir):
    found = run("info", "--model", str(trio_dir), "--json").json
    config = open_verifier(trio_dir / "verifier").config
    weights = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    assert found["parameters"]["verifier"] == weights
    assert found["vocabulary"] == {"rows": 8192, "tokens": 8192}
    assert found["limits"] == {"positions": 400, "draft_depth": 3, "end_tokens": 8}
    assert (found["dtype"], found["platform"], found["kernels"]) == ("float32", "cpu", "xla")
    # One attention layer of 2 heads of 24, one drafter layer of 2 heads of 16, keys and values,
    # and four int32 of bookkeeping.
    assert found["cache_bytes"]["per_token"] == 4 * (2 * 2 * 24 + 2 * 2 * 16) + 16
    half = run("info", "--model", str(trio_dir), "--dtype", "bfloat16", "--json").json
    assert half["cache_bytes"]["per_token"] == 2 * (2 * 2 * 24 + 2 * 2 * 16) + 16
    table = run("info", "--model", str(trio_dir)).out
    assert f"{weights:,} parameters" in table
