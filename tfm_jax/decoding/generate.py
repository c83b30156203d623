"""The device loop over rounds, and what a run reports about itself."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.config import TreeConfig
from tfm_jax.decoding.prefill import rows_touched
from tfm_jax.decoding.round import speculate
from tfm_jax.decoding.state import DecodeState, Request, Trio

_SMALLEST = 256
_BEYOND = 64  # kernels read blocks of so many rows without a mask where they fill the cache
_MAKING = threading.Lock()  # loops of many shapes are compiled in threads, all at once
# What a loop is made of. XLA leaves WHILE out of CUDA graphs unless told.
_IN_GRAPHS = (
    *("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION"),
    *("CONDITIONAL", "WHILE"),
)


def run_rounds(
    trio: Trio,
    state: DecodeState,
    request: Request,
    until: jax.Array,
    *,
    method: str,
    shape: TreeConfig,
) -> DecodeState:
    """Runs rounds on the device until the request is finished or `until` rounds are done."""

    def unfinished(state: DecodeState) -> jax.Array:
        return ~state.finished & (state.rounds < until)

    def next_round(state: DecodeState) -> DecodeState:
        return speculate(trio, state, request, method, shape)[0]

    return jax.lax.while_loop(unfinished, next_round, state)


def device_loop() -> Any:
    """`run_rounds`, jitted for the default device; `state` is donated."""
    with _MAKING:
        return _device_loop()


@functools.cache
def _device_loop() -> Any:
    return jax.jit(
        run_rounds,
        static_argnames=("method", "shape"),
        donate_argnames="state",
        compiler_options=_one_graph() if jax.default_backend() == "gpu" else None,
    )


def decode(
    trio: Trio,
    state: DecodeState,
    request: Request,
    until: jax.Array,
    *,
    method: str,
    shape: TreeConfig,
) -> DecodeState:
    """`run_rounds`, compiled once for every method, shape and capacity; `state` is donated."""
    return device_loop()(trio, state, request, until, method=method, shape=shape)


def _one_graph() -> dict[str, Any] | None:
    """Compiler options that put the whole loop into one CUDA graph, its condition included.

    Otherwise the host reads the condition after every round before it launches the next one. None
    where this XLA has no such options, and where XLA_FLAGS already say what belongs into graphs.
    """
    if "xla_gpu_enable_command_buffer" in os.environ.get("XLA_FLAGS", ""):
        return None
    options = {
        "xla_gpu_enable_command_buffer": ",".join(_IN_GRAPHS),
        "xla_gpu_graph_min_graph_size": 1,  # the loop is one step of its program
    }
    try:
        jax.jit(lambda: jnp.int32(0), compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        warnings.warn(f"the host takes part in every round: {error}", stacklevel=2)
        return None
    return options


def bucket(prompt: int, total: int, depth: int) -> int:
    """Cache capacity for a request, of a few sizes, so that few programs serve all lengths.

    A power of two for the text, and room beyond it for a round: a text that fills its power
    would else take twice the cache.

    Args:
      prompt: tokens of the prompt.
      total: tokens of prompt and answer.
      depth: deepest tree node; a round writes that many rows beyond the text.
    """
    text = max(total, rows_touched(prompt - 1), _SMALLEST)
    return (1 << (text - 1).bit_length()) + -(-(depth + 1) // _BEYOND) * _BEYOND


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What a run did.

    Attributes:
      rounds: verification passes.
      emitted_tokens: tokens generated.
      drafted_nodes: nodes drafted over all rounds.
      accepted_lengths: tokens emitted by each round, bonus included.
      acceptance_by_depth: entry d - 1 is the share of rounds that accepted a node of depth d,
        among those that drafted one.
      mean_accepted_length: emitted tokens / rounds.
      prefill_seconds: wall time, with the compilation of piece sizes not met before.
      decode_seconds: wall time of the rounds, compilation not included.
      compile_seconds: wall time of tracing and compiling the loop, near zero when cached.
    """

    rounds: int
    emitted_tokens: int
    drafted_nodes: int
    accepted_lengths: tuple[int, ...]
    acceptance_by_depth: tuple[float, ...]
    mean_accepted_length: float
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding."""
        return self.emitted_tokens / self.decode_seconds if self.decode_seconds else 0.0


def summarise(
    state: DecodeState, *, prefill_seconds: float, decode_seconds: float, compile_seconds: float
) -> Stats:
    """Reads a finished state back and counts."""
    rounds = int(state.rounds)
    accepted = np.asarray(state.accepted)[:rounds]
    deepest = np.asarray(state.deepest)[:rounds]
    depths = range(1, int(deepest.max(initial=0)) + 1)
    emitted = int(accepted.sum())
    return Stats(
        rounds=rounds,
        emitted_tokens=emitted,
        drafted_nodes=int(np.asarray(state.drafted)[:rounds].sum()),
        accepted_lengths=tuple(accepted.tolist()),
        acceptance_by_depth=tuple(
            float((accepted > d).sum() / (deepest >= d).sum()) for d in depths
        ),
        mean_accepted_length=emitted / rounds if rounds else 0.0,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        compile_seconds=compile_seconds,
    )


def text_so_far(state: DecodeState, prompt: int) -> list[int]:
    """Tokens emitted so far, the anchor included."""
    length = int(state.length)
    return np.asarray(state.tokens)[prompt : length + 1].tolist()


def rounds_limit(count: int | None = None) -> jax.Array:
    """The `until` argument of `decode`; None runs to the end."""
    return jnp.int32(np.iinfo(np.int32).max if count is None else count)
