"""Products of a few rows: checks and choice of implementation."""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels.checks import check_array
from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.skinny_matmul import pallas, reference, xla

_TALL = 24576  # outputs; with more of them every block reads the rows once more
_ROWS_OF_TALL = 32  # up to which such a weight is read faster than by XLA


def skinny_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    parts: bool = False,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Returns `x @ weight.T` [M, N] like `x`, summed in float32; forward only.

    Args:
      x: [M, K] float32 or bfloat16.
      weight: [N, K] like `x`.
      parts: the result may also be float32 [S, M, N], terms that are still to be summed over the
        first axis and rounded, as `add_norm` does for its `delta`.
      implementation: "auto" takes "pallas" on a GPU that supports it where it was measured to be
        faster, else "xla". "pallas" runs interpreted on a CPU; it takes bfloat16, up to 144 rows
        and a K that is a multiple of 64. "reference" goes row by row.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes that do not belong together, or an unknown implementation.
      NotImplementedError: "pallas" on a device or for shapes it does not support.
    """
    _check(x, weight)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    reason = pallas.refusal(rows, inputs, x.dtype)
    if implementation == "auto" and (reason or not _faster(rows, outputs)):
        implementation = "xla"
    match choose("skinny_matmul", implementation, reason):
        case "reference":
            return reference.multiply(x, weight)
        case "xla":
            return xla.multiply(x, weight)
        case _:
            return _kernel(parts)(x, weight)


@functools.cache
def _kernel(parts: bool):
    """The kernel; under `vmap`, where the rows are many, one product by XLA."""

    @custom_vmap
    def multiply(x, weight):
        return pallas.multiply(x, weight, parts, interpret=interpreted())

    @multiply.def_vmap
    def multiply_many(size, batched, x, weight):
        one = [y[0] if b else y for y, b in zip((x, weight), batched, strict=True)]
        outline = jax.eval_shape(multiply, *one)
        if batched == [True, False]:
            product = xla.multiply(x.reshape(-1, x.shape[-1]), weight)
            product = product.reshape(*x.shape[:2], -1)
        else:
            axes = tuple(0 if b else None for b in batched)
            product = jax.vmap(xla.multiply, in_axes=axes, axis_size=size)(x, weight)
        if parts:
            rest = jnp.zeros((size, outline.shape[0] - 1, *outline.shape[1:]), outline.dtype)
            product = jnp.concatenate([product[:, None].astype(outline.dtype), rest], axis=1)
        return product, True

    return multiply


def _faster(rows: int, outputs: int) -> bool:
    """Whether the kernel beats XLA, by timings on an H200 at the shapes of Qwen3.6-27B."""
    return rows <= (pallas.FASTEST_ROWS if outputs <= _TALL else _ROWS_OF_TALL)


def _check(x, weight) -> None:
    for name, array in (("x", x), ("weight", weight)):
        check_array(name, array)
    if weight.dtype != x.dtype:
        raise TypeError(f"weight must be {x.dtype} like x, got {weight.dtype}")
    for name, array in (("x", x), ("weight", weight)):
        if array.ndim != 2 or 0 in array.shape:
            raise ValueError(f"{name} must have two axes, none empty, got {array.shape}")
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight must be [N, {x.shape[1]}] for x {x.shape}, got {weight.shape}")
