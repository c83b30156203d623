"""What training computes a second, and what its device could."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from pallas_kernels.benchmark import compile_chain


def count_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """Floating-point operations of the matrix products in a call.

    A product of [m, k] and [k, n] counts 2 m k n. A `scan` counts as often as it runs, a `while`
    once, of a `cond` the branch with most; elementwise work and Pallas kernels do not count.

    Args:
      function: jitted or not; it is traced, neither compiled nor run.
      arguments: arrays, or their shapes and dtypes.
    """
    return _products(jax.make_jaxpr(function)(*arguments).jaxpr)


def _products(jaxpr: Jaxpr) -> int:
    """The operations of all `dot_general` in a program and in those that it calls."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left: Any = equation.invars[0].aval
            product: Any = equation.outvars[0].aval
            lengths = (left.shape[axis] for axis in contracted)
            total += 2 * math.prod(lengths) * math.prod(product.shape)
        elif name == "cond":
            total += max(_products(branch.jaxpr) for branch in params["branches"])
        elif name != "pallas_call":
            inner = (_products(program) for program in jaxprs_in_params(params))
            total += sum(inner) * (params["length"] if name == "scan" else 1)
    return total


def matrix_rate() -> float:
    """Floating-point operations per second of a large bfloat16 product on the first device."""
    size, repeats = (8192, 9) if jax.default_backend() == "gpu" else (1024, 3)
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = lambda token, x: ((x + token.astype(x.dtype)) @ x,)
    timing = compile_chain(product, [(a,)], rounds=8).measure(repeats)
    return 2 * size**3 / (timing.median_us * 1e-6)


def rates_of(record: Mapping[str, Any], devices: int) -> dict[str, float]:
    """Rates of a run, beside the matrix rate of its devices, which is measured now.

    Products count towards the share whatever their dtype; the matrix rate is that of bfloat16.

    Args:
      record: the last of the run, see `fit`.
      devices: that shared each step.

    Returns:
      steps_per_second, tokens_per_second, flops_per_step, tflops_per_second (10^12),
      matrix_tflops_per_second of all devices, share_of_matrix_rate.
    """
    flops = record["flops_per_step"] * record["steps_per_second"]
    matrix = devices * matrix_rate()
    kept = ("steps_per_second", "tokens_per_second", "flops_per_step")
    return {name: record[name] for name in kept} | {
        "tflops_per_second": round(flops / 1e12, 4),
        "matrix_tflops_per_second": round(matrix / 1e12, 4),
        "share_of_matrix_rate": round(flops / matrix, 4),
    }
