"""The cases that tests and timings share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One product of `rows` rows with a weight [outputs, inputs].

    Attributes:
      name: unique among the cases.
      parts: whether the result may come in parts.
      scale: size of the values of `x`.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    parts: bool = False
    scale: float = 1.0


def make_inputs(spec: Spec, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns bfloat16 `(x, weight)` on the device, the same for the same seed."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((spec.rows, spec.inputs), np.float32) * spec.scale
    weight = rng.standard_normal((spec.outputs, spec.inputs), np.float32) * spec.inputs**-0.5
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)


def solve(arguments) -> np.ndarray:
    """Returns the exact product [M, N], float64 numpy."""
    x, weight = (np.asarray(a, np.float64) for a in arguments)
    return x @ weight.T


def joined(result: jax.Array) -> np.ndarray:
    """A result as float64 [M, N], its parts summed if it came in parts."""
    found = np.asarray(result, np.float64)
    return found.sum(0) if found.ndim == 3 else found


# Rows about the edges of tiles, outputs about those of blocks, splits that do not come out even.
SMALL = (
    Spec(name="one_row", rows=1, inputs=64, outputs=40),
    Spec(name="rows_15", rows=15, inputs=128, outputs=130),
    Spec(name="rows_17", rows=17, inputs=64, outputs=128),
    Spec(name="rows_64", rows=64, inputs=192, outputs=16),
    Spec(name="rows_65", rows=65, inputs=192, outputs=200),
    Spec(name="rows_81", rows=81, inputs=128, outputs=70, scale=1e4),
    Spec(name="rows_129", rows=129, inputs=64, outputs=65),
    Spec(name="rows_144", rows=144, inputs=64, outputs=64, scale=1e-6),
    Spec(name="one_row_parts", rows=1, inputs=2048, outputs=96, parts=True),
    Spec(name="uneven_parts", rows=65, inputs=1600, outputs=100, parts=True),
    Spec(name="one_part", rows=20, inputs=64, outputs=64, parts=True),
)

# (outputs, inputs, parts) of Qwen3.6-27B: a DeltaNet layer, an attention layer, the MLP.
SHAPES = {
    "in": (16480, 5120, False),
    "qkv": (14336, 5120, False),
    "gate_up": (34816, 5120, False),
    "out": (5120, 6144, True),
    "down": (5120, 17408, True),
}

REAL = tuple(
    Spec(name=f"real_{name}_{rows}", rows=rows, inputs=inputs, outputs=outputs, parts=parts)
    for name, (outputs, inputs, parts) in SHAPES.items()
    for rows in (1, 65, 129)
    if name != "qkv"
)


def benchmark_spec(name: str, rows: int) -> Spec:
    """A product of Qwen3.6-27B by its name in SHAPES."""
    outputs, inputs, parts = SHAPES[name]
    return Spec(
        name=f"qwen36_27b_{name}_{rows}", rows=rows, inputs=inputs, outputs=outputs, parts=parts
    )
