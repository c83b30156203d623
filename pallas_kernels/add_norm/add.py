"""Residual addition and norm: checks and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.add_norm import pallas, reference, xla
from pallas_kernels.checks import check_array, check_epsilon
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
      delta: like `x`, or float32 [S, N, H], parts that are summed in order and rounded to the type
        of `x` first: a product as `skinny_matmul` leaves it.
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
    check_epsilon("eps", eps)
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
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have two axes, none empty, got {x.shape}")
    parts = delta.ndim == 3 and delta.shape[0] > 0
    if delta.dtype != (jnp.float32 if parts else x.dtype):
        wanted = "float32 in parts" if parts else f"{x.dtype} like x"
        raise TypeError(f"delta must be {wanted}, got {delta.dtype}")
    if delta.shape[parts:] != x.shape:
        raise ValueError(f"delta must be {x.shape} or [S, *{x.shape}], got {delta.shape}")
    if weight.shape != x.shape[1:]:
        raise ValueError(f"weight must be {x.shape[1:]} for x {x.shape}, got {weight.shape}")
