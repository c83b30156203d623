"""Commit of attention layers: checks and choice of implementation."""

from collections.abc import Sequence

import jax

from pallas_kernels.checks import FLOATS, check_path, check_scalar
from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.commit import pallas_kv, reference, xla
from pallas_kernels.commit.layers import check_same


def commit_kv(
    caches: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    path: jax.Array,
    count: jax.Array | int,
    length: jax.Array | int,
    *,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, ...]:
    """Returns the caches with the first `count` rows of `path` at `length`, `length + 1`, ...

    All other rows of the caches stay as they are; rows that would lie beyond the capacity are
    left out. The kernel works in place: donate `caches` to save their copies.

    Args:
      caches: [KV, capacity, D] float32 or bfloat16, keys and values of all layers in any order;
        all have the same shape and type.
      rows: [KV, N, D] float32 or bfloat16 for each cache, the verified rows.
      path: int32 [P], rows root..leaf; entries from `count` on may hold anything.
      count: int32 scalar, accepted rows, 1 <= count <= P.
      length: int32 scalar, committed rows, 0 <= length <= capacity.
      implementation: "auto" takes "pallas" on a GPU that supports it, else "xla". "pallas" runs
        interpreted on a CPU. "reference" copies row after row.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes or numbers of layers that do not belong together, a count or length that
        is known and out of range, or an unknown implementation.
      NotImplementedError: "pallas" on a device it does not support.
    """
    caches, rows = tuple(caches), tuple(rows)
    check_same("caches", caches, len(caches), 3, FLOATS)
    check_same("rows", rows, len(caches), 3, FLOATS)
    heads, capacity, size = caches[0].shape
    nodes = rows[0].shape[1]
    if rows[0].shape != (heads, nodes, size):
        raise ValueError(
            f"rows must be {(heads, nodes, size)} for caches {caches[0].shape}, got {rows[0].shape}"
        )
    path, count = check_path(path, count, nodes)
    length = check_scalar("length", length, 0, capacity)
    match choose("commit_kv", implementation):
        case "reference":
            return reference.compact(caches, rows, path, count, length)
        case "xla":
            return xla.compact(caches, rows, path, count, length)
        case _:
            return pallas_kv.compact(caches, rows, path, count, length, interpret=interpreted())
