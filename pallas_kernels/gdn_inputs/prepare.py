"""Inputs of a gated delta-rule layer for tree rows: checks and choice of implementation."""

import typing

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_array, check_part, check_range
from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.gdn_inputs import pallas, reference, xla
from pallas_kernels.gdn_inputs.columns import Columns


class GDNInputs(typing.NamedTuple):
    """What `gdn_tree_verify` takes of every row.

    Attributes:
      q, k: [N, HK, DK] in the type of `x`, as they come out of the activation.
      v: [N, HV, DV] in the type of `x`.
      g: float32 [N, HV], log-decay, <= 0.
      beta: float32 [N, HV], write strength in (0, 1).
      q_scale, k_scale: float32 [N, HK], what brings `k` to unit length and `q` to DK^-1/2.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    q_scale: jax.Array
    k_scale: jax.Array


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
    columns: Columns | None = None,
    implementation: Implementation = "auto",
) -> GDNInputs:
    """Returns queries, keys, values and gates of tree rows from their projections.

    A causal depthwise convolution along every row's own path, SiLU, scales of unit length, and
    `g = -exp(a_log) softplus(a + dt_bias)`, `beta = sigmoid(b)` (Qwen3.5, gated DeltaNet, arXiv
    2412.06464). With a bfloat16 `x` the kernel computes in float32 and rounds `q`, `k` and `v`
    once; "xla" states the steps in bfloat16, which XLA may compute more precisely. They differ by
    roundings. Scales are those of the rounded vectors, `length / sqrt(|q|^2 + 1e-6)`: times its
    scale a vector has its length to float32's precision, exactly as it is stored.

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
      columns: `x`, `a` and `b` are wider, as a rule one and the same stacked projection, and
        hold their parts from these columns on. The kernel reads them where they lie.
      implementation: "auto" takes "pallas" on a GPU that supports it, else "xla". "pallas" runs
        interpreted on a CPU. "reference" goes row by row in float32.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes that do not belong together, or an unknown implementation.
      NotImplementedError: "pallas" on a device it does not support.
    """
    arrays = (x, history, taps, weight, a, b, a_log, dt_bias)
    _check(*arrays, key_heads, key_dim, columns)
    if columns is None:
        columns = Columns()
    match choose("gdn_inputs", implementation):
        case "reference":
            made = reference.prepare(*arrays, key_heads, key_dim, columns)
        case "xla":
            made = xla.prepare(*arrays, key_heads, key_dim, columns)
        case _:
            interpret = interpreted()
            made = pallas.prepare(*arrays, key_heads, key_dim, columns, interpret=interpret)
    return GDNInputs(*made)


def _check(
    x,
    history,
    taps,
    weight,
    a,
    b,
    a_log,
    dt_bias,
    key_heads: int,
    key_dim: int,
    columns: Columns | None,
) -> None:
    named = {"x": x, "history": history, "taps": taps, "weight": weight}
    named |= {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}
    for name, array in named.items():
        if name != "taps":
            check_array(name, array)
        elif not hasattr(array, "dtype"):
            raise TypeError(f"taps must be an array, got {type(array).__name__}")
        elif array.dtype not in (jnp.int32, jnp.int64):
            raise TypeError(f"taps must be int32, got {array.dtype}")
    for name, axes in (("x", 2), ("taps", 2), ("weight", 2), ("a", 2), ("b", 2), ("a_log", 1)):
        shape = named[name].shape
        if len(shape) != axes or 0 in shape:
            words = "two axes" if axes == 2 else "one axis"
            raise ValueError(f"{name} must have {words}, none empty, got {shape}")
    (rows, width), channels, value_heads = taps.shape, weight.shape[0], a_log.shape[0]
    if width < 2:
        raise ValueError(f"taps must be [N, W] with W >= 2, got {taps.shape}")
    if key_heads < 1 or key_dim < 1:
        raise ValueError(f"key_heads and key_dim must be positive, got {key_heads}, {key_dim}")
    values = channels - 2 * key_heads * key_dim
    if values <= 0 or values % value_heads:
        raise ValueError(
            f"weight must have channels for {key_heads} query and key heads of {key_dim} and the "
            f"same number for each of {value_heads} value heads, got {channels}"
        )
    expected = {
        "x": (rows, channels),
        "history": (width - 1, channels),
        "weight": (channels, width),
        "a": (rows, value_heads),
        "b": (rows, value_heads),
        "dt_bias": (value_heads,),
    }
    check_range("taps", taps, 0, rows + width - 2)  # rows of (history, x)
    context = f"taps {taps.shape}, weight {weight.shape} and a_log {a_log.shape}"
    for name, shape in expected.items():
        start = getattr(columns, name, None)
        if start is None:
            if named[name].shape != shape:
                raise ValueError(f"{name} must be {shape} for {context}, got {named[name].shape}")
        else:
            check_part(name, named[name], shape, start)
