"""Times kernels the way a model calls them: inside one program, on inputs that left the cache."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds per call over several runs of the same program."""

    median_us: float
    low_us: float
    high_us: float


def compile_chain(function: Callable, sets: Sequence[tuple], *, rounds: int) -> Callable:
    """Returns a compiled program that calls `function` on every input set, `rounds` times.

    Each call waits for the one before it, as layers do, and no launch waits for the host. The
    sets together should exceed the last-level cache. `function(token, *inputs)` must make its
    results depend on `token`, a float32 zero that carries the order.
    """

    def follow(outputs, token):
        # Behind a barrier, so that the compiler cannot compute the one element alone.
        first = jax.tree.leaves(lax.optimization_barrier(outputs))[0]
        element = first[(0,) * first.ndim].astype(jnp.float32)
        return jnp.where(element == jnp.inf, jnp.float32(1), jnp.float32(0)) + token

    def program(sets):
        def one_round(_, carry):
            token, _ = carry
            outputs = None
            for inputs in sets:
                outputs = function(token, *inputs)
                token = follow(outputs, token)
            return token, outputs

        outputs = jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.float32), *sets[0])
        outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)
        return lax.fori_loop(0, rounds, one_round, (jnp.float32(0), outputs))[0]

    return jax.jit(program).lower(list(sets)).compile()


def measure(compiled: Callable, sets: Sequence[tuple], *, calls: int, repeats: int = 9) -> Timing:
    """Returns the time per call of a program of `compile_chain` that makes `calls` calls."""
    sets = list(sets)
    compiled(sets).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        compiled(sets).block_until_ready()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return Timing(median_us=statistics.median(times), low_us=min(times), high_us=max(times))
