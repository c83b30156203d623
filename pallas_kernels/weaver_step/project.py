"""A projection of a few rows: norm, product, bias, activation and residual in one launch.

With 4 nodes a tensor-core tile of 16 rows would be three quarters empty and its contraction one
long chain of dependent steps. So every weight row is cut into S = 16 / nodes pieces that become
rows of their own: the tile's 16 rows are the pieces of all nodes, the chain is S times shorter,
and of the product only entries that pair equal pieces count.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.blocks import load, span
from pallas_kernels.weaver_step.launch import (
    TILE,
    Config,
    floor_power_of_2,
    gather,
    launch,
    product,
    scatter,
)
from pallas_kernels.weaver_step.state import EPS, Activation, Projection

MAX_NODES = TILE

_NORM = ("weight", "bias")


def project(
    x: jax.Array,
    projection: Projection,
    *,
    activation: Activation | None = None,
    residual: jax.Array | None = None,
    config: Config,
    interpret: bool,
) -> jax.Array:
    """Returns `residual + activation(projection(x))` for rows [w, in], as `xla.project` does."""
    nodes, inner = x.shape
    halves = 2 if activation == "silu_gated" else 1
    outer = projection.weight.shape[0] // halves
    splits = math.gcd(inner, TILE // pl.next_power_of_2(nodes))
    piece = inner // splits
    itemsize = projection.weight.dtype.itemsize
    block = floor_power_of_2(config.project_bytes // (halves * inner * itemsize))
    block = max(min(block, pl.next_power_of_2(outer)), pl.cdiv(TILE, splits))
    norm, bias = projection.norm, projection.bias
    inputs = {
        "weight": projection.weight.reshape(halves, outer * splits, piece),
        "x": x.reshape(nodes * splits, piece),
        "norm_weight": None if norm is None else norm.weight.reshape(splits, piece),
        "norm_bias": None if norm is None else norm.bias.reshape(splits, piece),
        "bias": None if bias is None else bias.reshape(halves, outer),
        "residual": residual,
    }
    kernel = functools.partial(
        _kernel,
        splits=splits,
        block=block,
        columns=min(config.project_columns, max(pl.next_power_of_2(piece), TILE)),
        activation=activation,
    )
    return launch(
        kernel,
        inputs,
        outputs={"y": jax.ShapeDtypeStruct((nodes, outer), x.dtype)},
        grid=(pl.cdiv(outer, block),),
        warps=config.project_warps,
        stages=config.project_stages,
        interpret=interpret,
        name="weaver_project",
    )["y"]


def _kernel(inputs, outputs, *, splits: int, block: int, columns: int, activation):
    x_ref, weight_ref, y_ref = inputs["x"], inputs["weight"], outputs["y"]
    own = pl.program_id(0)
    halves, _, piece = weight_ref.shape
    normed = "norm_weight" in inputs
    # Whole pieces fill the tile: y may have more rows than there are nodes.
    row = jnp.arange(TILE // splits)[:, None]
    column = own * block + jnp.arange(block)[None, :]
    inside = (row < y_ref.shape[0]) & (column < y_ref.shape[1])

    def advance(i, carry):
        """Adds the products of one chunk: those with x, those with the norm's bias, and x^2."""
        scaled, fixed, squares = carry
        chunk = span(i, columns)
        x = load(x_ref, span(0, TILE), chunk)
        if normed:
            wide = x.astype(jnp.float32)
            squares += wide * wide
            weight, bias = (_read_norm(inputs[f"norm_{n}"], chunk, splits) for n in _NORM)
            x = (wide * weight.astype(jnp.float32)).astype(x.dtype)
        tiles = [load(weight_ref, h, span(own, block * splits), chunk) for h in range(halves)]
        scaled = [t + product(x, w, transpose_y=True) for t, w in zip(scaled, tiles, strict=True)]
        if normed:
            fixed = [
                t + product(bias, w, transpose_y=True) for t, w in zip(fixed, tiles, strict=True)
            ]
        return scaled, fixed, squares

    zeros = [jnp.zeros((TILE, block * splits), jnp.float32) for _ in range(halves)]
    squares = jnp.zeros((TILE, columns), jnp.float32)
    carry = (zeros, zeros if normed else [], squares if normed else None)
    scaled, fixed, squares = lax.fori_loop(0, pl.cdiv(piece, columns), advance, carry)
    parts = [_join_pieces(t, splits) for t in scaled]
    if normed:
        # The scale is known after the last chunk only: multiplied late, it saves a pass over x.
        total = jnp.sum(jnp.sum(squares, axis=1).reshape(TILE // splits, splits), axis=1)
        scale = lax.rsqrt(total / (splits * piece) + EPS)[:, None]
        parts = [y * scale + _join_pieces(t, splits) for y, t in zip(parts, fixed, strict=True)]
    if "bias" in inputs:
        parts = [
            y + load(inputs["bias"], h, span(own, block)).astype(jnp.float32)[None, :]
            for h, y in enumerate(parts)
        ]
    y = _activate(parts, activation)
    if "residual" in inputs:
        y = gather(inputs["residual"], row, column, mask=inside).astype(jnp.float32) + y
    scatter(y_ref, y, row, column, mask=inside)


def _read_norm(ref, chunk: pl.Slice, splits: int) -> jax.Array:
    """The norm's weight or bias for the pieces in the tile's rows, [TILE, columns]."""
    x = load(ref, span(0, splits), chunk)
    x = jnp.broadcast_to(x[None], (TILE // splits, splits, chunk.size))
    return x.reshape(TILE, chunk.size)


def _join_pieces(total: jax.Array, splits: int) -> jax.Array:
    """Sums the entries [(node, piece), (column, piece)] of equal pieces: [node, column]."""
    if splits == 1:
        return total
    rows, columns = total.shape
    row = lax.broadcasted_iota(jnp.int32, total.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, total.shape, 1)
    total = jnp.where(row % splits == column % splits, total, 0.0)
    total = total.reshape(rows // splits, splits, columns // splits, splits)
    return jnp.sum(jnp.sum(total, axis=3), axis=1)


def _activate(parts: list[jax.Array], activation: Activation | None) -> jax.Array:
    y = parts[0]
    if activation is None:
        return y
    if activation == "silu_gated":
        return y * lax.logistic(y) * parts[1]
    return 0.5 * y * (1.0 + (_tanh_of_gelu(y) if activation == "gelu_tanh" else _erf_of_gelu(y)))


def _tanh_of_gelu(y: jax.Array) -> jax.Array:
    return jnp.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y * y * y))


def _erf_of_gelu(y: jax.Array) -> jax.Array:
    """erf(y / sqrt 2) within 1.5e-7 (Abramowitz and Stegun, 7.1.26); Triton has none."""
    z = jnp.abs(y) * math.sqrt(0.5)
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = 1.061405429
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + coefficient
    magnitude = 1.0 - series * t * jnp.exp(-z * z)
    return jnp.where(y < 0, -magnitude, magnitude)
