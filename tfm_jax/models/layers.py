"""Parts that all three networks share: products, norms, rotary positions, attention."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import attention_inputs
from pallas_kernels.add_norm import add_norm
from pallas_kernels.skinny_matmul import skinny_matmul

EXACT = jax.lax.Precision.HIGHEST
MASKED = -1e30  # finite, so that a row with nothing to see gives zeros and no NaN


def project(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x @ weight.T` in the dtype of `x`, exact where that is float32.

    Args:
      x: [..., in].
      weight: [out, in], the layout of published checkpoints.
      out_dtype: of the result; that of `x` if not given. Sums are float32 either way.
    """
    return jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=EXACT if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype or x.dtype,
    )


class Linear(nnx.Module):
    """A weight [out, in] and, if asked for, a bias [out]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        bias: bool = False,
    ) -> None:
        scale = in_features**-0.5
        noise = jax.random.normal(rngs.params(), (out_features, in_features), jnp.float32)
        self.weight = nnx.Param((noise * scale).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def parts(self, x: jax.Array) -> jax.Array:
        """`x @ weight.T` of rows [N, in], or its parts, for `RMSNorm.after`; forward only."""
        if self.bias is not None:
            raise ValueError("parts of a product have no place for a bias")
        return skinny_matmul(x, self.weight[...].astype(x.dtype), parts=True)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * weight` over the last axis, float32 inside, in the dtype of `x`."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMS norm over the last axis; a zero-centred one multiplies by 1 + weight."""

    def __init__(
        self, features: int, eps: float, *, dtype: jnp.dtype, zero_centred: bool = False
    ) -> None:
        init = jnp.zeros if zero_centred else jnp.ones
        self.weight = nnx.Param(init((features,), dtype))
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...].astype(jnp.float32)
        return rms_norm(x, 1.0 + weight if self.zero_centred else weight, self.eps)

    def after(self, x: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`x + delta` [N, H] and its norm, in one launch on a GPU; forward only.

        `delta` is [N, H], or a product in parts [S, N, H].
        """
        return add_norm(x, delta, self.weight[...], self.eps, zero_centred=self.zero_centred)


class Stacked(nnx.Module):
    """Several maps without bias of one input, as one product.

    One launch in place of many: at a few rows, small products cost more than their bytes.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        if any(part.bias is not None for part in parts):
            raise ValueError("maps with a bias cannot be stacked")
        self.weight = nnx.Param(jnp.concatenate([part.weight[...] for part in parts]))
        self.sizes = tuple(part.weight.shape[0] for part in parts)

    @property
    def starts(self) -> tuple[int, ...]:
        """First column of each output in `joined`."""
        return (0, *itertools.accumulate(self.sizes[:-1]))

    def joined(self, x: jax.Array) -> jax.Array:
        """All outputs side by side, [..., sum of sizes]; forward only."""
        weight = self.weight[...].astype(x.dtype)
        return skinny_matmul(x, weight) if x.ndim == 2 else project(x, weight)

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        return jnp.split(self.joined(x), self.starts[1:], axis=-1)


class Projections(nnx.Module):
    """A module with linear maps of one input, `names`, that can be stacked for serving."""

    names: tuple[str, ...] = ()

    stacked: Stacked | None = None

    def project_all(self, x: jax.Array) -> list[jax.Array]:
        """The outputs of all maps, in the order of `names`."""
        if self.stacked is not None:
            return self.stacked(x)
        return [getattr(self, name)(x) for name in self.names]

    def project_in_place(self, x: jax.Array) -> tuple[list[jax.Array], tuple[int, ...]]:
        """For every map the array [N, ...] that holds its output, and the output's first column.

        Stacked, it is one array for all: who reads it there saves the launches of slices.
        """
        if self.stacked is not None:
            return [self.stacked.joined(x)] * len(self.names), self.stacked.starts
        return self.project_all(x), (0,) * len(self.names)

    def stack(self) -> None:
        """Joins the maps in place; the separate weights are let go."""
        self.stacked = Stacked([getattr(self, name) for name in self.names])
        for name in self.names:
            delattr(self, name)


class GatedMLP(Projections):
    """`down(silu(gate x) * up x)`."""

    names = ("gate_proj", "up_proj")

    def __init__(self, hidden: int, inner: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.gate_proj = Linear(hidden, inner, rngs=rngs, dtype=dtype)
        self.up_proj = Linear(hidden, inner, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(inner, hidden, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self._inner(x))

    def parts(self, x: jax.Array) -> jax.Array:
        """The result for rows [N, H], or its parts, for `RMSNorm.after`; forward only."""
        return self.down_proj.parts(self._inner(x))

    def _inner(self, x: jax.Array) -> jax.Array:
        gate, up = self.project_all(x)
        return jax.nn.silu(gate) * up


def stack_projections(network: nnx.Module) -> None:
    """Joins all maps of one input, in place, a module at a time: the form for decoding.

    The numbers stay what they were up to the order of sums; names no longer are the published ones.
    """
    for _, module in list(nnx.iter_modules(network)):
        if isinstance(module, Projections):
            module.stack()


def write_rows(cache: jax.Array, rows: jax.Array, start: jax.Array | int) -> jax.Array:
    """The cache [heads, S, D] with rows [heads, T, D] from row `start` on, in its own dtype."""
    return jax.lax.dynamic_update_slice_in_dim(cache, rows.astype(cache.dtype), start, axis=1)


def rotate(x: jax.Array, positions: jax.Array, theta: float, width: int) -> jax.Array:
    """Rotary embedding of the first `width` channels, halves paired (j, j + width / 2).

    Args:
      x: [T, heads, D].
      positions: [T] int32.
      theta: frequency base; frequency j is `theta ** (-2 j / width)`.
      width: even, at most D; the other channels pass unchanged.
    """
    return attention_inputs.rotate(x, *attention_inputs.turns(positions, theta, width, x.dtype))


def attend(
    q: jax.Array, parts: list[tuple[jax.Array, jax.Array, jax.Array]], *, scale: float | None = None
) -> jax.Array:
    """Softmax attention of grouped query heads over several stretches of keys.

    Scores are float32. Stretches are never concatenated, so a long cache is read in place.

    Args:
      q: [T, heads, D]; query head h reads key head h // (heads / key heads).
      parts: (keys [key heads, S, D], values [key heads, S, D], visible [T, S] bool) each.
      scale: of the scores; D ** -0.5 if not given.

    Returns:
      [T, heads, D] in the dtype of `q`; a row that sees nothing is zero.
    """
    rows, heads, size = q.shape
    groups = parts[0][0].shape[0]
    precision = EXACT if q.dtype == jnp.float32 else None
    grouped = q.reshape(rows, groups, heads // groups, size)
    scores = [
        jnp.where(
            visible[:, None, None, :],
            jnp.einsum(
                "tgrd,gsd->tgrs",
                grouped,
                keys.astype(q.dtype),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            * (size**-0.5 if scale is None else scale),
            MASKED,
        )
        for keys, _, visible in parts
    ]
    top = jnp.max(jnp.stack([s.max(axis=-1) for s in scores]), axis=0)[..., None]
    weights = [
        jnp.where(visible[:, None, None, :], jnp.exp(s - top), 0.0)
        for s, (_, _, visible) in zip(scores, parts, strict=True)
    ]
    total = jnp.sum(jnp.stack([w.sum(axis=-1) for w in weights]), axis=0)[..., None]  # [T, G, R, 1]
    mixed = sum(
        jnp.einsum(
            "tgrs,gsd->tgrd",
            w.astype(q.dtype),
            values.astype(q.dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        for w, (_, values, _) in zip(weights, parts, strict=True)
    )
    out = mixed / jnp.where(total > 0, total, 1.0)
    return out.reshape(rows, heads, size).astype(q.dtype)
