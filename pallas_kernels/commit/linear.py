"""Commit of gated delta-rule layers: checks and choice of implementation."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.checks import FLOATS, check_path
from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.commit import pallas, reference, xla
from pallas_kernels.commit.layers import check_same


def commit_linear(
    states: Sequence[jax.Array],
    histories: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    us: Sequence[jax.Array],
    log_decays: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    path: jax.Array,
    count: jax.Array | int,
    *,
    key_scales: Sequence[jax.Array] | None = None,
    implementation: Implementation = "auto",
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the states and convolution histories after the first `count` rows of `path`.

    For every layer `S = exp(L_n) S0 + sum over rows j of exp(L_n - L_j) k_j u_j^T` with L the
    log-decay and n the last row, as `gdn_tree_commit_path`; the history keeps the newest of
    (history, inputs of the path). What lies off the path is not read into any result. The kernel
    works in place: donate `states` and `histories` to save their copies.

    Args:
      states: float32 [HV, DK, DV] for each layer; all layers have the same shapes and types.
      histories: [W - 1, C] float32 or bfloat16, the newest convolution inputs, oldest first.
      keys: [N, HK, DK] float32 or bfloat16; value head h reads key head h // (HV // HK).
      us: float32 [N, HV, DV], the corrected values that verification returned.
      log_decays: float32 [N, HV], summed from the root, from verification.
      inputs: [N, >= C] float32 or bfloat16, the rows' convolution inputs; of a wider array, as a
        product of stacked weights gives, the first C columns.
      path: int32 [P], rows root..leaf; entries from `count` on may hold anything.
      count: int32 scalar, accepted rows, 1 <= count <= P.
      key_scales: float32 [N, HK] for each layer, what `keys` are still to be multiplied by.
      implementation: "auto" takes "pallas" on a GPU that supports it, else "xla". "pallas" runs
        interpreted on a CPU. "reference" applies row after row.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes or numbers of layers that do not belong together, a count that is known
        and out of range, or an unknown implementation.
      NotImplementedError: "pallas" on a device it does not support.
    """
    states, histories, keys = tuple(states), tuple(histories), tuple(keys)
    us, log_decays, inputs = tuple(us), tuple(log_decays), tuple(inputs)
    layers = (states, histories, keys, us, log_decays, inputs)
    _check(*layers)
    if key_scales is not None:
        key_scales = tuple(key_scales)
        _check_scales(key_scales, keys)
    path, count = check_path(path, count, keys[0].shape[0])
    match choose("commit_linear", implementation):
        case "reference":
            return reference.advance(*layers, path, count, key_scales)
        case "xla":
            return xla.advance(*layers, path, count, key_scales)
        case _:
            return pallas.advance(*layers, path, count, key_scales, interpret=interpreted())


def _check(states, histories, keys, us, log_decays, inputs) -> None:
    named = {
        "states": (states, 3, (jnp.float32,)),
        "histories": (histories, 2, FLOATS),
        "keys": (keys, 3, FLOATS),
        "us": (us, 3, (jnp.float32,)),
        "log_decays": (log_decays, 2, (jnp.float32,)),
        "inputs": (inputs, 2, FLOATS),
    }
    for name, (arrays, axes, dtypes) in named.items():
        check_same(name, arrays, len(states), axes, dtypes)
    nodes, key_heads, key_dim = keys[0].shape
    value_heads, value_dim = us[0].shape[1:]
    channels = histories[0].shape[1]
    if value_heads % key_heads:
        raise ValueError(f"{value_heads} value heads cannot share {key_heads} key heads evenly")
    expected = {
        "states": (states, (value_heads, key_dim, value_dim)),
        "us": (us, (nodes, value_heads, value_dim)),
        "log_decays": (log_decays, (nodes, value_heads)),
    }
    for name, (arrays, shape) in expected.items():
        if arrays[0].shape != shape:
            raise ValueError(
                f"{name} must be {shape} for keys {keys[0].shape} and us {us[0].shape}, "
                f"got {arrays[0].shape}"
            )
    if inputs[0].shape[0] != nodes or inputs[0].shape[1] < channels:
        raise ValueError(
            f"inputs must be [{nodes}, >= {channels}] for keys {keys[0].shape} and histories "
            f"{histories[0].shape}, got {inputs[0].shape}"
        )


def _check_scales(key_scales, keys) -> None:
    check_same("key_scales", key_scales, len(keys), 2, (jnp.float32,))
    if key_scales[0].shape != keys[0].shape[:2]:
        raise ValueError(
            f"key_scales must be {keys[0].shape[:2]} for keys {keys[0].shape}, "
            f"got {key_scales[0].shape}"
        )
