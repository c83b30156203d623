"""Output of a gated delta-rule layer: checks and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_array, check_epsilon, check_part
from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.gdn_inputs import pallas_output, xla


def gdn_output(
    out: jax.Array,
    z: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    column: int | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Returns `out / rms(out) * weight * silu(z)`, each head for itself, [N, HV * DV].

    Args:
      out: float32 [N, HV, DV], from `gdn_tree_verify`.
      z: [N, HV * DV] float32 or bfloat16, the output gate's projection; its type is the result's.
      weight: [DV] float32 or bfloat16.
      eps: added to the mean square.
      column: `z` is wider and holds the projection from this column on.
      implementation: "auto" takes "pallas" on a GPU that supports it, else "xla", which is its
        own "reference". "pallas" runs interpreted on a CPU.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes that do not belong together, or an unknown implementation.
      NotImplementedError: "pallas" on a device it does not support.
    """
    check_array("out", out, (jnp.float32,))
    check_array("z", z)
    check_array("weight", weight)
    if out.ndim != 3 or 0 in out.shape:
        raise ValueError(f"out must have three axes, none empty, got {out.shape}")
    rows, heads, size = out.shape
    if weight.shape != (size,):
        raise ValueError(f"weight must be {(size,)} for out {out.shape}, got {weight.shape}")
    wide = (rows, heads * size)
    if column is not None:
        check_part("z", z, wide, column)
    elif z.shape != wide:
        raise ValueError(f"z must be {wide} for out {out.shape}, got {z.shape}")
    check_epsilon("eps", eps)
    if choose("gdn_output", implementation) == "pallas":
        return pallas_output.finish(out, z, weight, eps, column or 0, interpret=interpreted())
    return xla.finish(out, z, weight, eps, column or 0)
