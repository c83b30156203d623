"""Texts that a verifier writes itself: what its drafter and its Weaver are trained on.

Stored are the tokens alone. Hidden states, features and distributions are recomputed by the
frozen verifier in every training step: a forward pass costs less than the drafter's own step,
while storing what it gives would take a thousand times the room.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.config import Sampling
from tfm_jax.decoding.commit import advance
from tfm_jax.decoding.sampling import choose
from tfm_jax.decoding.state import Request, make_request
from tfm_jax.files import whole_file
from tfm_jax.models.qwen36 import Cache, Verifier
from tfm_jax.training.batches import NOT_NPZ, token_dtype
from tfm_jax.training.settings import check_count, check_share
from tfm_jax.tree import ROOT, plant, topology

COPY = 8  # tokens in a row that count as a copy when they return


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuations:
    """R texts of equal length: a prompt each, then what the verifier wrote.

    Attributes:
      tokens: [R, T] uint16, or uint32 for a vocabulary beyond it.
      prompt: [R] int32, tokens of the prompt.
      temperature: [R] float32, 0 or 1.
    """

    tokens: np.ndarray
    prompt: np.ndarray
    temperature: np.ndarray

    def save(self, path: Path) -> None:
        """Writes an uncompressed npz file, whole or not at all."""
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        with whole_file(path) as partial, partial.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Continuations:
        """Reads what `save` wrote.

        Raises:
          ValueError: another kind of file, or arrays of other types or values or that do not fit
            together.
          OSError: the file cannot be read.
        """
        expected = {f.name for f in dataclasses.fields(cls)}
        try:
            with np.load(path) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        except NOT_NPZ as error:
            raise ValueError(f"{path} holds no continuations: {error}") from None
        shapes = {name: array.shape for name, array in found.items()}
        rows = shapes.get("prompt", ())
        if set(found) != expected or len(shapes["tokens"]) != 2 or len(rows) != 1:
            raise ValueError(f"{path} holds no continuations: arrays {shapes}")
        if not rows == shapes["temperature"] == shapes["tokens"][:1]:
            raise ValueError(f"{path}: the arrays disagree about the number of texts: {shapes}")
        _check_values(path, **found)
        return cls(
            tokens=found["tokens"],
            prompt=found["prompt"].astype(np.int32),
            temperature=found["temperature"].astype(np.float32),
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the arrays."""
        hashed = hashlib.sha256()
        for field in dataclasses.fields(self):
            hashed.update(np.ascontiguousarray(getattr(self, field.name)).tobytes())
        return hashed.hexdigest()

    def rows(self, chosen: np.ndarray) -> Continuations:
        """Some of the rows, by indices or a mask."""
        return Continuations(
            **{f.name: getattr(self, f.name)[chosen] for f in dataclasses.fields(self)}
        )

    def joined(self, other: Continuations) -> Continuations:
        """These texts and then others of the same length."""
        if self.tokens.shape[1] != other.tokens.shape[1]:
            raise ValueError(
                f"texts of {self.tokens.shape[1]} and {other.tokens.shape[1]} tokens do not join"
            )
        fields = (f.name for f in dataclasses.fields(self))
        return Continuations(
            **{n: np.concatenate([getattr(self, n), getattr(other, n)]) for n in fields}
        )

    def check(self, vocab_limit: int) -> None:
        """Refuses texts that training has no targets for.

        Raises:
          ValueError: a token from `vocab_limit` on, or a temperature other than 0 and 1.
        """
        if self.tokens.size and int(self.tokens.max()) >= vocab_limit:
            raise ValueError(
                f"the texts hold token {self.tokens.max()}, the verifier's vocabulary has "
                f"{vocab_limit} tokens: another model wrote them"
            )
        _check_temperature("the texts", self.temperature)

    def room(self, depth: int) -> np.ndarray:
        """Which rows have an anchor with `depth` tokens after it, bool [R].

        The first anchor is the prompt's last token; a state before it must have predicted it.

        Raises:
          ValueError: there is none.
        """
        keep = (self.prompt >= 2) & (self.prompt - 1 + depth < self.tokens.shape[1])
        if not keep.any():
            raise ValueError(
                f"none of the {keep.size} texts of {self.tokens.shape[1]} tokens has {depth} "
                "tokens after a prompt of at least 2"
            )
        return keep

    def copied(self, length: int = COPY) -> np.ndarray:
        """Share of each continuation that repeats what the text said before, float64 [R].

        A token counts if the `length` tokens that end with it stand earlier in the same text.
        """
        rows, total = self.tokens.shape
        if total <= length:
            return np.zeros(rows)
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens, length, axis=1)
        factors = np.random.default_rng(length).integers(2**64, size=length, dtype=np.uint64) | 1
        marks = np.zeros(windows.shape[:2], np.uint64)  # equal windows have equal marks
        for j, factor in enumerate(factors):
            marks += windows[:, :, j].astype(np.uint64) * factor
        order = np.argsort(marks, axis=1, kind="stable")
        ranked = np.take_along_axis(marks, order, axis=1)
        again = np.zeros(marks.shape, bool)
        np.put_along_axis(again, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], axis=1)
        written = np.arange(length - 1, total) >= self.prompt[:, None]
        return (again & written).sum(axis=1) / np.maximum(total - self.prompt, 1)

    def usable(self, depth: int) -> Continuations:
        """The rows with room, see `room`."""
        return self.rows(self.room(depth))

    def counted(self, depth: int, title: str) -> tuple[Continuations, dict[str, int]]:
        """The usable rows, and how many there are and how many were left out; says so, too."""
        usable = self.usable(depth)
        left_out = len(self.tokens) - len(usable.tokens)
        if left_out:
            print(
                f"{title}: left out {left_out} of {len(self.tokens)} texts: fewer than {depth} "
                "tokens after a prompt of at least 2",
                flush=True,
            )
        return usable, {"texts": len(usable.tokens), "texts_left_out": left_out}

    def batches(self, size: int, seed: int) -> Callable[[int], dict[str, np.ndarray]]:
        """Step number -> `size` rows; each pass visits the rows in a new random order.

        A batch holds `tokens` [size, T] int32, `first` [size] int32 (the earliest anchor: the
        prompt's last token) and `temperature` [size] float32.
        """
        rows = len(self.tokens)
        orders: dict[int, np.ndarray] = {}

        def order(turn: int) -> np.ndarray:
            if turn not in orders:
                orders.clear()
                orders[turn] = np.random.default_rng((seed, turn)).permutation(rows)
            return orders[turn]

        def batch(step: int) -> dict[str, np.ndarray]:
            turns, places = np.divmod(np.arange(step * size, (step + 1) * size), rows)
            chosen = np.concatenate([order(t)[places[turns == t]] for t in np.unique(turns)])
            return {
                "tokens": self.tokens[chosen].astype(np.int32),
                "first": self.prompt[chosen] - 1,
                "temperature": self.temperature[chosen],
            }

        return batch


