"""The cases that tests and timings share: row counts, head layouts, lengths and hostile scores."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention.gate import Gate

TOLERANCE = {"bfloat16": 2e-3, "float32": 1e-5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One attention problem.

    Attributes:
      name: unique among the cases.
      nodes: tree rows.
      groups: key heads.
      ratio: query heads of a key head.
      size: columns of a head.
      length: cache rows that count.
      capacity: cache rows there are.
      scores: "mild", "sharp" (one key takes nearly all), "rising" (the maximum grows along the
        cache, so every block rescales what came before), "falling" or "equal" (all keys alike).
      blind: rows at the end that neither see nor are seen, as padding is.
      window: how far back a row sees the cache; None for all of it.
    """

    name: str
    nodes: int
    groups: int = 1
    ratio: int = 2
    size: int = 16
    length: int
    capacity: int
    scores: str = "mild"
    blind: int = 0
    window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of `tree_attention` as numpy arrays, floats in float32, shapes as there."""

    q: np.ndarray
    own_keys: np.ndarray
    own_values: np.ndarray
    visible: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    length: np.ndarray
    window: int | None = None

    def arguments(self, dtype=jnp.float32) -> tuple[jax.Array, ...]:
        """The arrays on the device, in the order of `tree_attention`, floats in `dtype`."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "window")
        arrays = (getattr(self, name) for name in names)
        return tuple(jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype) for x in arrays)

    @property
    def past(self) -> np.ndarray:
        """Which cache rows each row sees, bool [N, capacity]."""
        place, row = np.arange(self.keys.shape[1]), np.arange(len(self.q))[:, None]
        reach = np.inf if self.window is None else self.window
        return (place < self.length) & (self.length + row - place < reach)

    def rounded(self) -> "Inputs":
        """The inputs as bfloat16 holds them."""
        names = ("q", "own_keys", "own_values", "keys", "values")
        low = {n: np.float32(jnp.asarray(getattr(self, n), jnp.bfloat16)) for n in names}
        return dataclasses.replace(self, **low)

    def poisoned(self) -> "Inputs":
        """The inputs with NaN in everything that does not count."""
        names = ("own_keys", "own_values", "keys", "values")
        changed = {name: getattr(self, name).copy() for name in names}
        unseen = ~self.visible.any(axis=0)
        for name in names[:2]:
            changed[name][:, unseen] = np.nan
        for name in names[2:]:
            changed[name][:, ~self.past.any(axis=0)] = np.nan
        return dataclasses.replace(self, **changed)


def make_inputs(spec: Spec, seed: int = 0) -> Inputs:
    """Returns the inputs of a case, the same for the same seed."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    q = normal(spec.nodes, spec.groups * spec.ratio, spec.size)
    own = (spec.groups, spec.nodes, spec.size)
    cache = (spec.groups, spec.capacity, spec.size)
    keys, values = normal(*cache), normal(*cache)
    place = np.linspace(0, 1, spec.capacity, dtype=np.float32)[:, None]
    match spec.scores:
        case "mild":
            pass
        case "sharp":
            keys *= 12
        case "rising" | "falling":
            q[..., 0] = 4 * spec.size**0.5
            keys[..., :1] = 4 * (place if spec.scores == "rising" else 1 - place)
        case "equal":
            keys[:] = keys[:, :1]
        case _:
            raise ValueError(f"no such scores: {spec.scores!r}")
    return Inputs(
        q=q,
        own_keys=normal(*own),
        own_values=normal(*own),
        visible=_make_tree(spec, rng),
        keys=keys,
        values=values,
        length=np.asarray(spec.length, np.int32),
        window=spec.window,
    )


def shapes(spec: Spec, dtype) -> list[jax.ShapeDtypeStruct]:
    """Shapes and types of a case's arguments, floats in `dtype`."""
    heads = spec.groups * spec.ratio
    own = (spec.groups, spec.nodes, spec.size)
    cache = (spec.groups, spec.capacity, spec.size)
    floats = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in ((spec.nodes, heads, spec.size), own, own, cache, cache)
    ]
    visible = jax.ShapeDtypeStruct((spec.nodes, spec.nodes), jnp.bool_)
    return [*floats[:3], visible, *floats[3:], jax.ShapeDtypeStruct((), jnp.int32)]


