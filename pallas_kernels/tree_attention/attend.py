"""Attention of tree rows over each other and a cache: checks and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.concrete import concrete
from pallas_kernels.tree_attention import hopper, pallas, reference, xla
from pallas_kernels.tree_attention.gate import Gate, check_gate


def tree_attention(
    q: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    visible: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array | int,
    *,
    scale: float | None = None,
    window: int | None = None,
    gate: Gate | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Returns softmax attention of tree rows over a cache and their own keys, [N, H, D].

    Every row sees the first `length` rows of the cache, or of these the last ones that a window
    leaves, and the own rows that `visible` names. Time follows what is seen, not the capacity, and
    scores never lie in device memory as a whole (online softmax over splits of the cache:
    FlashDecoding, Dao et al., 2023). Scores and sums are float32; with bfloat16 inputs the weights
    are rounded to bfloat16 before they meet the values. Forward only.

    Args:
      q: [N, H, D] float32 or bfloat16; query head h reads key head h // (H // G).
      own_keys, own_values: [G, N, D], the type of `q`; rows that nobody sees may hold anything.
      visible: bool [N, N]; `visible[i, j]` says that row i sees row j.
      keys, values: [G, capacity, D], the type of `q`; rows from `length` on may hold anything.
      length: int32 scalar, 0 <= length <= capacity; may be traced.
      scale: of the scores, positive; D ** -0.5 if not given.
      window: own row i, which stands at position length + i, sees a cache row only if that is
        fewer than this many positions before it; rows that no row sees may hold anything. The
        whole cache is seen if not given. Own rows are for `visible` alone to choose.
      gate: its sigmoid multiplies the result before that is rounded.
      implementation: "auto" takes "pallas" on a GPU that supports the shape, else "xla".
        "pallas" is one of two kernels: on Hopper that of `mosaic.py` for many rows over a long
        cache, else that of `pallas.py`, which runs interpreted on a CPU. "reference" forms all
        scores.

    Returns:
      [N, H, D] in the type of `q`; a row that sees nothing is zero.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes that do not belong together, a length, scale or window out of
        range, or an unknown implementation.
      NotImplementedError: "pallas" on a device or shape it does not support.
    """
    _check(q, own_keys, own_values, visible, keys, values, length)
    whole = isinstance(window, int) and not isinstance(window, bool)
    if window is not None and (not whole or window < 1):
        raise ValueError(f"window must be a positive integer, got {window!r}")
    size = q.shape[2]
    factor = float(size**-0.5 if scale is None else scale)
    if not 0 < factor < float("inf"):
        raise ValueError(f"scale must be positive, got {factor}")
    if gate is not None:
        check_gate(gate, *q.shape)
    chosen = choose("tree_attention", implementation, pallas.refusal(size))
    args = (q, own_keys, own_values, visible, keys, values, jnp.asarray(length, jnp.int32))
    if chosen == "reference":
        return reference.attend(*args, scale=factor, window=window, gate=gate)
    if chosen == "xla":
        return xla.attend(*args, scale=factor, window=window, gate=gate)
    if hopper.faster(q, keys, window):
        from pallas_kernels.tree_attention import mosaic

        return mosaic.attend(*args, scale=factor, gate=gate)
    return pallas.attend(*args, scale=factor, window=window, gate=gate, interpret=interpreted())


def _check(
    q: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    visible: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array | int,
) -> None:
    floats = {
        "q": q,
        "own_keys": own_keys,
        "own_values": own_values,
        "keys": keys,
        "values": values,
    }
    for name, x in (*floats.items(), ("visible", visible)):
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"q must be float32 or bfloat16, got {q.dtype}")
    for name, x in floats.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} as q, got {x.dtype}")
        if x.ndim != 3 or 0 in x.shape:
            raise ValueError(f"{name} must have three axes, none empty, got {x.shape}")
    if visible.dtype != jnp.bool_:
        raise TypeError(f"visible must be bool, got {visible.dtype}")
    nodes, heads, size = q.shape
    groups, capacity = keys.shape[:2]
    if heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key heads evenly")
    expected = {
        "own_keys": (own_keys, (groups, nodes, size)),
        "own_values": (own_values, (groups, nodes, size)),
        "visible": (visible, (nodes, nodes)),
        "keys": (keys, (groups, capacity, size)),
        "values": (values, (groups, capacity, size)),
    }
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(
                f"{name} must be {shape} for q {q.shape} and keys {keys.shape}, got {x.shape}"
            )
    if jnp.shape(length) != () or not jnp.issubdtype(jnp.result_type(length), jnp.integer):
        raise ValueError(f"length must be an integer scalar, got {length!r}")
    known = concrete(length)
    if known is not None and not 0 <= int(known) <= capacity:
        raise ValueError(f"length must lie in 0..{capacity}, got {int(known)}")
