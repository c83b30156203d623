"""Best-first growth of a draft tree under Weaver: checks, choice of implementation, the rounds."""

import functools
import typing

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementation, choose, interpreted
from pallas_kernels.concrete import concrete
from pallas_kernels.weaver_step import pallas, reference, xla
from pallas_kernels.weaver_step.launch import Config
from pallas_kernels.weaver_step.state import (
    Activation,
    GrownTree,
    Growth,
    Nodes,
    Norm,
    Pools,
    Projection,
    Weights,
    plant,
)

_WRITTEN_OUT = 64  # rounds: beyond, a program that is compiled soon is worth a loop's launches


def weaver_grow(
    root: jax.Array,
    pools: Pools,
    weights: Weights,
    key: tuple[jax.Array, ...],
    value: tuple[jax.Array, ...],
    *,
    budget: int,
    expand: int,
    children: int,
    activation: Activation,
    implementation: Implementation = "auto",
) -> GrownTree:
    """Returns the tree of `budget` nodes and a root whose paths Weaver finds most probable.

    Best-first (DFlash-TfM, arXiv 2607.06763): the best `expand` children on offer become nodes
    and offer their own. Offers are taken by score, then lower parent row, then better pool
    position. Nodes of the last round, and nodes of depth D, offer none. A round that runs out of
    offers leaves padding in its rows. With W = min(expand, budget) a growth has
    `growth_rows(budget, expand)` = 1 + ceil(budget / W) W rows; the first budget + 1 are returned.

    Args:
      root: int32 scalar, the token of row 0.
      pools: candidates of D depths, P each.
      weights: Weaver's parameters.
      key, value: for each block [heads, prefix + rows, head size] in the weights' dtype; the
        prefix's rows, then room for the tree, finite.
      budget: nodes below the root.
      expand: nodes taken and expanded at once.
      children: offers of an expanded node, at most P are made.
      activation: of the blocks' MLP.
      implementation: "auto" takes "pallas" on a GPU, "xla" elsewhere and beyond what the kernels
        support: 16 nodes at once, pools of 1024, and 288 memory rows, enough for a budget of 256
        under a prefix of 16. "pallas" runs interpreted on a CPU. "reference" walks in float64 on
        the host, outside `jax.jit`.

    Raises:
      TypeError: an argument of a type not listed.
      ValueError: shapes that do not belong together, or an unknown option.
      NotImplementedError: "pallas" on a device or size it does not support.
    """
    for name, number in (("budget", budget), ("expand", expand), ("children", children)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a positive integer, got {number!r}")
    if activation not in typing.get_args(Activation):
        options = ", ".join(typing.get_args(Activation))
        raise ValueError(f"activation must be one of {options}, got {activation!r}")
    rows = growth_rows(budget, expand)
    _check(root, pools, weights, key, value, rows, activation)
    width = min(expand, budget)
    children = min(children, pools.ids.shape[1])
    refusal = pallas.unsupported(width, pools.ids.shape[1], key[0].shape[1])
    implementation = choose("weaver_grow", implementation, refusal)
    if implementation == "reference":
        return reference.grow(root, pools, weights, key, value, width, budget, children, activation)
    take, expand_nodes = _pieces(implementation, width, pools.ids.shape[0], activation)

    def one_round(growth: Growth, start: jax.Array) -> Growth:
        growth, nodes = take(growth, weights, start)
        return expand_nodes(growth, nodes, weights, pools, start)

    growth = plant(root, rows, children, key, value)
    # The root in the company of padding: one shape of every kernel serves all rounds.
    x = xla.embed(weights, growth.token[:width], growth.depth[:width])
    nodes = Nodes(x, growth.depth[:width], growth.score[:width])
    growth = expand_nodes(growth, nodes, weights, pools, jnp.int32(0))
    last = rows - width
    growth = _repeat(one_round, growth, range(1, last, width))
    growth, _ = take(growth, weights, jnp.int32(last))
    names = ("token", "parent", "depth", "score", "logprob", "rank")
    tree = {name: getattr(growth, name)[: budget + 1] for name in names}
    return GrownTree(**tree, valid=tree["score"] > -jnp.inf)


def growth_rows(budget: int, expand: int) -> int:
    """Rows in use while a tree grows: the root and full rounds of nodes."""
    width = min(expand, budget)
    return 1 + -(-budget // width) * width


@functools.cache
def _pieces(implementation: Implementation, width: int, depths: int, activation: Activation):
    """`take` and `expand`, compiled once where the call is not part of a larger program."""
    how: dict[str, typing.Any] = {}
    if implementation == "pallas":
        how = {"config": Config(), "interpret": interpreted()}
    module = pallas if implementation == "pallas" else xla
    take = functools.partial(module.take, width=width, depths=depths, **how)
    expand = functools.partial(module.expand, activation=activation, **how)
    return jax.jit(take), jax.jit(expand)


def _repeat(one_round, growth: Growth, starts: range) -> Growth:
    traced = concrete(growth.offered_score) is None
    if traced and (jax.default_backend() == "cpu" or len(starts) > _WRITTEN_OUT):

        def body(i, growth):
            return one_round(growth, jnp.int32(starts.start) + i * jnp.int32(starts.step))

        return jax.lax.fori_loop(0, len(starts), body, growth)
    # Written out on a GPU: a loop would cost launches for its counter, and a graph launch a round.
    for start in starts:
        growth = one_round(growth, jnp.int32(start))
    return growth


def _check(
    root: jax.Array,
    pools: Pools,
    weights: Weights,
    key: tuple[jax.Array, ...],
    value: tuple[jax.Array, ...],
    rows: int,
    activation: Activation,
) -> None:
    dtype = weights.table.dtype
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"weights.table must be float32 or bfloat16, got {dtype}")
    if weights.rotation is not None:
        _expect_dtype("weights.rotation", weights.rotation, jnp.float32)
    for name, x in weights._replace(rotation=None)._asdict().items():
        _expect_dtype(f"weights.{name}", x, dtype)
    _expect_dtype("key", key, dtype)
    _expect_dtype("value", value, dtype)
    for name, kind in (("ids", jnp.int32), ("prior", jnp.float32), ("noise", jnp.float32),
                       ("temperature", jnp.float32)):  # fmt: skip
        _expect_dtype(f"pools.{name}", getattr(pools, name), kind)
    _expect_dtype("root", root, jnp.int32)
    _expect("root", root, ())
    _expect("pools.temperature", pools.temperature, ())

    if pools.ids.ndim != 2 or 0 in pools.ids.shape:
        raise ValueError(f"pools.ids must be [D, P] and not empty, got {pools.ids.shape}")
    _expect("pools.prior", pools.prior, pools.ids.shape)
    _expect("pools.noise", pools.noise, pools.ids.shape)

    blocks = len(weights.blocks)
    if not blocks or len(key) != blocks or len(value) != blocks:
        raise ValueError(
            f"key and value must hold one memory for each of {blocks} blocks, at least one, "
            f"got {len(key)} and {len(value)}"
        )
    heads, memory_rows, size = key[0].shape
    if memory_rows <= rows:
        raise ValueError(
            f"key must have rows for a prefix and {rows} for the tree, got {memory_rows}"
        )
    for name, memory in (("key", key), ("value", value)):
        for x in memory:
            _expect(name, x, (heads, memory_rows, size))
    _check_weights(weights, heads * size, activation)
    levels = pools.ids.shape[0]
    if weights.position is not None and weights.position.shape[0] < levels:
        raise ValueError(
            f"weights.position must have {levels} rows or more, got {weights.position.shape[0]}"
        )
    if weights.rotation is not None:
        if size % 2:
            raise ValueError(f"rotary heads must have an even size, got {size}")
        positions = weights.rotation.cos.shape[0]
        if positions < levels + 1:
            raise ValueError(f"weights.rotation must have {levels + 1} rows, got {positions}")
        for x in weights.rotation:
            _expect("weights.rotation", x, (positions, size // 2))


def _check_weights(weights: Weights, rank: int, activation: Activation) -> None:
    vocabulary = weights.table.shape[0]
    _expect("weights.table", weights.table, (vocabulary, rank))
    if weights.position is not None:
        _expect("weights.position", weights.position, (weights.position.shape[0], rank))
    _expect_norm("weights.out_norm", weights.out_norm, rank)
    _expect("weights.head", weights.head, (vocabulary, rank))
    for i, block in enumerate(weights.blocks):
        name = f"weights.blocks[{i}]"
        inner = block.down.weight.shape[1]
        wide = 2 * inner if activation == "silu_gated" else inner
        _expect_projection(f"{name}.qkv", block.qkv, 3 * rank, rank, (False, True))
        _expect_projection(f"{name}.out", block.out, rank, rank, (False, False))
        _expect_projection(f"{name}.up", block.up, wide, rank, (True, True))
        _expect_projection(f"{name}.down", block.down, rank, inner, (True, False))


def _expect_projection(
    name: str, x: Projection, outer: int, inner: int, has: tuple[bool, bool]
) -> None:
    """Checks shapes, and whether there are a bias and a norm."""
    _expect(f"{name}.weight", x.weight, (outer, inner))
    for part, given, wanted in zip(("bias", "norm"), (x.bias, x.norm), has, strict=True):
        if (given is not None) != wanted:
            raise ValueError(f"{name}.{part} must be {'given' if wanted else 'None'}")
    if x.bias is not None:
        _expect(f"{name}.bias", x.bias, (outer,))
    if x.norm is not None:
        _expect_norm(f"{name}.norm", x.norm, inner)


def _expect_norm(name: str, norm: Norm, size: int) -> None:
    _expect(f"{name}.weight", norm.weight, (size,))
    _expect(f"{name}.bias", norm.bias, (size,))


def _expect(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must be {shape}, got {x.shape}")


def _expect_dtype(name: str, tree, dtype) -> None:
    for x in jax.tree.leaves(tree):
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
        if x.dtype != dtype:
            raise TypeError(f"{name} must be {jnp.dtype(dtype).name}, got {x.dtype}")
