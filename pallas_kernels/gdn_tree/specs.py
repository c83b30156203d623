"""The cases that tests and benchmarks share: trees, head layouts and inputs, hostile ones too."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gdn_tree.topology import NO_PARENT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One tree verification problem.

    Attributes:
      name: unique among the cases.
      nodes: rows, padding included.
      tree: "chain", "star", "random" (depth at most `max_depth`) or "spine" (a chain down to
        `max_depth`, then random).
      keys: "random", or "alike" (all equal, the worst case for a triangular solve).
      decay: "none" (g = 0), "mild", "strong" (-50 a node) or "mixed" (strong nodes among mild).
      beta: the write strength of every node; random in (0, 1) if None.
      padding: padding rows, scattered over the tree.
      raw: queries and keys of lengths from 1e-3 to 1e3 with scales, as `gdn_inputs` makes them,
        one of them zero.
    """

    name: str
    nodes: int
    tree: str = "random"
    max_depth: int = 255
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    keys: str = "random"
    decay: str = "mild"
    beta: float | None = None
    padding: int = 0
    raw: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of `gdn_tree_verify` as float32 numpy arrays, shapes as there."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    s0: np.ndarray
    parents: np.ndarray
    valid: np.ndarray
    q_scale: np.ndarray | None = None
    k_scale: np.ndarray | None = None

    def arguments(self, dtype=jnp.float32) -> tuple[jax.Array, ...]:
        """`(q, k, v, g, beta, s0, parents, valid)` on the device, q, k and v in `dtype`."""
        low = (jnp.asarray(x, dtype) for x in (self.q, self.k, self.v))
        rest = (self.g, self.beta, self.s0, self.parents, self.valid)
        return (*low, *map(jnp.asarray, rest))

    def scales(self) -> dict[str, jax.Array]:
        """Scales on the device by name; empty if there are none."""
        named = {"q_scale": self.q_scale, "k_scale": self.k_scale}
        return {name: jnp.asarray(x) for name, x in named.items() if x is not None}

    def rounded(self) -> "Inputs":
        """The inputs with q, k and v as bfloat16 holds them."""
        low = {n: np.float32(jnp.asarray(getattr(self, n), jnp.bfloat16)) for n in ("q", "k", "v")}
        return dataclasses.replace(self, **low)

    def padded(self, nodes: int) -> "Inputs":
        """The inputs with padding rows of zeros appended, `nodes` rows in all."""
        changed = {}
        names = ("q", "k", "v", "g", "beta", "parents", "valid", *self.scales())
        for name in names:
            x = getattr(self, name)
            end = NO_PARENT if name == "parents" else 0
            widths = ((0, nodes - len(x)),) + ((0, 0),) * (x.ndim - 1)
            changed[name] = np.pad(x, widths, constant_values=end)
        return dataclasses.replace(self, **changed)

    def poisoned(self) -> "Inputs":
        """The inputs with NaN in every padding row."""
        names = ("q", "k", "v", "g", "beta", *self.scales())
        changed = {n: getattr(self, n).copy() for n in names}
        for x in changed.values():
            x[~self.valid] = np.nan
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """Exact results in float64, zeros on padding rows; `states` is [N, HV, DK, DV]."""

    out: np.ndarray
    u: np.ndarray
    log_decay: np.ndarray
    states: np.ndarray


def solve(inputs: Inputs) -> Expected:
    """Returns what the gated delta rule gives along every path, in float64 numpy."""
    q, k, v, g, beta, s0 = (
        np.array(getattr(inputs, name), np.float64) for name in ("q", "k", "v", "g", "beta", "s0")
    )
    group = v.shape[1] // k.shape[1]
    for x, scale in ((q, inputs.q_scale), (k, inputs.k_scale)):
        if scale is not None:
            x *= scale[:, :, None]
    q, k = np.repeat(q, group, axis=1), np.repeat(k, group, axis=1)
    out, u, log_decay = np.zeros_like(v), np.zeros_like(v), np.zeros_like(g)
    states = np.zeros((len(v), *s0.shape))
    for i in np.flatnonzero(inputs.valid):
        parent = inputs.parents[i]
        state, above = (s0, 0.0) if parent < 0 else (states[parent], log_decay[parent])
        log_decay[i] = above + g[i]
        state = np.exp(g[i])[:, None, None] * state
        u[i] = beta[i][:, None] * (v[i] - np.einsum("hk,hkv->hv", k[i], state))
        states[i] = state + k[i][:, :, None] * u[i][:, None, :]
        out[i] = np.einsum("hk,hkv->hv", q[i], states[i])
    return Expected(out=out, u=u, log_decay=log_decay, states=states)


def make_inputs(spec: Spec, seed: int = 0) -> Inputs:
    """Returns the inputs of a case, the same for the same seed."""
    rng = np.random.default_rng(seed)
    parents, valid = _make_tree(spec, rng)

    def unit(heads: int) -> np.ndarray:
        x = rng.standard_normal((spec.nodes, heads, spec.key_dim))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = unit(spec.key_heads) * spec.key_dim**-0.5, unit(spec.key_heads)
    if spec.keys == "alike":
        k = np.broadcast_to(k[:1], k.shape)
    row = (spec.nodes, spec.value_heads)
    beta = rng.uniform(0.02, 0.98, row) if spec.beta is None else np.full(row, spec.beta)
    arrays = {
        "q": q,
        "k": k,
        "v": rng.standard_normal((*row, spec.value_dim)),
        "g": _make_decay(spec.decay, row, rng),
        "beta": beta,
        "s0": rng.standard_normal((spec.value_heads, spec.key_dim, spec.value_dim)),
    }
    if spec.raw:
        arrays["q"], arrays["q_scale"] = _unscaled(q, rng, spec.key_dim**-0.5)
        arrays["k"], arrays["k_scale"] = _unscaled(k, rng, 1.0)
    floats = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    return Inputs(**floats, parents=parents, valid=valid)


