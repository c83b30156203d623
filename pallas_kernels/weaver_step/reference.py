"""The definition, on the host in float64: a list of offers, and one path at a time."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.weaver_step.state import (
    EPS,
    NO_PARENT,
    Activation,
    GrownTree,
    Pools,
    Weights,
)


def grow(
    root: jax.Array,
    pools: Pools,
    weights: Weights,
    key: tuple[jax.Array, ...],
    value: tuple[jax.Array, ...],
    width: int,
    budget: int,
    children: int,
    activation: Activation,
) -> GrownTree:
    """Returns what `weaver_grow` does. Scores are rounded to float32."""
    pools, weights, key, value = widen_inputs(pools, weights, key, value)
    rows = 1 + -(-budget // width) * width
    prefix = key[0].shape[1] - rows
    memory = [[(k[:, :prefix], v[:, :prefix])] for k, v in zip(key, value, strict=True)]
    nodes = {0: (int(root), NO_PARENT, 0, 0.0, 0.0, -1)}  # row -> token, parent, depth, ...
    offers: list[tuple[float, int, int, float, int, int]] = []
    paths = {0: [0]}
    kept: dict[int, list] = {}

    def expand(row: int) -> None:
        token, _, depth, score, *_ = nodes[row]
        logprob, kept[row] = conditional(
            token, depth, [kept[r] for r in paths[row][:-1]], memory, pools, weights, activation
        )
        if depth >= len(pools.ids):
            return
        order = np.lexsort((np.arange(len(logprob)), -logprob))[:children]
        for place, rank in enumerate(order):
            if logprob[rank] > -np.inf:
                total = np.float32(score) + np.float32(logprob[rank])
                candidate = int(pools.ids[depth, rank])
                step = float(logprob[rank])
                offers.append((-float(total), row, place, step, candidate, int(rank)))

    expand(0)
    for start in range(1, rows, width):
        offers.sort()
        taken, offers[:] = offers[:width], offers[width:]
        for row, (total, parent, _, step, token, rank) in enumerate(taken, start):
            nodes[row] = (token, parent, nodes[parent][2] + 1, -total, step, rank)
            paths[row] = [*paths[parent], row]
        if start + width < rows:
            for row in range(start, start + len(taken)):
                expand(row)
    padding = (0, NO_PARENT, 0, -np.inf, -np.inf, -1)
    columns = zip(*(nodes.get(row, padding) for row in range(budget + 1)), strict=True)
    kinds = (jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.float32, jnp.int32)
    arrays = [jnp.asarray(x, kind) for x, kind in zip(columns, kinds, strict=True)]
    return GrownTree(*arrays, valid=jnp.asarray([row in nodes for row in range(budget + 1)]))


def conditional(
    token: int,
    depth: int,
    path: list,
    prefix: list,
    pools: Any,
    weights: Any,
    activation: Activation,
) -> tuple[np.ndarray, list]:
    """Log-probabilities [P] of one node's candidates, and its keys and values for each block.

    Args:
      path: the keys and values of its strict ancestors, root first.
      prefix: for each block, a list of the prefix's keys and values.
      pools, weights: `Pools` and `Weights` of float64 numpy arrays.
    """
    level = min(depth, len(pools.ids) - 1)
    x = weights.table[token]
    if weights.position is not None:
        x = x + weights.position[level]
    own = []
    for index, block in enumerate(weights.blocks):
        heads, _, size = prefix[index][0][0].shape
        q, k, v = project(x, block.qkv).reshape(3, heads, size)
        if weights.rotation is not None:
            cos, sin = (table[level + 1] for table in weights.rotation)
            q, k = (_rotate(y, cos, sin) for y in (q, k))
        own.append((k[:, None], v[:, None]))
        seen = [*prefix[index], *(node[index] for node in path), own[-1]]
        keys, values = (np.concatenate(y, axis=1) for y in zip(*seen, strict=True))
        mixed = np.einsum("hs,hsd->hd", _softmax(np.einsum("hd,hsd->hs", q, keys) / size**0.5),
                          values)  # fmt: skip
        x = x + project(mixed.reshape(-1), block.out)
        x = x + project(activate(project(x, block.up), activation), block.down)
    query = _normalise(x, weights.out_norm)
    ids, prior = pools.ids[level], pools.prior[level]
    usable = (ids >= 0) & np.isfinite(prior)
    if not usable.any():
        return np.full(ids.shape, -np.inf), own
    logits = weights.head[np.maximum(ids, 0)] @ query + np.where(usable, prior, 0)
    logits = logits - logits[usable].max()
    logits = logits / max(float(pools.temperature), 1e-30) + pools.noise[level]
    top = logits[usable].max()
    logprob = logits - top - np.log(np.exp(logits[usable] - top).sum())
    return np.where(usable, logprob, -np.inf), own


class Rows:
    """A table whose rows are widened as they are read: whole vocabularies are large."""

    def __init__(self, table: jax.Array) -> None:
        self._table = table

    def __getitem__(self, index) -> np.ndarray:
        return widen(self._table[index])


def widen_inputs(pools: Pools, weights: Weights, key, value) -> tuple[Any, Any, Any, Any]:
    """The arguments of a growth on the host, floats as float64."""
    tables = {name: Rows(getattr(weights, name)) for name in ("table", "head")}
    rest: Any = jax.tree.map(widen, weights._replace(table=0.0, head=0.0))
    pools, key, value = jax.tree.map(widen, (pools, key, value))
    return pools, rest._replace(**tables), key, value


def widen(x) -> np.ndarray:
    """An array on the host, floats as float64."""
    x = np.asarray(x)
    return x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float64)


def _normalise(x: np.ndarray, norm: Any) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + EPS) * norm.weight + norm.bias


def project(x: np.ndarray, projection: Any) -> np.ndarray:
    """One row's projection, [out]."""
    y = projection.weight @ (x if projection.norm is None else _normalise(x, projection.norm))
    return y if projection.bias is None else y + projection.bias


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _softmax(x: np.ndarray) -> np.ndarray:
    weight = np.exp(x - x.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def activate(y: np.ndarray, activation: Activation) -> np.ndarray:
    """One row's activation, half as long if gated."""
    if activation == "silu_gated":
        gate, up = np.split(y, 2)
        return gate / (1 + np.exp(-gate)) * up
    if activation == "gelu_tanh":
        return 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    return 0.5 * y * (1 + np.asarray([math.erf(z / math.sqrt(2)) for z in y]))
