"""The cases that tests and timings share: projections of a few rows, weights and positions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_inputs.columns import HeadColumns
from pallas_kernels.attention_inputs.rotary import turns

EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One layer's inputs for `rows` rows.

    Attributes:
      name: unique among the cases.
      size: of a head.
      rotary: channels of a head that are turned.
      gated: logits of an output gate follow every query head.
      dtype: of the projections and the weights.
      scale: size of the projections; tiny ones meet `EPS`.
      start: position of the first row.
    """

    name: str
    rows: int
    heads: int = 4
    key_heads: int = 2
    size: int = 16
    rotary: int = 4
    gated: bool = True
    zero_centred: bool = True
    theta: float = 1e7
    dtype: str = "float32"
    scale: float = 1.0
    start: int = 1000

    @property
    def columns(self) -> HeadColumns:
        """Where `Inputs.stacked` holds its parts."""
        step = (1 + self.gated) * self.size
        keys = self.heads * step
        return HeadColumns(q=0, k=keys, v=keys + self.key_heads * self.size, step=step)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `attention_inputs` that are no arrays, but for `columns`."""
        names = ("heads", "key_heads", "theta", "rotary", "zero_centred")
        return {"eps": EPS} | {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of `attention_inputs` as numpy arrays; `gate` is what lies between the queries."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    positions: np.ndarray
    q_weight: np.ndarray
    k_weight: np.ndarray
    gate: np.ndarray

    def arguments(self, dtype: str) -> tuple[jax.Array, ...]:
        """Arrays of `attention_inputs` on the device."""
        low = lambda *arrays: [jnp.asarray(x, dtype) for x in arrays]
        q, k, v, *weights = low(self.q, self.k, self.v, self.q_weight, self.k_weight)
        return (q, k, v, jnp.asarray(self.positions), *weights)

    def stacked(self, spec: Spec) -> "Inputs":
        """The inputs with one wide array for each of q, k and v, as a model has them."""
        heads = self.q.reshape(spec.rows, spec.heads, spec.size)
        if spec.gated:
            heads = np.stack([heads, self.gate.reshape(heads.shape)], axis=2)
        wide = np.concatenate([heads.reshape(spec.rows, -1), self.k, self.v], axis=1)
        return dataclasses.replace(self, q=wide, k=wide, v=wide)


def make_inputs(spec: Spec, seed: int = 0) -> Inputs:
    """Returns the inputs of a case, the same for the same seed; `spec.dtype` holds them exactly."""
    rng = np.random.default_rng(seed)

    def low(*shape: int, scale: float = spec.scale) -> np.ndarray:
        x = jnp.asarray(scale * rng.standard_normal(shape), spec.dtype)
        return np.asarray(x, np.float32)

    queries, keys = spec.heads * spec.size, spec.key_heads * spec.size
    depths = np.sort(rng.integers(0, 16, spec.rows))
    weights = [low(spec.size, scale=0.3) + (not spec.zero_centred) for _ in range(2)]
    return Inputs(
        q=low(spec.rows, queries),
        k=low(spec.rows, keys),
        v=low(spec.rows, keys),
        positions=(spec.start + depths).astype(np.int32),
        q_weight=np.asarray(jnp.asarray(weights[0], spec.dtype), np.float32),
        k_weight=np.asarray(jnp.asarray(weights[1], spec.dtype), np.float32),
        gate=np.full((spec.rows, queries), np.nan, np.float32),  # nobody reads it
    )


def solve(inputs: Inputs, spec: Spec) -> dict[str, np.ndarray]:
    """Returns the exact `AttentionInputs` for the angles of `turns`, in float64 numpy."""
    cos, sin = turns(jnp.asarray(inputs.positions), spec.theta, spec.rotary, jnp.dtype(spec.dtype))
    turn = np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)

    def head(x: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
        x = x.astype(np.float64).reshape(spec.rows, count, spec.size)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
        x = x * (weight.astype(np.float64) + spec.zero_centred)
        half = spec.rotary // 2
        pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn[:, None]
        return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)

    return {
        "q": head(inputs.q, inputs.q_weight, spec.heads),
        "k": head(inputs.k, inputs.k_weight, spec.key_heads).swapaxes(0, 1),
        "v": inputs.v.astype(np.float64).reshape(spec.rows, spec.key_heads, -1).swapaxes(0, 1),
    }


# Sizes that are no powers of two, single rows, rows about the edges of blocks, all channels
# turned, no gate, far positions, projections that vanish beside `EPS`.
SMALL = (
    Spec(name="one_row", rows=1, heads=1, key_heads=1),
    Spec(name="odd_sizes", rows=5, heads=6, key_heads=3, size=20, rotary=6),
    Spec(name="plain", rows=17, gated=False, zero_centred=False, rotary=16),
    Spec(name="rows_33", rows=33, heads=3, key_heads=1, size=24, rotary=24),
    Spec(name="tiny_scale", rows=9, scale=1e-4),
    Spec(name="large_scale", rows=9, scale=1e4, start=0),
    Spec(name="far", rows=3, start=262_100, rotary=8),
    Spec(name="bfloat16", rows=20, dtype="bfloat16"),
)

_REAL: dict[str, Any] = {"heads": 24, "key_heads": 4, "size": 256, "rotary": 64}
_DRAFTER: dict[str, Any] = {"heads": 32, "key_heads": 8, "size": 128, "rotary": 128}

REAL = (
    *(
        Spec(name=f"real_{rows}_{dtype}", rows=rows, dtype=dtype, **_REAL)
        for rows in (1, 2, 16, 65, 129, 512)
        for dtype in ("float32", "bfloat16")
    ),
    *(
        Spec(
            name=f"drafter_{dtype}",
            rows=16,
            dtype=dtype,
            gated=False,
            zero_centred=False,
            **_DRAFTER,
        )
        for dtype in ("float32", "bfloat16")
    ),
)


def benchmark_spec(rows: int) -> Spec:
    """An attention layer of Qwen3.6-27B."""
    return Spec(name=f"qwen36_27b_{rows}", rows=rows, dtype="bfloat16", **_REAL)
