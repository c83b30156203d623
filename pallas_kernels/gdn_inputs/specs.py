"""The cases that tests and timings share: rows of random trees, their projections and weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gdn_inputs.columns import Columns
from pallas_kernels.gdn_inputs.prepare import GDNInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One layer's prologue for a tree of `rows` rows.

    Attributes:
      name: unique among the cases.
      width: taps of the convolution.
      dtype: of the activations and the convolution's weight.
      scale: size of the activations; large ones saturate every gate.
    """

    name: str
    rows: int
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 16
    width: int = 4
    dtype: str = "float32"
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of `gdn_inputs` as numpy arrays, and `z`, the output gate's projection."""

    x: np.ndarray
    history: np.ndarray
    taps: np.ndarray
    weight: np.ndarray
    a: np.ndarray
    b: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    out: np.ndarray
    z: np.ndarray
    norm: np.ndarray

    def arguments(self, dtype: str) -> tuple[jax.Array, ...]:
        """Arguments of `gdn_inputs` on the device."""
        low = lambda *arrays: [jnp.asarray(x, dtype) for x in arrays]
        taps, parameters = jnp.asarray(self.taps), (self.a_log, self.dt_bias)
        x, history, weight, a, b = low(self.x, self.history, self.weight, self.a, self.b)
        return (x, history, taps, weight, a, b, *map(jnp.asarray, parameters))

    def output_arguments(self, dtype: str) -> tuple[jax.Array, ...]:
        """`(out, z, weight)` of `gdn_output` on the device."""
        return jnp.asarray(self.out), jnp.asarray(self.z, dtype), jnp.asarray(self.norm)

    def columns(self) -> Columns:
        """Where `stacked` holds its parts."""
        z = self.x.shape[1]
        b = z + self.z.shape[1]
        return Columns(x=0, z=z, b=b, a=b + self.b.shape[1])

    def stacked(self) -> "Inputs":
        """The inputs with one wide array for each of x, z, b and a, as a model has them."""
        wide = np.concatenate([self.x, self.z, self.b, self.a], axis=1)
        return dataclasses.replace(self, x=wide, z=wide, b=wide, a=wide)


def make_inputs(spec: Spec, seed: int = 0) -> Inputs:
    """Returns the inputs of a case, the same for the same seed; `spec.dtype` holds them exactly."""
    rng = np.random.default_rng(seed)
    values = spec.value_heads * spec.value_dim
    channels = 2 * spec.key_heads * spec.key_dim + values

    def low(*shape: int, scale: float = 1.0) -> np.ndarray:
        x = jnp.asarray(scale * rng.standard_normal(shape), spec.dtype)
        return np.asarray(x, np.float32)

    return Inputs(
        x=low(spec.rows, channels, scale=spec.scale),
        history=low(spec.width - 1, channels, scale=spec.scale),
        taps=_make_taps(spec.rows, spec.width, rng),
        weight=low(channels, spec.width, scale=spec.width**-0.5),
        a=low(spec.rows, spec.value_heads, scale=spec.scale),
        b=low(spec.rows, spec.value_heads, scale=spec.scale),
        a_log=np.log(rng.uniform(1, 16, spec.value_heads)).astype(np.float32),
        dt_bias=rng.uniform(-7, 0, spec.value_heads).astype(np.float32),
        out=rng.standard_normal((spec.rows, spec.value_heads, spec.value_dim)).astype(np.float32),
        z=low(spec.rows, values, scale=spec.scale),
        norm=rng.uniform(0.5, 1.5, spec.value_dim).astype(np.float32),
    )


def _make_taps(rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Each row's newest `width` inputs along the path of a random tree, then the history."""
    taps = np.zeros((rows, width), np.int32)
    above = np.maximum(np.arange(rows + width - 1) - 1, 0)
    for i in range(1, rows):
        above[width - 1 + i] = width - 1 + rng.integers(i)
    for i in range(rows):
        row = width - 1 + i
        for tap in reversed(range(width)):
            taps[i, tap], row = row, above[row]
    return taps


def solve(inputs: Inputs, spec: Spec) -> dict[str, np.ndarray]:
    """Returns what `scaled` makes of the exact `GDNInputs`, in float64 numpy."""
    line = np.concatenate([inputs.history, inputs.x]).astype(np.float64)
    y = np.einsum("nwc,cw->nc", line[inputs.taps], inputs.weight.astype(np.float64))
    y = y * _sigmoid(y)
    keys = spec.key_heads * spec.key_dim
    q, k = (
        u.reshape(spec.rows, spec.key_heads, spec.key_dim)
        for u in (y[:, :keys], y[:, keys : 2 * keys])
    )
    q, k = (u / np.sqrt((u * u).sum(-1, keepdims=True) + 1e-6) for u in (q, k))
    steps = np.logaddexp(inputs.a.astype(np.float64) + inputs.dt_bias, 0)
    return {
        "q": q * spec.key_dim**-0.5,
        "k": k,
        "v": y[:, 2 * keys :].reshape(spec.rows, spec.value_heads, spec.value_dim),
        "g": -np.exp(inputs.a_log.astype(np.float64)) * steps,
        "beta": _sigmoid(inputs.b.astype(np.float64)),
    }


def scaled(result: GDNInputs) -> dict[str, np.ndarray]:
    """Returns queries and keys times their scales, values and gates, in float64 numpy."""
    made = {name: np.asarray(x, np.float64) for name, x in result._asdict().items()}
    for name in ("q", "k"):
        made[name] *= made.pop(f"{name}_scale")[:, :, None]
    return made


def solve_output(inputs: Inputs, eps: float) -> np.ndarray:
    """Returns the exact gated norm in float64 numpy."""
    out, z = inputs.out.astype(np.float64), inputs.z.astype(np.float64)
    y = out / np.sqrt((out * out).mean(-1, keepdims=True) + eps) * inputs.norm
    return y.reshape(z.shape) * z * _sigmoid(z)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


# Sizes that are no powers of two, single rows, rows about the edges of blocks, other widths.
SMALL = (
    Spec(name="one_row", rows=1, value_heads=1),
    Spec(name="odd_sizes", rows=5, value_heads=6, key_dim=12, value_dim=20),
    Spec(name="rows_17", rows=17, key_heads=1, value_heads=3, width=2),
    Spec(name="rows_33", rows=33, key_heads=3, value_heads=3, key_dim=24, value_dim=8),
    Spec(name="saturated", rows=9, scale=60.0),
    Spec(name="bfloat16", rows=20, dtype="bfloat16"),
)

_REAL: dict[str, Any] = {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128}

REAL = tuple(
    Spec(name=f"real_{rows}_{dtype}", rows=rows, dtype=dtype, **_REAL)
    for rows in (1, 2, 16, 65, 128, 257)
    for dtype in ("float32", "bfloat16")
)


def benchmark_spec(rows: int) -> Spec:
    """A layer of Qwen3.6-27B."""
    return Spec(name=f"qwen36_27b_{rows}", rows=rows, dtype="bfloat16", **_REAL)
