"""The cases that tests and timings share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One addition and norm of `rows` rows.

    Attributes:
      name: unique among the cases.
      size: of a row.
      dtype: of the rows and the weight.
      scale: size of the values.
      parts: of the addition, as a product leaves them; 0 if it is one array like the rows.
    """

    name: str
    rows: int
    size: int
    dtype: str = "float32"
    zero_centred: bool = False
    scale: float = 1.0
    parts: int = 0


def make_inputs(spec: Spec, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `(x, delta, weight)` on the device, the same for the same seed."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((spec.rows, spec.size)) * spec.scale
    parts = (spec.parts,) if spec.parts else ()
    delta = rng.standard_normal((*parts, spec.rows, spec.size)) * spec.scale
    weight = rng.uniform(-0.5, 0.5, spec.size) + (0.0 if spec.zero_centred else 1.0)
    return (
        jnp.asarray(x, spec.dtype),
        jnp.asarray(delta, "float32" if spec.parts else spec.dtype),
        jnp.asarray(weight, spec.dtype),
    )


def solve(arguments, eps: float, zero_centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rounded sum in its own type, and its exact norm in float64 numpy."""
    x, delta, weight = (np.asarray(a) for a in arguments)
    if delta.ndim == 3:
        delta = np.add.accumulate(delta)[-1].astype(x.dtype)
    total = (x.astype(np.float32) + delta.astype(np.float32)).astype(x.dtype)
    y = total.astype(np.float64)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + eps)
    return total, y * (weight.astype(np.float64) + zero_centred)


# Single rows, sizes below a warp, that are no powers of two, and about the edges of pieces.
SMALL = (
    Spec(name="one_element", rows=3, size=1),
    Spec(name="size_40", rows=1, size=40, zero_centred=True),
    Spec(name="size_320", rows=5, size=320),
    Spec(name="odd", rows=2, size=2051, zero_centred=True),
    Spec(name="tiny_values", rows=4, size=1024, scale=1e-4),
    Spec(name="large_values", rows=4, size=96, scale=1e15),
    Spec(name="three_parts", rows=3, size=200, parts=3),
    Spec(name="three_parts_bfloat16", rows=5, size=2560, dtype="bfloat16", parts=3),
    Spec(name="one_part", rows=2, size=320, dtype="bfloat16", parts=1, zero_centred=True),
    Spec(name="bfloat16", rows=3, size=2560, dtype="bfloat16", zero_centred=True),
)

REAL = (
    *(
        Spec(
            name=f"real_{rows}_{size}_{dtype}",
            rows=rows,
            size=size,
            dtype=dtype,
            zero_centred=True,
        )
        for rows, size in ((1, 5120), (16, 1024), (65, 5120), (17, 2048), (257, 2560), (128, 4096))
        for dtype in ("float32", "bfloat16")
    ),
    Spec(name="real_parts", rows=65, size=5120, dtype="bfloat16", parts=3, zero_centred=True),
    Spec(name="longest", rows=2, size=16384),
    Spec(name="longest_bfloat16", rows=2, size=16383, dtype="bfloat16"),
)


def benchmark_spec(rows: int, parts: int = 0) -> Spec:
    """The residual stream of Qwen3.6-27B, and a product that came in parts."""
    name = f"qwen36_27b_{rows}"
    return Spec(name=name, rows=rows, size=5120, dtype="bfloat16", zero_centred=True, parts=parts)