def _check_values(
    path: Path, tokens: np.ndarray, prompt: np.ndarray, temperature: np.ndarray
) -> None:
    """Raises ValueError for arrays of another type, or values out of range."""

    def need(fits: bool, name: str, expected: str, found: np.ndarray) -> None:
        if not fits:
            shown = f"{found.dtype} from {found.min()} to {found.max()}" if found.size else found
            raise ValueError(f"{path}: {name} must be {expected}, got {shown}")

    for name, array, kinds in (
        ("tokens", tokens, "ui"),
        ("prompt", prompt, "ui"),
        ("temperature", temperature, "fui"),
    ):
        if array.dtype.kind not in kinds:
            expected = "integers" if kinds == "ui" else "numbers"
            raise ValueError(f"{path}: {name} must be {expected}, got {array.dtype}")
    total = tokens.shape[1]
    need(bool((tokens >= 0).all()), "tokens", "at least 0", tokens)
    need(bool(((prompt >= 0) & (prompt <= total)).all()), "prompt", f"in 0..{total}", prompt)
    _check_temperature(str(path), temperature)


def _check_temperature(source: str, temperature: np.ndarray) -> None:
    """Raises ValueError for other temperatures than training has targets for."""
    odd = np.unique(temperature[~np.isin(temperature, (0, 1))])
    if odd.size:
        shown = ", ".join(f"{value:g}" for value in odd[:5])
        raise ValueError(f"{source}: temperature must be 0 or 1, got {shown}")


def next_token(
    verifier: Verifier,
    token: jax.Array,
    caches: tuple[Cache, ...],
    position: jax.Array,
    request: Request,
) -> tuple[jax.Array, jax.Array, tuple[Cache, ...]]:
    """One step of plain decoding: the token after `token`, its logits [V], caches that hold it.

    Args:
      verifier: the model.
      token: int32 scalar, at `position`, which no cache holds yet.
      caches: of the text before it.
      position: int32 scalar.
      request: how the next token is chosen; its limit and end tokens are not looked at.
    """
    shape = topology(plant(jnp.int32(0), 1), verifier.config.linear_conv_kernel_dim)
    hidden, pending = verifier.verify(token[None], caches, position, shape)
    logits = verifier.logits(hidden.final)
    chosen = choose(logits, shape.depths, position[None] + 1, request)[0]
    caches = advance(caches, pending, jnp.full((1,), ROOT), jnp.int32(1), position)
    return chosen, logits[0], caches


