"""The output gate of attention, read where a projection left its logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_array
from pallas_kernels.heads import cut_heads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """Logits of a sigmoid that multiplies every output [N, H, D].

    Attributes:
      logits: [N, C] float32 or bfloat16; those of head h are the D columns from
        `first + h * step` on.
      first: column of the first head's logits.
      step: columns from one head's logits to the next one's, at least D.
    """

    logits: jax.Array
    first: int = dataclasses.field(metadata={"static": True})
    step: int = dataclasses.field(metadata={"static": True})

    def factors(self, heads: int, size: int) -> jax.Array:
        """Returns what multiplies the outputs, float32 [N, heads, size]."""
        rows = cut_heads(self.logits, self.first, heads, self.step, size)
        return jax.nn.sigmoid(rows.astype(jnp.float32))


def check_gate(gate: Gate, rows: int, heads: int, size: int) -> None:
    """Raises TypeError or ValueError unless these are logits of outputs [rows, heads, size]."""
    if not isinstance(gate, Gate):
        raise TypeError(f"gate must be a Gate, got {type(gate).__name__}")
    check_array("gate logits", gate.logits)
    if gate.first < 0 or gate.step < size:
        raise ValueError(
            f"gate must have first >= 0 and step >= {size}, got {gate.first} and {gate.step}"
        )
    least = gate.first + (heads - 1) * gate.step + size
    shape = gate.logits.shape
    if len(shape) != 2 or shape[0] != rows or shape[1] < least:
        raise ValueError(
            f"gate logits must be [{rows}, {least} or more] for {heads} heads of {size} columns "
            f"from {gate.first} on in steps of {gate.step}, got {shape}"
        )