def _make_tree(spec: Spec, rng: np.random.Generator) -> np.ndarray:
    """Who sees whom in a random tree: a row sees its ancestors and itself."""
    visible = np.eye(spec.nodes, dtype=np.bool_)
    for row in range(1, spec.nodes):
        visible[row] |= visible[rng.integers(max(0, row - 8), row)]
    nodes = spec.nodes - spec.blind
    visible[nodes:] = False
    return visible


def make_gate(spec: Spec, dtype=jnp.float32, seed: int = 1) -> Gate:
    """Returns a gate as a joined projection holds it, NaN in all columns between its logits.

    Logits of the first row's first head are too large for a plain exponential.
    """
    rng = np.random.default_rng(seed)
    heads, first, step = spec.groups * spec.ratio, spec.size + 8, 2 * spec.size
    wide = np.full((spec.nodes, first + heads * step), np.nan, np.float32)
    for head in range(heads):
        columns = slice(first + head * step, first + head * step + spec.size)
        wide[:, columns] = rng.standard_normal((spec.nodes, spec.size)) * 3
    wide[0, first : first + spec.size] *= 100
    return Gate(logits=jnp.asarray(wide, dtype), first=first, step=step)


def solve_gated(exact: np.ndarray, gate: Gate) -> np.ndarray:
    """Returns `exact` [N, H, D] times the gate's sigmoid, in float64 numpy."""
    logits = np.asarray(gate.logits, np.float64)
    _, heads, size = exact.shape
    factors = np.empty_like(exact)
    for head in range(heads):
        start = gate.first + head * gate.step
        factors[:, head] = np.exp(-np.logaddexp(0, -logits[:, start : start + size]))
    return exact * factors


def solve(inputs: Inputs) -> np.ndarray:
    """Returns the exact result in float64 numpy, [N, H, D]."""
    nodes, heads, size = inputs.q.shape
    groups = len(inputs.keys)
    length = int(inputs.length)
    ratio = heads // groups
    own = np.repeat(inputs.visible, ratio, axis=0)
    past = np.repeat(inputs.past[:, :length], ratio, axis=0)
    out = np.zeros((nodes, groups, ratio, size))
    for group in range(groups):  # one at a time: scores of a long cache are large
        q = inputs.q.reshape(nodes, groups, ratio, size)[:, group].reshape(-1, size)
        q = q.astype(np.float64) * size**-0.5
        scores = np.concatenate(
            [
                np.where(past, q @ inputs.keys[group, :length].T.astype(np.float64), -np.inf),
                np.where(own, q @ inputs.own_keys[group].T.astype(np.float64), -np.inf),
            ],
            axis=1,
        )
        scores -= np.maximum(scores.max(axis=1, keepdims=True), -1e300)
        weights = np.exp(scores, out=scores)
        total = weights.sum(axis=1, keepdims=True)
        mixed = weights[:, :length] @ inputs.values[group, :length].astype(np.float64)
        mixed += weights[:, length:] @ inputs.own_values[group].astype(np.float64)
        out[:, group] = (mixed / np.where(total > 0, total, 1)).reshape(nodes, ratio, size)
    return out.reshape(nodes, heads, size)


def error(actual: jax.Array, exact: np.ndarray) -> float:
    """Largest difference over the largest exact value, less what the result's type must lose.

    A bfloat16 result is off by up to half a unit in its last place however it was computed, which
    alone may be 4e-3 of a value.
    """
    half = jnp.finfo(actual.dtype).eps / 2 * 2.0 ** np.floor(np.log2(np.abs(exact) + 1e-300))
    off = np.abs(np.asarray(actual, np.float64) - exact) - half
    return float(np.maximum(off, 0).max() / np.abs(exact).max()) if np.any(exact) else off.max()


