"""The cases that tests and timings share: kinds of rows, hostile ones too, and exact results."""

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One selection problem.

    Attributes:
      rows, columns, k: as in `top_k`.
      kind: what the rows hold, see `make_inputs`.
      limit: first padding column; all columns are real if None.
      dtype: "float32" or "bfloat16".
    """

    rows: int
    columns: int
    k: int
    kind: str = "normal"
    limit: int | None = None
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Unique among the cases."""
        size = f"{self.rows}x{self.columns}_{self.k}"
        limit = "" if self.limit is None else f"_limit_{self.limit}"
        return f"{self.kind}_{size}{limit}_{self.dtype}"


KINDS = (
    "normal",
    "ascending",
    "descending",
    "equal",
    "few",
    "two",
    "cluster",
    "sloping",
    "infinite",
    "all_minus_infinity",
    "zeros",
    "nan",
    "all_nan",
)


def make_inputs(spec: Spec, seed: int = 0) -> np.ndarray:
    """Returns x [rows, columns] of `dtype`; NaN fills padding columns, which are to be ignored."""
    rng = np.random.default_rng(seed)
    shape = (spec.rows, spec.columns)
    x = (3 * rng.standard_normal(shape, np.float32)).astype(np.float32)
    match spec.kind:
        case "normal":
            pass
        case "ascending":
            x.sort(axis=1)
        case "descending":
            x = -np.sort(x, axis=1)
        case "equal":
            x = np.full(shape, -1.5, np.float32)
        case "few":
            x = np.round(x)
        case "two":  # more of the larger value than k, or fewer
            x = np.where(rng.random(shape) < 1.5 * spec.k / spec.columns, 1.0, -2.0)
        case "cluster":  # all winners side by side, but for some
            start = rng.integers(0, max(1, spec.columns - spec.k))
            x[:, start : start + spec.k - spec.k // 8] += 50
        case "sloping":  # rarer tokens have larger ids
            x -= 1.2 * np.log1p(np.arange(spec.columns, dtype=np.float32) / 200)
        case "infinite":
            x = np.where(rng.random(shape) < 0.3, np.inf, x)
            x = np.where(rng.random(shape) < 0.9, -np.inf, x)
        case "all_minus_infinity":
            x = np.full(shape, -np.inf, np.float32)
        case "zeros":
            x = np.where(rng.random(shape) < 0.5, 0.0, -0.0)
            x[:, :: max(2, spec.columns // 7)] = -1e-30
        case "nan":
            x = np.where(rng.random(shape) < 0.4 * spec.k / spec.columns, np.nan, x)
            x = np.where(rng.random(shape) < 0.4, np.copysign(np.nan, -1), x)
        case "all_nan":
            x = np.full(shape, np.copysign(np.nan, -1), np.float32)
            x.view(np.int32)[...] = -1  # the last of all values in the order of bits
        case _:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {spec.kind!r}")
    x = _as_type(np.asarray(x, np.float32), spec.dtype)
    if spec.limit is not None:
        x[:, spec.limit :] = np.nan
    return x


def solve(x: np.ndarray, k: int, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns exact `(values, ids)` by a stable sort."""
    x = x.copy()
    if limit is not None:
        x[:, limit:] = -np.inf
    bits = x.view(f"i{x.itemsize}")
    # A set sign bit turns the order of the others around.
    order = np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
    ids = np.argsort(~order, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(x, ids, axis=1), ids.astype(np.int32)


def mistakes(result: tuple, expected: tuple[np.ndarray, np.ndarray]) -> float:
    """Share of the output's entries that differ, in value (also in sign) or column."""
    wrong = np.zeros(expected[1].shape, bool)
    for actual, exact in zip(map(np.asarray, result), expected, strict=True):
        if actual.shape != exact.shape or actual.dtype != exact.dtype:
            return 1.0
        # As float64: which NaN it is may change wherever a value passes through arithmetic.
        actual, exact = actual.astype(np.float64), exact.astype(np.float64)
        same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
        wrong |= ~same | (np.signbit(actual) != np.signbit(exact))
    return float(wrong.mean())


def _as_type(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float32":
        return x
    # The upper half of the bits: a conversion may change which NaN it is.
    upper = (x.view(np.uint32) >> 16).astype(np.uint16)
    return upper.view(jnp.bfloat16)


SMALL = (
    *(
        Spec(rows=2, columns=1300, k=k, kind=kind, limit=limit)
        for kind in KINDS
        for k, limit in ((8, 1300), (40, 1111))
    ),
    *(
        Spec(rows=3, columns=1024, k=100, kind=kind, limit=limit, dtype="bfloat16")
        for kind, limit in (
            ("normal", 1024),
            ("few", 777),
            ("equal", 101),
            ("normal", 60),
            ("nan", 1000),
            ("all_nan", 1024),
            ("zeros", 1024),
        )
    ),
    *(
        Spec(rows=1, columns=77, k=77, kind=kind, limit=limit)
        for kind, limit in (("normal", 77), ("few", 30), ("nan", 0), ("all_nan", 77))
    ),
)

REAL = (
    *(
        Spec(rows=15, columns=248320, k=512, kind=kind, limit=248077, dtype=dtype)
        for dtype in ("float32", "bfloat16")
        for kind in KINDS
    ),
    *(
        Spec(rows=15, columns=248320, k=512, kind="normal", limit=limit)
        for limit in (0, 100, 512, 4097, None)
    ),
    *(
        Spec(rows=rows, columns=columns, k=k, kind=kind, limit=columns)
        for rows, columns, k in (
            (1, 9, 1),
            (1, 248320, 512),
            (2, 300000, 64),
            (3, 151936, 1024),
            (200, 5001, 512),
        )
        for kind in ("normal", "few", "ascending")
    ),
)
