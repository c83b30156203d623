"""Queries, keys and values of an attention layer: checks and choice of implementation."""

import typing

import jax
import jax.numpy as jnp

from pallas_kernels.attention_inputs import pallas, reference, xla
from pallas_kernels.attention_inputs.columns import HeadColumns
from pallas_kernels.attention_inputs.rotary import turns
from pallas_kernels.checks import check_array, check_epsilon, check_part, check_range
from pallas_kernels.choice import Implementation, choose, interpreted


class AttentionInputs(typing.NamedTuple):
    """What `tree_attention` takes of every row, in the type of the projections.

    Attributes:
      q: [N, H, D], normed and rotated.
      k: [G, N, D], normed and rotated.
      v: [G, N, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array


def attention_inputs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    eps: float,
    *,
    heads: int,
    key_heads: int,
    theta: float,
    rotary: int,
    zero_centred: bool = False,
    columns: HeadColumns | None = None,
    implementation: Implementation = "auto",
) -> AttentionInputs:
    """Returns queries, keys and values of rows from their projections.

    Every head of queries and keys is divided by its root mean square and weighed, then its first
    `rotary` channels are turned by angles that grow with the row's position (Qwen3.5/3.6; partial
    rotary embedding, arXiv 2104.09864). Cosines and sines are rounded to the type of the rows, as
    the published models have them. With bfloat16 rows the kernel computes in float32 and rounds
    once; "xla" states the steps in bfloat16, which XLA may compute more precisely. They differ by
    roundings. "xla" can be differentiated.

    Args:
      q: [N, H * D] float32 or bfloat16, queries before their norm.
      k, v: [N, G * D] in the type of `q`.
      positions: int32 [N]. What is made of them alone is made once for all layers of a program.
      q_weight, k_weight: [D] float32 or bfloat16, of the norms.
      eps: added to the mean squares.
      heads: H.
      key_heads: G.
      theta: base of the angles' frequencies.
      rotary: channels that are turned, even, 2 to D.
      zero_centred: multiply by 1 + weight.
      columns: `q`, `k` and `v` are wider, as a rule one and the same stacked projection, and
        hold their parts from these columns on. The kernel reads them where they lie.
      implementation: "auto" takes "pallas" on a GPU that supports it, else "xla". "pallas" runs
        interpreted on a CPU. "reference" goes row by row in float32.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes that do not belong together, or an unknown implementation.
      NotImplementedError: "pallas" on a device it does not support.
    """
    _check_types(q, k, v, positions, q_weight, k_weight)
    if heads < 1 or key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"heads must be a positive multiple of key_heads, got {heads}, {key_heads}"
        )
    size = q_weight.shape[-1] if q_weight.ndim else 0
    if columns is None:
        _check_narrow(q, k, v, heads * size, key_heads * size)
        columns = HeadColumns(step=size)
    _check_shapes(q, k, v, positions, q_weight, k_weight, heads, key_heads, rotary, columns)
    if not 0 < theta < float("inf"):
        raise ValueError(f"theta must be positive, got {theta}")
    check_epsilon("eps", eps)
    chosen = choose("attention_inputs", implementation)
    cos, sin = turns(positions, theta, rotary, q.dtype)
    arrays = (q, k, v, cos, sin, q_weight, k_weight)
    rest = (float(eps), heads, key_heads, bool(zero_centred), columns)
    match chosen:
        case "reference":
            made = reference.prepare(*arrays, *rest)
        case "xla":
            made = xla.prepare(*arrays, *rest)
        case _:
            made = pallas.prepare(*arrays, *rest, interpret=interpreted())
    return AttentionInputs(*made)


def _check_types(q, k, v, positions, q_weight, k_weight) -> None:
    check_array("q", q)
    for name, array in (("k", k), ("v", v)):
        check_array(name, array)
        if array.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} as q, got {array.dtype}")
    check_array("positions", positions, (jnp.int32, jnp.int64))
    check_range("positions", positions, 0, 2**31 - 1)
    check_array("q_weight", q_weight)
    check_array("k_weight", k_weight)


def _check_narrow(q, k, v, queries: int, keys: int) -> None:
    for name, array, size in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        if array.ndim == 2 and array.shape[1] != size:
            raise ValueError(
                f"{name} must be [N, {size}] unless columns are given, got {array.shape}"
            )


def _check_shapes(
    q, k, v, positions, q_weight, k_weight, heads: int, key_heads: int, rotary: int, columns
) -> None:
    if q_weight.ndim != 1 or q_weight.size == 0:
        raise ValueError(f"q_weight must have one axis, not empty, got {q_weight.shape}")
    size = q_weight.size
    if k_weight.shape != (size,):
        raise ValueError(f"k_weight must be {(size,)} as q_weight, got {k_weight.shape}")
    if not 2 <= rotary <= size or rotary % 2:
        raise ValueError(f"rotary must be even and 2 to {size}, got {rotary}")
    if columns.step < size:
        raise ValueError(f"step must be at least {size}, the size of a head, got {columns.step}")
    if q.ndim != 2 or 0 in q.shape:
        raise ValueError(f"q must have two axes, none empty, got {q.shape}")
    rows = q.shape[0]
    if positions.shape != (rows,):
        raise ValueError(f"positions must be {(rows,)} for q {q.shape}, got {positions.shape}")
    queries = (heads - 1) * columns.step + size
    for name, array, start, width in (
        ("q", q, columns.q, queries),
        ("k", k, columns.k, key_heads * size),
        ("v", v, columns.v, key_heads * size),
    ):
        check_part(name, array, (rows, width), start)
