"""`tfm compare`, `tfm verify` and `tfm convert`."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import tfm_jax
from tests.cli.conftest import SMALL
from tfm_jax.cli.prompts import BUILT_IN, gather_prompts
from tfm_jax.cli.verify import first_difference, logit_gap
from tfm_jax.decoding.round import METHODS
from tfm_jax.model import Model

SIZE = [*SMALL, "--max-new-tokens", "6"]


@pytest.fixture
def wrong(monkeypatch):
    """`wrong(edit)` makes the chain method return edited tokens."""

    def install(edit) -> None:
        real = Model.generate

        def generate(self, prompt, *, method="tfm", **options):
            result = real(self, prompt, method=method, **options)
            if method != "dflash":
                return result
            return dataclasses.replace(result, tokens=edit(list(result.tokens)))

        monkeypatch.setattr(Model, "generate", generate)

    return install


def test_compare_runs_all_methods_on_the_same_prompt(run, trio_dir):
    result = run("compare", "def f(x):", "--model", str(trio_dir), *SIZE, "--json")
    assert (result.status, result.err) == (0, "")
    found = result.json
    assert tuple(found["methods"]) == METHODS
    assert found["identical"] is True
    plain = tfm_jax.load(trio_dir).generate(
        "def f(x):",
        method="ar",
        max_new_tokens=6,
        tree=tfm_jax.TreeConfig(**found["setting"]["tree"]),
    )
    for method, figures in found["methods"].items():
        assert figures["tokens"] == plain.tokens
        assert figures["same_tokens"] is True
        assert figures["mean_accepted_length"] == 6 / figures["rounds"]
        assert figures["tokens_per_second"] > 0, method
    assert found["methods"]["ar"]["rounds"] == 6
    assert found["prompts"][0]["text"] == plain.text
    setting = found["setting"]
    assert setting["tree"] == {"budget": 4, "expand": 2, "children": 2, "pool": 8}
    assert (setting["model"], setting["dtype"]) == (str(trio_dir), "float32")


def test_compare_counts_over_all_prompts_of_arguments_and_files(run, trio_dir, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "b"}\n\n{"tokens": [7, 8], "id": "x"}\n')
    given = ["a", "--prompts", str(file), "--model", str(trio_dir), *SIZE]
    found = run("compare", *given, "--json").json
    assert [one["prompt"] for one in found["prompts"]] == ["a", "b", [7, 8]]
    plain = found["methods"]["ar"]
    assert [len(tokens) for tokens in plain["tokens"]] == [6, 6, 6]
    assert (plain["rounds"], plain["emitted_tokens"]) == (18, 18)
    out = run("compare", *given).out
    for one in found["prompts"]:
        assert out.count(one["text"]) == 1
    assert out.count(" yes ") == 4


def test_compare_tells_of_a_difference(run, trio_dir, wrong):
    wrong(lambda tokens: [*tokens[:3], tokens[3] ^ 1, *tokens[4:]])
    given = ["compare", "a", "--model", str(trio_dir), *SIZE]
    result = run(*given, "--json")
    assert result.status == 1
    assert result.json["identical"] is False
    same = {name: one["same_tokens"] for name, one in result.json["methods"].items()}
    assert same == {"ar": True, "dflash": False, "ddtree": True, "tfm": True}
    assert "NO" in run(*given).out
    assert run(*given, "--temperature", "1").status == 1


def test_verify_passes_where_all_tokens_are_the_same(run, trio_dir):
    result = run("verify", str(trio_dir), "a", "b", *SIZE, "--json")
    assert result.status == 0
    found = result.json
    assert (found["passed"], found["identical"]) == (True, True)
    assert list(found["methods"]) == ["dflash", "ddtree", "tfm"]
    for one in found["methods"].values():
        assert one == {"identical_prompts": 2, "differences": []}
    out = run("verify", str(trio_dir), "a", "b", *SIZE).out
    assert out.count("2/2") == 3
    assert "passed" in out


def test_verify_refuses_texts_that_check_nothing(run, trio_dir):
    result = run("verify", str(trio_dir), "a", "--max-new-tokens", "0")
    assert (result.status, result.out) == (2, "")
    assert "max_new_tokens must be at least 1 to compare anything, got 0" in result.err


def test_verify_fails_where_rounding_cannot_be_the_reason(run, trio_dir, wrong):
    wrong(lambda tokens: [*tokens[:3], tokens[3] ^ 1, *tokens[4:]])
    result = run("verify", str(trio_dir), "a", *SIZE, "--json")
    assert result.status == 1
    (one,) = result.json["methods"]["dflash"]["differences"]
    assert (one["prompt"], one["position"]) == (0, 3)
    assert one["drafted"] == one["plain"] ^ 1
    assert one["gap"] > result.json["gap_bound"] == 1e-3
    assert one["excused"] is False
    assert "FAILED" in run("verify", str(trio_dir), "a", *SIZE).out


def test_verify_excuses_no_missing_token(run, trio_dir, wrong):
    wrong(lambda tokens: tokens[:-1])
    result = run("verify", str(trio_dir), "a", *SIZE, "--json")
    (one,) = result.json["methods"]["dflash"]["differences"]
    assert (one["position"], one["drafted"], one["gap"]) == (5, None, None)
    assert result.status == 1


class Scores:
    """A model whose next-token logits are known; the last row is padding."""

    vocab_limit = 4

    def logits(self, text):
        return np.tile(np.float32([1.0, 3.0, 2.9995, 0.5, 9.0]), (len(text), 1))


@pytest.mark.parametrize(
    ("pair", "gap"), [([1, 2], 0.0005), ([2, 1], 0.0005), ([1, 3], 2.5), ([0, 3], 2.5)]
)
def test_the_gap_is_that_of_the_worse_token(pair, gap):
    assert logit_gap(Scores(), [1, 2], pair) == pytest.approx(gap, abs=1e-6)


def test_the_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 4]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_prompts_are_built_in_unless_given():
    assert gather_prompts((), None) == list(BUILT_IN)
    assert gather_prompts(("1, 2\n3",), None, token_ids=True) == [[1, 2, 3]]


def test_a_verifier_alone_is_compared_with_nothing(run, trio_dir):
    verifier = str(trio_dir / "verifier")
    found = run("compare", "a", *SIZE, "--model", verifier, "--json").json
    assert list(found["methods"]) == ["ar"]
    result = run("verify", verifier, "a", *SIZE)
    assert result.status == 2
    assert "holds a verifier alone" in result.err


def test_a_converted_trio_gives_the_same(run, trio_dir, tmp_path):
    target = tmp_path / "converted"
    result = run("convert", str(trio_dir), str(target))
    assert result.status == 0
    assert f"written  {target}" in result.out
    refused = run("convert", str(trio_dir), str(target))
    assert (refused.status, refused.out) == (2, "")
    assert "exists; overwrite (--overwrite)" in refused.err
    one, two = (
        run("generate", "a", "--model", str(path), *SIZE, "--json").json["tokens"]
        for path in (trio_dir, target)
    )
    assert one == two


def test_a_prompt_may_hold_other_line_separators(tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b", "c\u0085d", "e\x0bf"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file.write_text("\r\n".join(lines) + "\n", "utf-8", newline="")
    assert gather_prompts((), file) == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "\xff"}', "prompts.jsonl is not UTF-8 text"),
        (b'{"prompt": "a", "tokens": [1]}', 'prompts.jsonl:1: give "prompt" or "tokens", not both'),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        gather_prompts((), file)
