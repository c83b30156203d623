"""Continuations are what plain decoding writes, and batches of them visit every text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.generate import decode, rounds_limit
from tfm_jax.decoding.prefill import prefill
from tfm_jax.decoding.state import Trio, make_request
from tfm_jax.training import continuations
from tfm_jax.training.batches import token_dtype
from tfm_jax.training.continuations import Continuations, generate_continuations, write_on

TOTAL = 40


def plain(
    trio: Trio, prompt: np.ndarray, temperature: float, seed: int, vocab_limit: int
) -> np.ndarray:
    sampling = Sampling(temperature=temperature, seed=seed)
    request = make_request(sampling, end_tokens=(), vocab_limit=vocab_limit, total=TOTAL)
    verifier = Trio(verifier=trio.verifier)
    state = prefill(verifier, prompt, 128)
    state = decode(verifier, state, request, rounds_limit(), method="ar", shape=TreeConfig())
    return np.asarray(state.tokens)[:TOTAL]


@pytest.mark.parametrize("vocab_limit", [83, 60])
def test_rows_equal_plain_decoding(tiny_trio: Trio, vocab_limit: int) -> None:
    prompts = np.random.default_rng(0).integers(0, 60, (4, 12)).astype(np.int32)
    lengths = np.array([12, 5, 1, 9], np.int32)
    temperature = np.array([0.0, 1.0, 1.0, 0.0], np.float32)
    seeds = np.array([3, 4, 2**32 - 1, 6], np.uint32)
    given = (jnp.asarray(prompts), lengths, temperature, seeds)
    written = jax.jit(write_on, static_argnames=("total", "vocab_limit"))(
        tiny_trio.verifier, *given, total=TOTAL, vocab_limit=vocab_limit
    )
    for row in range(4):
        prompt, drawn = prompts[row, : lengths[row]], (float(temperature[row]), int(seeds[row]))
        expected = plain(tiny_trio, prompt, *drawn, vocab_limit)
        np.testing.assert_array_equal(written[row], expected)


def test_padding_is_never_written(tiny_trio: Trio) -> None:
    prompts = np.random.default_rng(1).integers(0, 60, (1, 6, 12)).astype(np.int32)

    def largest(vocab_limit: int) -> list[int]:
        """Highest id written in each row."""
        texts = generate_continuations(
            tiny_trio.verifier,
            prompts.__getitem__,
            total=TOTAL,
            batches=1,
            vocab_limit=vocab_limit,
        )
        return texts.tokens.max(axis=1).tolist()

    assert max(largest(60)) < 60
    assert min(largest(83)) >= 60  # at either temperature the network would write them


def test_batches_of_continuations(tiny_trio: Trio, capsys: pytest.CaptureFixture) -> None:
    prompts = np.random.default_rng(1).integers(0, 83, (2, 6, 12)).astype(np.int32)
    texts = generate_continuations(
        tiny_trio.verifier,
        prompts.__getitem__,
        total=20,
        batches=2,
        vocab_limit=83,
        shortest=3,
        greedy_share=0.5,
    )
    assert texts.tokens.shape == (12, 20)
    assert texts.tokens.dtype == np.uint16
    assert texts.temperature.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert texts.prompt.min() >= 3
    assert texts.prompt.max() <= 12
    for row, length in enumerate(texts.prompt):
        given = prompts.reshape(12, 12)[row]
        np.testing.assert_array_equal(texts.tokens[row, :length], given[:length])
    assert "tokens_per_second" in capsys.readouterr().out


def test_a_loop_is_a_copy() -> None:
    tokens = np.random.default_rng(2).integers(0, 1000, (4, 60)).astype(np.uint16)
    tokens[1, 20:] = np.resize(tokens[1, 17:20], 40)  # a loop of three from 17 on
    tokens[2, 30:55] = tokens[2, 5:30]  # a long quotation
    tokens[3, 3:11] = tokens[3, 12:20]  # too short by a token ...
    tokens[3, 10] += 1
    tokens[3, 20:40] = tokens[0, 20:40]  # ... and what another text says
    found = Continuations(
        tokens=tokens,
        prompt=np.array([4, 10, 40, 4], np.int32),
        temperature=np.zeros(4, np.float32),
    ).copied()
    # Tokens 27 to 59 of the loop end a run of eight that was there before; 40 to 54 of the third.
    np.testing.assert_allclose(found, [0, 33 / 50, 15 / 20, 0])


def test_texts_that_repeat_themselves_are_left_out(
    tiny_trio: Trio, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    rows = np.stack([np.resize([5, 6], 40), np.arange(40)] * 2)
    monkeypatch.setattr(continuations, "write_on", lambda *_, **__: jnp.asarray(rows))
    prompts = np.zeros((1, 4, 6), np.int32)

    def kept(most_copied: float) -> list:
        texts = generate_continuations(
            tiny_trio.verifier,
            prompts.__getitem__,
            total=40,
            batches=1,
            vocab_limit=83,
            most_copied=most_copied,
        )
        return texts.temperature.tolist() + texts.tokens[:, 1].tolist()

    assert kept(1.0) == [0, 0, 1, 1] + [6, 1] * 2
    assert kept(0.5) == [0, 1, 1, 1]
    assert "rows 4  kept 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"most_copied must lie in 0..1, got 2"):
        kept(2)
    loops = np.stack([rows[0]] * 4)
    monkeypatch.setattr(continuations, "write_on", lambda *_, **__: jnp.asarray(loops))
    with pytest.raises(ValueError, match=r"no text is left: more than most_copied = 0.5"):
        kept(0.5)


def texts(rows: int = 7, length: int = 20) -> Continuations:
    return Continuations(
        tokens=np.repeat(np.arange(rows), length).reshape(rows, length).astype(np.uint16),
        prompt=np.full((rows,), 4, np.int32),
        temperature=np.ones((rows,), np.float32),
    )


def test_each_pass_visits_every_text_once() -> None:
    batch = texts().batches(5, seed=0)
    seen = np.concatenate([batch(step)["tokens"][:, 0] for step in range(7)]).reshape(5, 7)
    for one_pass in seen:
        assert sorted(one_pass) == list(range(7))
    assert len({tuple(one_pass) for one_pass in seen}) > 1
    again = texts().batches(5, seed=0)(3)["tokens"]
    np.testing.assert_array_equal(again, batch(3)["tokens"])
    assert batch(0)["first"].tolist() == [3] * 5


def test_saved_texts_come_back(tmp_path) -> None:
    texts().save(tmp_path / "texts.npz")
    back = Continuations.load(tmp_path / "texts.npz")
    np.testing.assert_array_equal(back.tokens, texts().tokens)
    np.testing.assert_array_equal(back.prompt, texts().prompt)
    np.testing.assert_array_equal(back.temperature, texts().temperature)


def test_a_prompt_of_one_token_has_no_anchor_and_texts_join() -> None:
    given = texts()
    given.prompt[2] = 1
    assert given.room(5).tolist() == [True, True, False, True, True, True, True]
    both = given.joined(texts(3))
    assert both.tokens[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    with pytest.raises(ValueError, match="texts of 20 and 21 tokens do not join"):
        given.joined(texts(3, 21))


def test_a_large_vocabulary_keeps_its_ids(tmp_path) -> None:
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(248_320) == np.uint32
    large = dataclasses.replace(texts(), tokens=texts().tokens.astype(np.uint32) + 248_000)
    large.save(tmp_path / "texts.npz")
    assert Continuations.load(tmp_path / "texts.npz").batches(7, 0)(0)["tokens"].max() == 248_006
    large.check(248_320)
    with pytest.raises(ValueError, match="hold token 248006, the verifier's vocabulary has 8192"):
        large.check(8192)


def test_texts_of_other_temperatures_are_refused() -> None:
    warm = dataclasses.replace(texts(), temperature=np.full(7, 0.7, np.float32))
    with pytest.raises(ValueError, match=r"the texts: temperature must be 0 or 1, got 0\.7"):
        warm.check(8192)


@pytest.mark.parametrize("wrong", ["arrays", "rows", "text"])
def test_other_files_are_refused(tmp_path, wrong: str) -> None:
    file = tmp_path / "texts.npz"
    if wrong == "text":
        file.write_text("no texts")
    elif wrong == "arrays":
        np.savez(file, tokens=np.zeros((2, 3)))
    else:
        dataclasses.replace(texts(), prompt=np.zeros(3, np.int32)).save(file)
    with pytest.raises(ValueError, match=r"holds no continuations|disagree about the number"):
        Continuations.load(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.full((7, 20), -1)}, "tokens must be at least 0, got int64 from -1 to -1"),
        ({"tokens": np.zeros((7, 20))}, "tokens must be integers, got float64"),
        ({"tokens": np.full((7, 20), "a")}, "tokens must be integers, got <U1"),
        ({"prompt": np.full(7, 4.0)}, "prompt must be integers, got float64"),
        ({"prompt": np.full(7, 21)}, r"prompt must be in 0\.\.20, got int64 from 21 to 21"),
        ({"prompt": np.full(7, -1)}, r"prompt must be in 0\.\.20"),
        ({"temperature": np.full(7, np.nan)}, "temperature must be 0 or 1, got nan"),
        ({"temperature": np.full(7, -1.0)}, "temperature must be 0 or 1, got -1"),
        (
            {"temperature": np.array([0, 1, 0.7, 1, 0.3, 0.7, 0], np.float32)},
            "temperature must be 0 or 1, got 0.3, 0.7",
        ),
        ({"temperature": np.full(7, "1")}, "temperature must be numbers, got <U1"),
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path, change: dict, message: str) -> None:
    dataclasses.replace(texts(), **change).save(tmp_path / "texts.npz")
    with pytest.raises(ValueError, match=rf"texts\.npz: {message}"):
        Continuations.load(tmp_path / "texts.npz")


def test_arrays_of_other_widths_are_taken(tmp_path) -> None:
    wide = {"prompt": np.full(7, 4, np.uint8), "temperature": np.ones(7, int)}
    dataclasses.replace(texts(), **wide).save(tmp_path / "texts.npz")
    back = Continuations.load(tmp_path / "texts.npz")
    assert (back.prompt.dtype, back.temperature.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": 0}, "batches must be positive, got 0"),
        ({"shortest": -3}, "shortest must be positive, got -3"),
        ({"greedy_share": 7}, r"greedy_share must lie in 0\.\.1, got 7"),
    ],
)
def test_options_out_of_range_are_refused(tiny_trio: Trio, options: dict, message: str) -> None:
    given = {"total": 20, "batches": 1, "vocab_limit": 83, **options}
    with pytest.raises(ValueError, match=message):
        generate_continuations(tiny_trio.verifier, lambda _: np.zeros((2, 4)), **given)


def test_left_out_texts_are_counted(capsys: pytest.CaptureFixture) -> None:
    given = texts()
    given.prompt[[1, 2]] = 17, 6
    usable, facts = given.counted(14, "weaver")
    assert len(usable.tokens) == 6
    assert facts == {"texts": 6, "texts_left_out": 1}
    assert "weaver: left out 1 of 7 texts" in capsys.readouterr().out


def test_texts_without_room_are_left_out_or_refused() -> None:
    given = texts()
    given.prompt[[1, 2]] = 17, 6  # 4 and 15 positions from the prompt's last token to the end
    assert given.usable(14).tokens[:, 0].tolist() == [0, 2, 3, 4, 5, 6]
    assert given.usable(3).tokens.shape[0] == 7
    with pytest.raises(ValueError, match="none of the 7 texts of 20 tokens has 17"):
        given.usable(17)
