"""The cases that tests and timings share: layers, pending rows and an accepted path among them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One commit of several gated delta-rule layers.

    Attributes:
      name: unique among the cases.
      nodes: verified rows.
      path: entries of the path, valid or not.
      count: accepted rows.
      width: rows of history.
      wider: columns of the inputs beyond the channels.
      scaled: keys come with scales.
      dtype: of keys, inputs and history.
      log_decay: mean log-decay of a row.
    """

    name: str
    nodes: int
    count: int
    path: int = 16
    layers: int = 2
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    channels: int = 64
    width: int = 3
    wider: int = 0
    scaled: bool = False
    dtype: str = "float32"
    log_decay: float = -0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of `commit_linear` as numpy arrays, one a layer and float32 throughout."""

    states: list[np.ndarray]
    histories: list[np.ndarray]
    keys: list[np.ndarray]
    us: list[np.ndarray]
    log_decays: list[np.ndarray]
    inputs: list[np.ndarray]
    path: np.ndarray
    count: int
    key_scales: list[np.ndarray] | None = None

    def arguments(self, dtype: str) -> tuple:
        """The arguments on the device, in order; keys, inputs and histories in `dtype`."""
        low = lambda arrays: tuple(jnp.asarray(x, dtype) for x in arrays)
        high = lambda arrays: tuple(jnp.asarray(x, jnp.float32) for x in arrays)
        return (
            high(self.states),
            low(self.histories),
            low(self.keys),
            high(self.us),
            high(self.log_decays),
            low(self.inputs),
            jnp.asarray(self.path),
            jnp.int32(self.count),
        )

    def scales(self) -> dict[str, tuple]:
        """The argument `key_scales` on the device, if there is one."""
        if self.key_scales is None:
            return {}
        return {"key_scales": tuple(jnp.asarray(x) for x in self.key_scales)}

    def poisoned(self) -> "Inputs":
        """The inputs with NaN in every row off the path, and where it is not an input at all."""
        changed = {}
        scales = () if self.key_scales is None else ("key_scales",)
        for name in ("keys", "us", "log_decays", "inputs", *scales):
            changed[name] = [x.copy() for x in getattr(self, name)]
            for x in changed[name]:
                x[np.setdiff1d(np.arange(len(x)), self.path[: self.count])] = np.nan
        for x in changed["inputs"]:
            x[:, self.histories[0].shape[1] :] = np.nan
        return dataclasses.replace(self, **changed)


def solve(inputs: Inputs) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the exact states and histories in float64 numpy, row after row."""
    rows = inputs.path[: inputs.count]
    states, histories = [], []
    for i, state in enumerate(inputs.states):
        k, u, log_decay = (
            x[i][rows].astype(np.float64) for x in (inputs.keys, inputs.us, inputs.log_decays)
        )
        if inputs.key_scales is not None:
            k = k * inputs.key_scales[i][rows, :, None]
        k = np.repeat(k, u.shape[1] // k.shape[1], axis=1)
        state = np.exp(log_decay[-1])[:, None, None] * state.astype(np.float64)
        weighed = np.exp(log_decay[-1] - log_decay)[:, :, None] * u
        states.append(state + k.transpose(1, 2, 0) @ weighed.transpose(1, 0, 2))
        line = np.concatenate(
            [inputs.histories[i], inputs.inputs[i][rows, : inputs.histories[i].shape[1]]]
        )
        histories.append(line[len(rows) :])
    return states, histories


def make_inputs(spec: Spec, seed: int = 0) -> Inputs:
    """Returns the inputs of a case, the same for the same seed; `spec.dtype` holds them exactly."""
    rng = np.random.default_rng(seed)
    path = make_path(spec.nodes, spec.path, spec.count, rng)

    def arrays(*shape: int, low: bool = False) -> list[np.ndarray]:
        made = [rng.standard_normal(shape).astype(np.float32) for _ in range(spec.layers)]
        return [_rounded(x, spec.dtype) for x in made] if low else made

    keys = arrays(spec.nodes, spec.key_heads, spec.key_dim)
    scales = [1 / np.linalg.norm(x, axis=-1) for x in keys]
    if not spec.scaled:
        keys = [x * scale[:, :, None] for x, scale in zip(keys, scales, strict=True)]
    log_decays = []
    for _ in range(spec.layers):
        steps = spec.log_decay * rng.exponential(1, (spec.nodes, spec.value_heads))
        rows = path[: spec.count]
        steps[rows] = np.cumsum(steps[rows], axis=0)
        log_decays.append(steps.astype(np.float32))
    return Inputs(
        states=arrays(spec.value_heads, spec.key_dim, spec.value_dim),
        histories=arrays(spec.width, spec.channels, low=True),
        keys=[_rounded(x, spec.dtype) for x in keys],
        us=arrays(spec.nodes, spec.value_heads, spec.value_dim),
        log_decays=log_decays,
        inputs=arrays(spec.nodes, spec.channels + spec.wider, low=True),
        path=path,
        count=spec.count,
        key_scales=scales if spec.scaled else None,
    )


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x` as `dtype` holds it, in float32."""
    return np.asarray(jnp.asarray(x, dtype), np.float32)


def make_path(nodes: int, size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` ascending rows from the root, then entries that are no rows at all."""
    path = rng.choice([-1, nodes, 10**6, -(10**6)], size).astype(np.int32)
    path[:count] = np.concatenate([[0], 1 + np.sort(rng.permutation(nodes - 1)[: count - 1])])
    return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVSpec:
    """One compaction of several caches, of which `length` rows are committed."""

    name: str
    nodes: int
    count: int
    length: int
    path: int = 16
    caches: int = 2
    heads: int = 2
    capacity: int = 40
    size: int = 16
    dtype: str = "float32"


def make_kv(spec: KVSpec, seed: int = 0) -> tuple:
    """Returns the arguments of `commit_kv` on the device, NaN in the rows off the path."""
    rng = np.random.default_rng(seed)
    path = make_path(spec.nodes, spec.path, spec.count, rng)
    caches, rows = [], []
    for _ in range(spec.caches):
        shape = (spec.heads, spec.capacity, spec.size)
        caches.append(jnp.asarray(rng.standard_normal(shape), spec.dtype))
        own = rng.standard_normal((spec.heads, spec.nodes, spec.size))
        own[:, np.setdiff1d(np.arange(spec.nodes), path[: spec.count])] = np.nan
        rows.append(jnp.asarray(own, spec.dtype))
    return (
        tuple(caches),
        tuple(rows),
        jnp.asarray(path),
        jnp.int32(spec.count),
        jnp.int32(spec.length),
    )


def solve_kv(caches, rows, path, count, length) -> list[np.ndarray]:
    """Returns the exact caches as float32 numpy arrays."""
    path, length = np.asarray(path)[: int(count)], int(length)
    compacted = []
    for cache, own in zip(caches, rows, strict=True):
        cache = np.array(cache, np.float32)
        fitting = path[: cache.shape[1] - length]
        cache[:, length : length + len(fitting)] = np.asarray(own, np.float32)[:, fitting]
        compacted.append(cache)
    return compacted


# Head ratios 1 to 4, sizes that are no powers of two and about the edges of blocks.
SMALL = (
    Spec(name="one_row", nodes=1, count=1, path=1, value_heads=1, layers=1),
    Spec(name="odd_sizes", nodes=5, count=2, path=5, key_heads=2, key_dim=12, value_dim=20),
    Spec(name="whole_path", nodes=16, count=16, channels=1030, value_heads=4, layers=3),
    Spec(name="long_path", nodes=33, count=21, path=33, value_heads=3, key_dim=72, width=1),
    Spec(name="strong_decay", nodes=17, count=7, log_decay=-50.0, value_dim=72, width=4),
    Spec(name="bfloat16", nodes=9, count=5, dtype="bfloat16"),
    Spec(name="scaled", nodes=9, count=4, key_heads=2, value_heads=4, scaled=True, wider=24),
)
SMALL_KV = (
    KVSpec(name="one_row", nodes=1, count=1, length=0, path=1, caches=1),
    KVSpec(name="odd_sizes", nodes=7, count=3, length=5, path=7, heads=3, size=24),
    KVSpec(name="fills_up", nodes=20, count=16, length=24),
    KVSpec(name="beyond_capacity", nodes=20, count=9, length=37),
    KVSpec(name="full", nodes=5, count=5, length=40, path=5),
    KVSpec(name="bfloat16", nodes=9, count=5, length=3, dtype="bfloat16"),
)

_REAL: dict[str, Any] = {
    "key_heads": 2,
    "value_heads": 6,
    "key_dim": 128,
    "value_dim": 128,
    "channels": 10240,
}

# Head sizes of the checkpoints; more layers than one launch takes.
REAL = (
    *(
        Spec(
            name=f"real_{nodes}_{dtype}", nodes=nodes, count=count, layers=18, dtype=dtype, **_REAL
        )
        for nodes, count in ((16, 16), (65, 5), (128, 1), (256, 12))
        for dtype in ("float32", "bfloat16")
    ),
    Spec(name="real_strong_decay", nodes=65, count=9, log_decay=-50.0, layers=2, **_REAL),
    # As the model keeps them: keys not yet normalised, inputs among other projections.
    *(
        Spec(
            name=f"real_scaled_{dtype}",
            nodes=65,
            count=7,
            layers=3,
            dtype=dtype,
            scaled=True,
            wider=6240,
            **_REAL,
        )
        for dtype in ("float32", "bfloat16")
    ),
)
REAL_KV = tuple(
    KVSpec(
        name=f"real_{nodes}",
        nodes=nodes,
        count=count,
        length=length,
        caches=34,
        heads=4,
        capacity=1024,
        size=256,
        dtype="bfloat16",
    )
    for nodes, count, length in ((16, 16, 0), (65, 5, 333), (129, 12, 1015))
)


def benchmark_spec(nodes: int, count: int) -> Spec:
    """One DeltaNet layer of Qwen3.6-27B after `count` accepted rows."""
    return Spec(
        name=f"qwen36_27b_{nodes}_{count}",
        nodes=nodes,
        count=count,
        layers=1,
        key_heads=16,
        value_heads=48,
        key_dim=128,
        value_dim=128,
        channels=10240,
        dtype="bfloat16",
    )


def benchmark_kv_spec() -> KVSpec:
    """The key and value caches of Qwen3.6-27B after a wholly accepted path of a 64-node tree."""
    return KVSpec(
        name="qwen36_27b",
        nodes=65,
        count=16,
        length=1000,
        caches=32,
        heads=4,
        capacity=2048,
        size=256,
        dtype="bfloat16",
    )


def same(x: jax.Array, y: np.ndarray) -> bool:
    """Whether two arrays hold the same values, whatever their types."""
    return bool(np.array_equal(np.asarray(x, np.float32), y.astype(np.float32)))