def _unscaled(x: np.ndarray, rng: np.random.Generator, length: float) -> tuple:
    """`x` with a length of its own for every vector, one zero, and the scales that undo it."""
    x = x * 10 ** rng.uniform(-3, 3, (*x.shape[:2], 1))
    x[1:2] = 0
    return x, length / np.sqrt(np.sum(x * x, axis=-1) + 1e-6)


def _make_tree(spec: Spec, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    rows = np.sort(rng.permutation(spec.nodes)[: spec.nodes - spec.padding])
    parents = np.full(spec.nodes, NO_PARENT, np.int32)
    depth = np.zeros(len(rows), np.int32)
    for i in range(1, len(rows)):
        if spec.tree == "chain" or (spec.tree == "spine" and i <= spec.max_depth):
            parent = i - 1
        elif spec.tree == "star":
            parent = 0
        else:
            parent = rng.choice(np.flatnonzero(depth[:i] < spec.max_depth))
        parents[rows[i]] = rows[parent]
        depth[i] = depth[parent] + 1
    return parents, np.isin(np.arange(spec.nodes), rows)


def _make_decay(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    mild = -rng.exponential(0.1, shape)
    match kind:
        case "none":
            return np.zeros(shape)
        case "mild":
            return mild
        case "strong":
            return np.full(shape, -50.0)
        case "mixed":
            return np.where(rng.random(shape) < 0.2, -50.0, mild)
        case _:
            raise ValueError(f"decay must be none, mild, strong or mixed, got {kind!r}")


HOSTILE: dict[str, dict[str, Any]] = {
    "alike": {"keys": "alike", "beta": 0.999, "decay": "none"},
    "strong_decay": {"decay": "strong"},
    "mixed_decay": {"decay": "mixed"},
}

# Head ratios 1 to 4, head sizes that are no powers of two, sizes about the block edges, and both
# forms of queries and keys.
SMALL = (
    Spec(name="one_node", nodes=1, value_heads=1, raw=True),
    Spec(name="random_5", nodes=5, key_heads=2, value_heads=8, key_dim=24, raw=True),
    Spec(name="chain_15", nodes=15, tree="chain"),
    Spec(name="star_17", nodes=17, tree="star", value_heads=3, key_dim=12, value_dim=20),
    Spec(name="random_33", nodes=33),
    Spec(name="random_64", nodes=64, key_dim=32, value_dim=32),
    Spec(name="spine_65", nodes=65, tree="spine", max_depth=15, raw=True),
    Spec(name="padded_33", nodes=33, tree="spine", max_depth=9, padding=14),
    Spec(name="padded_65", nodes=65, padding=31, decay="mixed", raw=True),
    Spec(name="padded_130", nodes=130, padding=31, decay="mixed", key_heads=2, value_heads=4),
    *(
        Spec(name=f"{name}_chain_33", nodes=33, tree="chain", **kind)
        for name, kind in HOSTILE.items()
    ),
    *(
        Spec(name=f"{name}_spine_65", nodes=65, tree="spine", max_depth=15, raw=True, **kind)
        for name, kind in HOSTILE.items()
    ),
)

_REAL: dict[str, Any] = {"tree": "spine", "key_dim": 128, "value_dim": 128}
_HEADS: dict[str, Any] = {"key_heads": 2, "value_heads": 6}

# Head sizes and head counts of the checkpoints, depths of a drafter's block and beyond.
REAL = (
    *(
        Spec(name=f"real_{nodes}", nodes=nodes, max_depth=15, raw=True, **_REAL, **_HEADS)
        for nodes in (1, 2, 15, 33, 64, 65, 100, 129, 200, 256)
    ),
    *(
        Spec(
            name=f"real_{key_heads}_to_{value_heads}_heads_{nodes}",
            nodes=nodes,
            max_depth=15,
            key_heads=key_heads,
            value_heads=value_heads,
            **_REAL,
        )
        for key_heads, value_heads, nodes in ((16, 16, 17), (16, 32, 17), (16, 48, 17), (4, 16, 80))
    ),
    *(
        Spec(
            name=f"real_{name}_{nodes}_depth_{depth}",
            nodes=nodes,
            max_depth=depth,
            **_REAL,
            **_HEADS,
            **kind,
        )
        for name, kind in HOSTILE.items()
        for nodes, depth in ((15, 14), (33, 15), (65, 15), (64, 63), (129, 63))
    ),
    Spec(name="real_padded_65", nodes=65, max_depth=15, padding=19, raw=True, **_REAL, **_HEADS),
    Spec(name="real_padded_200", nodes=200, max_depth=15, padding=77, **_REAL, **_HEADS),
)


def benchmark_spec(nodes: int) -> Spec:
    """A layer of Qwen3.6-27B with a tree of the depth of a drafter's block."""
    return Spec(
        name=f"qwen36_27b_{nodes}",
        nodes=nodes,
        tree="spine",
        max_depth=15,
        key_heads=16,
        value_heads=48,
        key_dim=128,
        value_dim=128,
        raw=True,
    )
