"""Inputs of a gated delta-rule layer for tree rows: checks and choice of implementation."""

import typing

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.gdn_inputs import pallas, reference, xla

_FLOATS = (jnp.float32, jnp.bfloat16)


class GDNInputs(typing.NamedTuple):
    """What `gdn_tree_verify` takes of every row.

    Attributes:
      q, k: float32 [N, HK, DK], unit length, `q` scaled by DK^-1/2.
      v: [N, HV, DV] in the type of `x`.
      g: float32 [N, HV], log-decay, <= 0.
      beta: float32 [N, HV], write strength in (0, 1).
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def gdn_inputs(
    x: jax.Array,
    history: jax.Array,
    taps: jax.Array,
    weight: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    *,
    key_heads: int,
    key_dim: int,
    implementation: Implementation = "auto",
) -> GDNInputs:
    """Returns queries, keys, values and gates of tree rows from their projections.

    A causal depthwise convolution along every row's own path, SiLU, heads of unit length, and
    `g = -exp(a_log) softplus(a + dt_bias)`, `beta = sigmoid(b)` (Qwen3.5, gated DeltaNet, arXiv
    2412.06464). With a bfloat16 `x` the kernel computes in float32 and rounds `v` alone; "xla"
    states the steps in bfloat16, which XLA may compute more precisely. They differ by roundings.

    Args:
      x: [N, C] float32 or bfloat16, convolution inputs; channels are HK * DK of queries, as many
        of keys, HV * DV of values.
      history: [W - 1, C] float32 or bfloat16, the newest committed inputs, oldest first.
      taps: int32 [N, W], each row's inputs, oldest first, as rows of (history, x).
      weight: [C, W] float32 or bfloat16.
      a, b: [N, HV] float32 or bfloat16, gate projections.
      a_log, dt_bias: [HV] float32 or bfloat16.
      key_heads: HK.
      key_dim: DK.
      implementation: "auto" takes "pallas" on a GPU that supports it, else "xla". "pallas" runs
        interpreted on a CPU. "reference" goes row by row in float32.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes that do not belong together, or an unknown implementation.
      NotImplementedError: "pallas" on a device it does not support.
    """
    arrays = (x, history, taps, weight, a, b, a_log, dt_bias)
    _check(*arrays, key_heads, key_dim)
    match choose("gdn_inputs", implementation):
        case "reference":
            made = reference.prepare(*arrays, key_heads, key_dim)
        case "xla":
            made = xla.prepare(*arrays, key_heads, key_dim)
        case _:
            made = pallas.prepare(*arrays, key_heads, key_dim, interpret=interpreted())
    return GDNInputs(*made)


def _check(x, history, taps, weight, a, b, a_log, dt_bias, key_heads: int, key_dim: int) -> None:
    named = {"x": x, "history": history, "taps": taps, "weight": weight}
    named |= {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}
    for name, array in named.items():
        if not hasattr(array, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        allowed = (jnp.int32, jnp.int64) if name == "taps" else _FLOATS
        if array.dtype not in allowed:
            words = "int32" if name == "taps" else "float32 or bfloat16"
            raise TypeError(f"{name} must be {words}, got {array.dtype}")
    for name in ("x", "taps", "a"):
        if named[name].ndim != 2 or 0 in named[name].shape:
            raise ValueError(f"{name} must have two axes, none empty, got {named[name].shape}")
    (rows, channels), width, value_heads = x.shape, taps.shape[1], a.shape[1]
    if width < 2:
        raise ValueError(f"taps must be [N, W] with W >= 2, got {taps.shape}")
    if key_heads < 1 or key_dim < 1:
        raise ValueError(f"key_heads and key_dim must be positive, got {key_heads}, {key_dim}")
    values = channels - 2 * key_heads * key_dim
    if values <= 0 or values % value_heads:
        raise ValueError(
            f"x must have channels for {key_heads} query and key heads of {key_dim} and the same "
            f"number for each of {value_heads} value heads, got {channels}"
        )
    expected = {
        "history": (width - 1, channels),
        "taps": (rows, width),
        "weight": (channels, width),
        "a": (rows, value_heads),
        "b": (rows, value_heads),
        "a_log": (value_heads,),
        "dt_bias": (value_heads,),
    }
    for name, shape in expected.items():
        if named[name].shape != shape:
            raise ValueError(
                f"{name} must be {shape} for x {x.shape}, taps {taps.shape} and a {a.shape}, "
                f"got {named[name].shape}"
            )
