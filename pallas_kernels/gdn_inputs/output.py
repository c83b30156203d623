"""Output of a gated delta-rule layer: checks and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.gdn_inputs import pallas_output, xla


def gdn_output(
    out: jax.Array,
    z: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Returns `out / rms(out) * weight * silu(z)`, each head for itself, [N, HV * DV] like `z`.

    Args:
      out: float32 [N, HV, DV], from `gdn_tree_verify`.
      z: [N, HV * DV] float32 or bfloat16, the output gate's projection.
      weight: [DV] float32 or bfloat16.
      eps: added to the mean square.
      implementation: "auto" takes "pallas" on a GPU that supports it, else "xla", which is its
        own "reference". "pallas" runs interpreted on a CPU.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes that do not belong together, or an unknown implementation.
      NotImplementedError: "pallas" on a device it does not support.
    """
    floats = (jnp.float32, jnp.bfloat16)
    for name, array, dtypes in (
        ("out", out, floats[:1]),
        ("z", z, floats),
        ("weight", weight, floats),
    ):
        if not hasattr(array, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        if array.dtype not in dtypes:
            allowed = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
            raise TypeError(f"{name} must be {allowed}, got {array.dtype}")
    if out.ndim != 3 or 0 in out.shape:
        raise ValueError(f"out must have three axes, none empty, got {out.shape}")
    rows, heads, size = out.shape
    for name, array, shape in (("z", z, (rows, heads * size)), ("weight", weight, (size,))):
        if array.shape != shape:
            raise ValueError(f"{name} must be {shape} for out {out.shape}, got {array.shape}")
    if choose("gdn_output", implementation) == "pallas":
        return pallas_output.finish(out, z, weight, eps, interpret=interpreted())
    return xla.finish(out, z, weight, eps)
