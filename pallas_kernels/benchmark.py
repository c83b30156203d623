"""Times kernels the way a model calls them: inside one program, on inputs that left the cache."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds per call over several runs of the same program."""

    median_us: float
    low_us: float
    high_us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """A compiled program that calls one function many times, each call after the one before."""

    program: Callable
    sets: list[tuple]
    calls: int
    carried: int

    def measure(self, repeats: int = 9) -> Timing:
        """Returns the time per call over `repeats` runs of the program."""
        held = jax.tree.map(jnp.copy, [x[: self.carried] for x in self.sets])
        fixed = [x[self.carried :] for x in self.sets]
        _, held = jax.block_until_ready(self.program(held, fixed))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            _, held = jax.block_until_ready(self.program(held, fixed))
            times.append((time.perf_counter() - start) / self.calls * 1e6)
        return Timing(median_us=statistics.median(times), low_us=min(times), high_us=max(times))


def compile_chain(
    function: Callable, sets: Sequence[tuple], *, rounds: int, carried: int = 0
) -> Chain:
    """Returns a program that calls `function` on every input set in turn, `rounds` times over.

    Each call waits for the one before it, as layers do, and no launch waits for the host. The
    sets together should exceed the last-level cache.

    Args:
      function: `function(token, *inputs)`; its results must depend on `token`, a float32 zero
        that carries the order. It returns a tuple of arrays.
      sets: the inputs, rotated through.
      rounds: passes over all sets.
      carried: leading inputs that a call replaces, for functions that update in place: they come
        back as the first `carried` results, with at least one more after them.
    """

    function = jax.jit(function)  # traced and lowered once, not for every set

    def follow(outputs: Any, token: jax.Array) -> jax.Array:
        # Behind a barrier, so that the compiler cannot compute the elements alone; of every
        # result, as it drops the others.
        results = lax.optimization_barrier([x for x in jax.tree.leaves(outputs) if x.size])
        for x in results:
            element = x[(0,) * x.ndim].astype(jnp.float32)
            token += jnp.where(element == jnp.inf, jnp.float32(1), jnp.float32(0))
        return token

    def program(held: list[tuple], fixed: list[tuple]):
        def one_round(_, carry):
            token, held, _ = carry
            advanced, outputs = [], None
            for mine, rest in zip(held, fixed, strict=True):
                outputs = function(token, *mine, *rest)
                token = follow(outputs, token)
                advanced.append(tuple(outputs[:carried]))
                outputs = outputs[carried:]
            return token, advanced, outputs

        def kept(token, *inputs):
            return function(token, *inputs)[carried:]

        shapes = jax.eval_shape(kept, jnp.float32(0), *held[0], *fixed[0])
        outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        carry = (jnp.float32(0), held, outputs)
        token, held, _ = lax.fori_loop(0, rounds, one_round, carry)
        return token, held

    sets = [tuple(x) for x in sets]
    held, fixed = [x[:carried] for x in sets], [x[carried:] for x in sets]
    compiled = jax.jit(program, donate_argnums=0).lower(held, fixed).compile()
    return Chain(program=compiled, sets=sets, calls=len(sets) * rounds, carried=carried)
