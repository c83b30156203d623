"""Residual addition and norm: checks and choice of implementation."""

import jax

from pallas_kernels.add_norm import pallas, reference, xla
from pallas_kernels.checks import check_array
from pallas_kernels.choice import Implementation, choose, interpreted


def add_norm(
    x: jax.Array,
    delta: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    zero_centred: bool = False,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Returns `y = x + delta` and `y / rms(y) * weight` over the last axis, both like `x`.

    The sum is rounded to the type of `x`; the norm is computed from the rounded sum in float32
    and rounded once.

    Args:
      x: [N, H] float32 or bfloat16.
      delta: like `x`.
      weight: [H] float32 or bfloat16.
      eps: added to the mean square.
      zero_centred: multiply by 1 + weight.
      implementation: "auto" takes "pallas" on a GPU that supports it, else "xla". "pallas" runs
        interpreted on a CPU and takes H up to 16384. "reference" goes row by row.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes that do not belong together, or an unknown implementation.
      NotImplementedError: "pallas" on a device or for an H it does not support.
    """
    _check(x, delta, weight)
    match choose("add_norm", implementation, pallas.refusal(x.shape[1])):
        case "reference":
            return reference.add(x, delta, weight, eps, zero_centred)
        case "xla":
            return xla.add(x, delta, weight, eps, zero_centred)
        case _:
            return pallas.add(x, delta, weight, eps, zero_centred, interpret=interpreted())


def _check(x, delta, weight) -> None:
    for name, array in (("x", x), ("delta", delta), ("weight", weight)):
        check_array(name, array)
    if delta.dtype != x.dtype:
        raise TypeError(f"delta must be {x.dtype} like x, got {delta.dtype}")
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have two axes, none empty, got {x.shape}")
    for name, array, shape in (("delta", delta, x.shape), ("weight", weight, x.shape[1:])):
        if array.shape != shape:
            raise ValueError(f"{name} must be {shape} for x {x.shape}, got {array.shape}")