# One shape with lengths about the edges of blocks, with hostile scores, and with windows of some
# blocks and of fewer positions than there are rows: compiling is what the tests cost. Then ratios 1
# to 8, sizes that are no powers of two, and a nearly empty long cache.
_SHARED: dict[str, Any] = {"nodes": 6, "groups": 2, "ratio": 3, "size": 16, "capacity": 160}
SMALL = (
    *(
        Spec(name=f"length_{length}", length=length, blind=2, **_SHARED)
        for length in (0, 1, 95, 96, 97, 160)
    ),
    *(
        Spec(name=scores, length=129, scores=scores, **_SHARED)
        for scores in ("sharp", "rising", "falling", "equal")
    ),
    *(
        Spec(name=f"window_{window}_{length}", length=length, window=window, blind=2, **_SHARED)
        for window, length in (
            *((40, length) for length in (0, 20, 35, 39, 40, 71, 128, 160)),
            *((3, length) for length in (0, 2, 64, 97)),
        )
    ),
    Spec(name="window_rising", length=129, window=40, scores="rising", **_SHARED),
    Spec(name="one_row", nodes=1, ratio=6, size=24, length=83, capacity=83),
    Spec(name="ratio_8", nodes=35, ratio=8, length=65, capacity=83),
    Spec(name="short_in_long", nodes=3, ratio=1, length=70, capacity=4096, blind=1),
)

# For the kernel on Mosaic GPU, which takes heads and caches of whole tiles: lengths about the edges
# of blocks, hostile scores, rows and keys that make more than one program.
_TILED: dict[str, Any] = {"nodes": 6, "ratio": 3, "size": 64, "capacity": 192, "blind": 2}
TILED = (
    Spec(name="tiled_rising", length=129, scores="rising", **_TILED),
    Spec(name="tiled_rows", nodes=70, ratio=2, size=64, length=100, capacity=128, blind=7),
    Spec(name="tiled_full", length=192, **_TILED),
    Spec(name="tiled_empty", length=0, **_TILED),
    *(Spec(name=f"tiled_{length}", length=length, **_TILED) for length in (1, 63, 64, 65, 191)),
    *(
        Spec(name=f"tiled_{s}", length=150, scores=s, **_TILED)
        for s in ("sharp", "falling", "equal")
    ),
    Spec(name="tiled_heads", nodes=9, groups=2, ratio=6, size=128, length=200, capacity=256),
)


def _real(name: str, nodes: int, length: int, capacity: int, **changes) -> Spec:
    layout: dict[str, Any] = {"groups": 4, "ratio": 6, "size": 256} | changes
    return Spec(name=name, nodes=nodes, length=length, capacity=capacity, **layout)


# Head layouts of the checkpoints.
REAL = (
    _real("decode", 1, 1000, 8192),
    _real("decode_long", 1, 32768, 32768 + 512),
    _real("chain_9", 9, 3001, 4096),
    _real("tree_17", 17, 1023, 32768),
    _real("tree_33", 33, 4097, 8192),
    _real("tree_65", 65, 8192, 16384),
    _real("tree_65_short", 65, 5, 1024, blind=7),
    _real("tree_65_empty", 65, 0, 1024, blind=7),
    _real("tree_129", 129, 2047, 4096),
    _real("tree_257", 257, 1500, 2048),
    _real("sharp_65", 65, 2000, 4096, scores="sharp"),
    _real("rising_65", 65, 2000, 4096, scores="rising"),
    _real("falling_17", 17, 2000, 4096, scores="falling"),
    _real("equal_17", 17, 2000, 4096, scores="equal"),
    _real("size_128_ratio_4", 33, 1111, 2048, size=128, groups=2, ratio=4),
    _real("size_24_ratio_3", 33, 1111, 2048, size=24, groups=2, ratio=3),
    *(
        _real(f"window_{length}", 16, length, 8192, size=128, groups=8, ratio=4, window=2048)
        for length in (0, 1000, 2040, 2048, 5001)
    ),
    _real("window_1", 16, 1000, 2048, size=128, groups=8, ratio=4, window=1),
)


def benchmark_spec(rows: int, context: int, capacity: int | None = None) -> Spec:
    """An attention layer of Qwen3.6-27B, in a cache with some room to grow unless stated."""
    capacity = min(2 * context, context + 4096) if capacity is None else capacity
    return _real(f"qwen36_27b_{rows}_{context}", rows, context, capacity)
