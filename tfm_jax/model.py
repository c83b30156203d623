"""Model: load, generate, stream, logits. Thin: it wires the rooms together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tfm_jax.checkpoints import build_drafter, build_verifier, build_weaver, read_trio
from tfm_jax.checkpoints.trio import check_dtype
from tfm_jax.config import Sampling, TreeConfig, as_int, integer_up_to
from tfm_jax.decoding.accept import Acceptance
from tfm_jax.decoding.generate import (
    Stats,
    bucket,
    decode,
    rounds_limit,
    summarise,
    text_so_far,
)
from tfm_jax.decoding.prefill import prefill, score
from tfm_jax.decoding.round import METHODS, draft_depth, shape_for, speculate
from tfm_jax.decoding.state import DecodeState, Request, Trio, make_request, networks_for
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.layers import stack_projections
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.models.weaver import Weaver
from tfm_jax.presets import geometry
from tfm_jax.text import StreamDecoder, Tokenizer, known_ids, load_tokenizer
from tfm_jax.tree import Tree

POCKET = "pocket"
Prompt = str | Sequence[int]

_speculate = jax.jit(speculate, static_argnames=("method", "shape"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The answer to a prompt.

    Attributes:
      text: of the new tokens, special tokens left out; empty without a tokenizer.
      tokens: new ids, an end token included.
      finish_reason: "stop" after an end token, "length" at the limit.
      stats: what the run did.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A verifier with, if loaded, its drafter and Weaver.

    Attributes:
      trio: the networks, on the default device.
      tokenizer: None if the checkpoint had none; prompts are ids then.
      end_tokens: ids that stop generation.
    """

    trio: Trio
    tokenizer: Tokenizer | None
    end_tokens: tuple[int, ...]

    @property
    def vocab_limit(self) -> int:
        """Ids from here on are padding of the vocabulary: never accepted, never emitted."""
        return known_ids(self.tokenizer, self.trio.verifier.config.vocab_size)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that the loaded networks can run."""
        if self.trio.drafter is None:
            return METHODS[:1]
        return METHODS if self.trio.weaver is not None else METHODS[:3]

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        method: str = "tfm",
        tree: TreeConfig | None = None,
        sampling: Sampling | None = None,
        end_tokens: Sequence[int] | None = None,
    ) -> Generation:
        """Continues a prompt; every method emits the same tokens, in fewer or more rounds.

        Args:
          prompt: text, or token ids; at least one token.
          max_new_tokens: generation stops there; 0 gives an empty answer.
          method: "ar", "dflash" (chain), "ddtree" (marginals) or "tfm" (Weaver).
          tree: shape of the drafts. "ar" drafts nothing, "dflash" and "ddtree" use its budget
            and pool.
          sampling: greedy if not given.
          end_tokens: instead of the checkpoint's own; an empty list never stops.

        Raises:
          ValueError, TypeError: a bad argument, before any compute.
        """
        run = self._prepare(prompt, max_new_tokens, method, tree, sampling, end_tokens)
        return run.finish(self)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        method: str = "tfm",
        tree: TreeConfig | None = None,
        sampling: Sampling | None = None,
        end_tokens: Sequence[int] | None = None,
        every: int = 4,
    ) -> Iterator[str | Generation]:
        """Yields pieces of text, read back every few rounds, then the whole `Generation`.

        The pieces joined are the text of the generation; no piece breaks a character.
        """
        rounds = as_int(every)
        if rounds is None or not 1 <= rounds < 2**20:
            raise ValueError(f"every must be a positive number of rounds, got {every!r}")
        run = self._prepare(prompt, max_new_tokens, method, tree, sampling, end_tokens)
        return run.stream(self, rounds)

    def rounds(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        method: str = "tfm",
        tree: TreeConfig | None = None,
        sampling: Sampling | None = None,
        end_tokens: Sequence[int] | None = None,
    ) -> Iterator[tuple[Tree, Acceptance, DecodeState]]:
        """Yields what each round drafted and accepted, and the state after it; to look inside."""
        run = self._prepare(prompt, max_new_tokens, method, tree, sampling, end_tokens)
        return run.rounds()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Plain forward pass: logits [T, vocabulary rows] float32 after each of T tokens."""
        tokens = self._ids(token_ids)
        self._check_length(len(tokens), 0)
        capacity = bucket(len(tokens) + 1, len(tokens), 0)
        return score(networks_for(self.trio, "ar"), tokens, capacity)

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Token ids [T] int32 of a prompt.

        Raises:
          ValueError, TypeError: no token, a token outside the vocabulary, or text without a
            tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give the prompt as token ids")
            return self._ids(self.tokenizer.encode(prompt))
        return self._ids(prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; empty without a tokenizer.

        Raises:
          ValueError, TypeError: a token outside the vocabulary, or no list of integers.
        """
        if self.tokenizer is None or not len(tokens):
            return ""
        return self.tokenizer.decode(self._ids(tokens).tolist())

    def _ids(self, tokens: Sequence[int]) -> np.ndarray:
        if isinstance(tokens, (bytes, bytearray, memoryview)):
            raise TypeError(f"token ids must be a list of integers, got {type(tokens).__name__}")
        try:
            ids = np.asarray(tokens)
        except ValueError as error:
            raise TypeError(f"token ids must be a flat list of integers: {error}") from None
        if ids.ndim != 1:
            raise TypeError(f"a prompt is text or a list of token ids, got {type(tokens).__name__}")
        if ids.size == 0:
            raise ValueError("a prompt needs at least one token, this one is empty")
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"token ids must be integers of at most 64 bits, got {ids.dtype}")
        outside = ids[(ids < 0) | (ids >= self.vocab_limit)]
        if outside.size:
            raise ValueError(
                f"token ids must lie in 0..{self.vocab_limit - 1}, got {outside[:5].tolist()}"
            )
        return ids.astype(np.int32)

    def _ends(self, tokens: Sequence[int]) -> tuple[int, ...]:
        if isinstance(tokens, str):
            raise TypeError(f"end_tokens must be a list of token ids, got {tokens!r}")
        try:
            given = list(tokens)
        except TypeError:
            raise TypeError(f"end_tokens must be a list of token ids, got {tokens!r}") from None
        return tuple(dict.fromkeys(self._ids(given).tolist())) if given else ()

    def _check_length(self, prompt: int, new: int) -> None:
        limit = self.trio.verifier.config.max_position_embeddings
        if prompt + new > limit:
            raise ValueError(
                f"{prompt} prompt tokens and {new} new ones make {prompt + new}, "
                f"but the model's limit is {limit} positions"
            )

    def _prepare(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        method: str,
        tree: TreeConfig | None,
        sampling: Sampling | None,
        end_tokens: Sequence[int] | None,
    ) -> _Run:
        trio = networks_for(self.trio, method)
        new = as_int(max_new_tokens)
        if new is None:
            raise TypeError(f"max_new_tokens must be an integer, got {max_new_tokens!r}")
        if new < 0:
            raise ValueError(f"max_new_tokens must not be negative, got {new}")
        tree = TreeConfig() if tree is None else tree
        sampling = Sampling() if sampling is None else sampling
        for name, value, kind in (("tree", tree, TreeConfig), ("sampling", sampling, Sampling)):
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
        tokens = self.encode(prompt)
        self._check_length(len(tokens), new)
        total = len(tokens) + new
        ends = self.end_tokens if end_tokens is None else self._ends(end_tokens)
        return _Run(
            trio=trio,
            method=method,
            shape=shape_for(trio, method, tree),
            tokens=tokens,
            request=make_request(
                sampling,
                end_tokens=ends,
                vocab_limit=self.vocab_limit,
                total=total,
            ),
            capacity=bucket(len(tokens), total, draft_depth(trio, method)),
            ends=ends,
            empty=new == 0,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """One checked request."""

    trio: Trio
    method: str
    shape: TreeConfig
    tokens: np.ndarray
    request: Request
    capacity: int
    ends: tuple[int, ...]
    empty: bool

    def prefill(self) -> DecodeState:
        # The Weaver has no part in it: without it, one program serves all drafted methods.
        trio = dataclasses.replace(self.trio, weaver=None, growth=None)
        return prefill(trio, self.tokens, self.capacity)

    def start(self) -> tuple[DecodeState, float, float]:
        """The prefilled state, and the seconds that prefill and compilation took."""
        begin = time.perf_counter()
        state = jax.block_until_ready(self.prefill())
        filled = time.perf_counter()
        state = jax.block_until_ready(self.advance(state, 0))
        return state, filled - begin, time.perf_counter() - filled

    def advance(self, state: DecodeState, until: int | None) -> DecodeState:
        return decode(
            self.trio,
            state,
            self.request,
            rounds_limit(until),
            method=self.method,
            shape=self.shape,
        )

    def finish(self, model: Model) -> Generation:
        if self.empty:
            return self.nothing()
        state, prefill_seconds, compile_seconds = self.start()
        begin = time.perf_counter()
        state = jax.block_until_ready(self.advance(state, None))
        return self.result(
            model, state, prefill_seconds, time.perf_counter() - begin, compile_seconds
        )

    def stream(self, model: Model, every: int) -> Iterator[str | Generation]:
        if self.empty:
            yield self.nothing()
            return
        state, prefill_seconds, compile_seconds = self.start()
        decoder = None if model.tokenizer is None else StreamDecoder(model.tokenizer)
        begin, shown, done = time.perf_counter(), 0, False
        while not done:
            state = self.advance(state, int(state.rounds) + every)
            tokens = text_so_far(state, len(self.tokens))
            done = bool(state.finished)
            if decoder is not None:
                piece = decoder.push(tokens[shown:]) + (decoder.flush() if done else "")
                shown = len(tokens)
                if piece:
                    yield piece
        seconds = time.perf_counter() - begin
        yield self.result(model, state, prefill_seconds, seconds, compile_seconds)

    def rounds(self) -> Iterator[tuple[Tree, Acceptance, DecodeState]]:
        if self.empty:
            return
        state = self.prefill()
        while not bool(state.finished):
            state, tree, acceptance = _speculate(
                self.trio, state, self.request, method=self.method, shape=self.shape
            )
            yield tree, acceptance, state

    def result(
        self,
        model: Model,
        state: DecodeState,
        prefill_seconds: float,
        decode_seconds: float,
        compile_seconds: float,
    ) -> Generation:
        tokens = text_so_far(state, len(self.tokens))
        return Generation(
            text=model.decode(tokens),
            tokens=tokens,
            finish_reason="stop" if tokens[-1] in self.ends else "length",
            stats=summarise(
                state,
                prefill_seconds=prefill_seconds,
                decode_seconds=decode_seconds,
                compile_seconds=compile_seconds,
            ),
        )

    def nothing(self) -> Generation:
        stats = Stats(
            rounds=0,
            emitted_tokens=0,
            drafted_nodes=0,
            accepted_lengths=(),
            acceptance_by_depth=(),
            mean_accepted_length=0.0,
            prefill_seconds=0.0,
            decode_seconds=0.0,
            compile_seconds=0.0,
        )
        return Generation(text="", tokens=[], finish_reason="length", stats=stats)


def load(path: str | Path = POCKET, *, dtype: str | None = None) -> Model:
    """Loads a model onto the default device.

    Args:
      path: "pocket" for the embedded trio; else a directory made by the converter, or one with
        `verifier/`, `dflash/` and `weaver/` in their published layouts.
      dtype: "float32" or "bfloat16" of weights and activations; float32 on a CPU and bfloat16
        elsewhere if not given. Recurrent states are float32 in either.

    Raises:
      CheckpointError: files that are missing, damaged or do not belong together.
    """
    found = read_trio(directory(path), dtype=default_dtype(dtype))
    verifier, drafter, weaver = found.verifier, found.drafter, found.weaver
    trio = Trio(
        verifier=build_verifier(verifier.config, verifier.params),
        drafter=build_drafter(drafter.config, drafter.params) if drafter else None,
        weaver=build_weaver(weaver.config, weaver.params) if weaver else None,
    )
    return Model(
        trio=serving(trio),
        tokenizer=load_tokenizer(found.tokenizer) if found.tokenizer else None,
        end_tokens=found.eos_token_ids,
    )


def random_model(preset: str | Path, *, seed: int = 0, dtype: str | None = None) -> Model:
    """A model of a preset's sizes with seeded random weights, made on the default device.

    It writes noise, at the speed of the real one.

    Args:
      preset: a name of `tfm_jax.presets`, or a JSON file with three geometries.
      seed: of the weights, 0 to 2**32 - 1.
      dtype: as in `load`.

    Raises:
      ConfigError: an unknown preset, sizes that do not fit, or a seed that is none.
      ValueError: an unknown dtype.
    """
    seed = integer_up_to(2**32 - 1, "seed", seed)
    kind = jnp.dtype(check_dtype(default_dtype(dtype)))
    sizes = geometry(preset)
    rngs = nnx.Rngs(seed)
    weaver = Weaver(sizes.weaver, rngs=rngs, dtype=kind)
    # A Weaver starts without influence; random weights stand for a trained one.
    query = weaver.lm_head_query_in.weight
    query[...] = 0.02 * jax.random.normal(rngs.params(), query.shape, kind)
    trio = Trio(
        verifier=Verifier(sizes.verifier, rngs=rngs, dtype=kind),
        drafter=Drafter(sizes.drafter, rngs=rngs, dtype=kind),
        weaver=weaver,
    )
    return Model(
        trio=serving(trio),
        tokenizer=None,
        end_tokens=sizes.verifier.eos_token_ids,
    )


def serving(trio: Trio) -> Trio:
    """The trio, changed in place into the form that decodes fastest."""
    stack_projections(trio.verifier)
    if trio.drafter is not None:
        trio.drafter.stack()
    if trio.weaver is None or jax.default_backend() == "cpu":  # no launches to save there
        return trio
    embeddings = trio.verifier.embed_tokens.weight[...]
    growth = trio.weaver.growth_weights(embeddings, trio.verifier.output_rows)
    return dataclasses.replace(trio, growth=growth)


def default_dtype(name: str | None) -> str:
    """`name`, or where it is None the type that suits the default device."""
    if name is not None:
        return name
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def directory(path: str | Path) -> Path:
    """Where a model lies: the embedded trio for "pocket", else `path` itself."""
    return Path(__file__).parent / "assets" / "pocket" if path == POCKET else Path(path)
