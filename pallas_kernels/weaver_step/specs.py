"""The cases that tests and timings share: shapes, variants, and inputs made from a seed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.weaver_step.grow import growth_rows
from pallas_kernels.weaver_step.reference import conditional, widen_inputs
from pallas_kernels.weaver_step.state import (
    Activation,
    Block,
    GrownTree,
    Norm,
    Pools,
    Projection,
    Rotation,
    Weights,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One growth.

    Attributes:
      name: unique among the cases.
      budget, expand, children: shape of the tree.
      depths, pool: of the pools; the last `empty` candidates of a row are padding.
      vocabulary: rows of both tables.
      rank, heads, inner: of the blocks.
      activation: of the MLP; "silu_gated" goes with rotary positions, the others with learned.
      blocks: number of them.
      temperature: of the conditionals; noise is added if it is not 1.
      ties: all candidates of a depth have the same probability.
    """

    name: str
    budget: int = 12
    expand: int = 4
    children: int = 5
    depths: int = 4
    pool: int = 16
    empty: int = 0
    vocabulary: int = 83
    rank: int = 32
    heads: int = 4
    inner: int = 24
    activation: Activation = "gelu_tanh"
    blocks: int = 1
    temperature: float = 1.0
    ties: bool = False

    @property
    def rows(self) -> int:
        return growth_rows(self.budget, self.expand)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `weaver_grow`."""
        return {name: getattr(self, name) for name in ("budget", "expand", "children",
                                                       "activation")}  # fmt: skip


def make_inputs(spec: Spec, seed: int = 0, dtype=jnp.float32) -> tuple:
    """`(root, pools, weights, key, value)` for `weaver_grow`, floats drawn as numpy float32."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        x = rng.standard_normal(shape, np.float32)
        return jnp.asarray(np.float32(mean) + np.float32(scale) * x, dtype)

    def norm(size: int) -> Norm:
        return Norm(normal(size, scale=0.2, mean=1.0), normal(size, scale=0.2))

    def linear(outer: int, inner: int, bias: bool = False, normed: bool = False) -> Projection:
        return Projection(
            normal(outer, inner, scale=inner**-0.5),
            normal(outer, scale=0.2) if bias else None,
            norm(inner) if normed else None,
        )

    rank, inner = spec.rank, spec.inner
    gated = spec.activation == "silu_gated"
    blocks = tuple(
        Block(
            qkv=linear(3 * rank, rank, normed=True),
            out=linear(rank, rank),
            up=linear(2 * inner if gated else inner, rank, bias=True, normed=True),
            down=linear(rank, inner, bias=True),
        )
        for _ in range(spec.blocks)
    )
    # A query of unit size would make one candidate certain.
    head = normal(spec.vocabulary, rank, scale=0.0 if spec.ties else 0.7 * rank**-0.5)
    weights = Weights(
        table=normal(spec.vocabulary, rank),
        head=head,
        blocks=blocks,
        out_norm=norm(rank),
        position=None if gated else normal(spec.depths, rank, scale=0.2),
        rotation=make_rotation(spec.depths + 1, rank // spec.heads) if gated else None,
    )
    prefix = spec.depths + 1
    room = ((0, 0), (0, spec.rows), (0, 0))
    key, value = (
        tuple(
            jnp.pad(normal(spec.heads, prefix, rank // spec.heads), room)
            for _ in range(spec.blocks)
        )
        for _ in range(2)
    )
    return jnp.int32(rng.integers(spec.vocabulary)), make_pools(spec, rng), weights, key, value


def make_pools(spec: Spec, rng: np.random.Generator) -> Pools:
    shape = (spec.depths, spec.pool)
    ids = np.stack([rng.choice(spec.vocabulary, spec.pool, replace=False) for _ in range(shape[0])])
    prior = -np.sort(-np.float32(2 * rng.standard_normal(shape)), axis=-1)
    if spec.ties:
        prior = np.broadcast_to(prior[:, :1], shape).copy()
    if spec.empty:
        # Either mark alone says that there is no candidate.
        ids[:, -spec.empty :: 2] = -1
        prior[:, spec.pool - spec.empty + 1 :: 2] = -np.inf
        prior[0, -1] = np.nan
    noise = rng.gumbel(size=shape) if spec.temperature != 1 else np.zeros(shape)
    return Pools(
        ids=jnp.asarray(ids, jnp.int32),
        prior=jnp.asarray(prior, jnp.float32),
        noise=jnp.asarray(noise, jnp.float32),
        temperature=jnp.float32(spec.temperature),
    )


def make_rotation(positions: int, size: int, base: float = 10000.0) -> Rotation:
    """Rotary tables of heads of this size."""
    angle = np.arange(positions)[:, None] * base ** (-2.0 * np.arange(size // 2) / size)
    return Rotation(
        jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    )


# Odd sizes everywhere, every variant, and trees that run out of offers.
SMALL = (
    Spec(name="learned"),
    Spec(
        name="rotary",
        activation="silu_gated",
        rank=36,
        heads=3,
        inner=20,
        pool=13,
        expand=3,
        empty=8,
    ),
    Spec(name="one_at_a_time", expand=1, budget=7, activation="gelu_erf", empty=5),
    Spec(name="all_children", budget=6, expand=2, children=16, pool=16, temperature=0.3),
    Spec(name="two_blocks", blocks=2, budget=9, expand=4, children=2),
    Spec(name="dry", depths=2, children=2, pool=3, budget=11, expand=4, empty=1),
    Spec(name="ties", ties=True, budget=13, children=3),
)

_SERVED: dict[str, Any] = {
    "depths": 15,
    "pool": 512,
    "rank": 2048,
    "heads": 16,
    "inner": 2048,
    "children": 32,
    "budget": 64,
}

# Sizes of the published Weaver for Qwen3.6-27B, with few tokens.
REAL = (
    Spec(name="real_learned", vocabulary=1024, **_SERVED),
    Spec(name="real_rotary", vocabulary=1024, activation="silu_gated", temperature=0.7, **_SERVED),
    Spec(name="real_wide", vocabulary=1024, expand=8, **_SERVED),
)

# More rounds than are written out, and the most that the kernels take, with heads of 128.
LARGE = (
    Spec(name="many_rounds", budget=70, expand=1, children=3),
    Spec(
        name="largest",
        budget=256,
        expand=15,
        children=32,
        depths=15,
        pool=1024,
        vocabulary=1100,
        rank=256,
        heads=2,
        inner=256,
    ),
)


def benchmark_spec() -> Spec:
    """The published Weaver for Qwen3.6-27B with its whole vocabulary."""
    return Spec(name="qwen36_27b", vocabulary=248320, **_SERVED)


def path_error(inputs: tuple, tree: GrownTree, activation: Activation) -> float:
    """Largest difference of a tree's log-probabilities from exact ones along its own paths."""
    _, *rest = inputs
    pools, weights, key, value = widen_inputs(*rest)
    rows: Any = jax.tree.map(np.asarray, tree)
    prefix = pools.ids.shape[0] + 1
    memory = [[(k[:, :prefix], v[:, :prefix])] for k, v in zip(key, value, strict=True)]
    kept, paths, worst = {}, {0: [0]}, 0.0
    below = {row: [] for row in range(len(rows.token))}
    for row in np.flatnonzero(rows.valid)[1:]:
        below[rows.parent[row]].append(row)
        paths[row] = [*paths[rows.parent[row]], row]
    for row, children in below.items():
        if not children:
            continue
        above = [kept[r] for r in paths[row][:-1]]
        logprob, kept[row] = conditional(
            rows.token[row], rows.depth[row], above, memory, pools, weights, activation
        )
        error = np.abs(rows.logprob[children] - logprob[rows.rank[children]])
        worst = max(worst, float(error.max()))
    return worst