def write_on(
    verifier: Verifier,
    prompts: jax.Array,
    lengths: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    *,
    total: int,
    vocab_limit: int,
) -> jax.Array:
    """Continues R prompts to `total` tokens each, [R, total] int32, one token of all a step.

    Every row equals plain decoding with its own seed and temperature, end tokens being ordinary
    ones. Prompts run through the same loop, so their lengths may differ.

    Args:
      verifier: the model.
      prompts: [R, P] int32; row r counts up to `lengths[r]`.
      lengths: [R] int32, between 1 and P.
      temperature: [R] float32.
      seeds: [R] uint32.
      total: static, at least P.
      vocab_limit: ids from here on are never written, see `Model.vocab_limit`.
    """
    rows, width = prompts.shape
    if width > total:
        raise ValueError(f"prompts of {width} tokens do not fit texts of {total}")
    common = make_request(Sampling(), end_tokens=(), vocab_limit=vocab_limit, total=total)

    def following(
        token: jax.Array,
        caches: tuple[Cache, ...],
        temperature: jax.Array,
        seed: jax.Array,
        position: jax.Array,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        request = dataclasses.replace(common, temperature=temperature, seed=seed)
        chosen, _, caches = next_token(verifier, token, caches, position, request)
        return chosen, caches

    # The position is the same in all rows: cache writes stay slices and do not become scatters.
    in_all = jax.vmap(following, in_axes=(0, 0, 0, 0, None))

    def step(
        position: jax.Array, carry: tuple[jax.Array, tuple[Cache, ...]]
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        tokens, caches = carry
        chosen, caches = in_all(tokens[:, position], caches, temperature, seeds, position)
        given = tokens[:, position + 1]
        chosen = jnp.where(position + 1 < lengths, given, chosen)
        return tokens.at[:, position + 1].set(chosen), caches

    tokens = jnp.zeros((rows, total), jnp.int32).at[:, :width].set(prompts)
    caches = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (rows, *x.shape)), verifier.empty_caches(total)
    )
    return jax.lax.fori_loop(0, total - 1, step, (tokens, caches))[0]


def generate_continuations(
    verifier: Verifier,
    prompts: Callable[[int], np.ndarray],
    *,
    total: int,
    batches: int,
    vocab_limit: int,
    shortest: int = 8,
    greedy_share: float = 0.5,
    most_copied: float = 1.0,
    seed: int = 0,
    seconds: float | None = None,
) -> Continuations:
    """Generates batch after batch of continuations, at temperatures 0 and 1.

    A small verifier's greedy texts soon run in a loop, which any drafter follows: `most_copied`
    below 1 leaves out the texts that have little else to teach.

    Args:
      verifier: the model, on the device.
      prompts: batch number -> tokens [R, P].
      total: tokens of a text, prompt included.
      batches: how many, at most.
      vocab_limit: see `write_on`.
      shortest: prompts are cut to random lengths from here to P.
      greedy_share: share of rows at temperature 0.
      most_copied: largest share of a continuation that may repeat the text before, see
        `Continuations.copied`.
      seed: of lengths and noise.
      seconds: stop before a batch that would end later than this; the first is always made.

    Raises:
      ValueError: `most_copied` or `greedy_share` is no share, `batches` or `shortest` is not
        positive, or all texts were left out.
    """
    check_count("batches", batches)
    check_count("shortest", shortest)
    check_share("greedy_share", greedy_share)
    check_share("most_copied", most_copied)
    run = jax.jit(write_on, static_argnames=("total", "vocab_limit"))
    begin = time.monotonic()
    parts: list[Continuations] = []
    took = 0.0
    for i in range(batches):
        if parts and seconds is not None and time.monotonic() - begin + took > seconds:
            break
        started = time.monotonic()
        given = prompts(i)
        rows, width = given.shape
        random = np.random.default_rng((seed, i))
        lengths = random.integers(min(shortest, width), width + 1, rows).astype(np.int32)
        hot = np.arange(rows) >= round(greedy_share * rows)
        temperature = hot.astype(np.float32)
        seeds = random.integers(2**32, size=rows, dtype=np.uint32)
        written = run(
            verifier, given, lengths, temperature, seeds, total=total, vocab_limit=vocab_limit
        )
        texts = Continuations(
            tokens=np.asarray(written).astype(token_dtype(vocab_limit)),
            prompt=lengths,
            temperature=temperature,
        )
        kept = texts.rows(texts.copied() <= most_copied)
        parts.append(kept)
        took = time.monotonic() - started
        print(
            f"continuations: batch {i + 1}  rows {rows}  kept {len(kept.tokens)}  "
            f"seconds {took:.1f}  tokens_per_second {rows * total / took:.5g}",
            flush=True,
        )
    fields = (f.name for f in dataclasses.fields(Continuations))
    whole = Continuations(
        **{name: np.concatenate([getattr(p, name) for p in parts]) for name in fields}
    )
    if not len(whole.tokens):
        raise ValueError(
            f"no text is left: more than most_copied = {most_copied:g} of each repeats what it "
            "said before; allow more, or lower greedy_share"
        )
    return whole
