"""A projection of a few rows: product, bias and residual in one launch.

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
from pallas_kernels.weaver_step.state import Projection

MAX_NODES = TILE


def project(
    x: jax.Array,
    projection: Projection,
    *,
    residual: jax.Array | None = None,
    config: Config,
    interpret: bool,
) -> jax.Array:
    """Returns `residual + projection(x)` for rows [w, in] and a projection without a norm."""
    nodes, inner = x.shape
    outer = projection.weight.shape[0]
    splits = math.gcd(inner, TILE // pl.next_power_of_2(nodes))
    piece = inner // splits
    block = floor_power_of_2(config.project_bytes // (inner * projection.weight.dtype.itemsize))
    block = max(min(block, pl.next_power_of_2(outer)), pl.cdiv(TILE, splits))
    inputs = {
        "weight": projection.weight.reshape(outer * splits, piece),
        "x": x.reshape(nodes * splits, piece),
        "bias": projection.bias,
        "residual": residual,
    }
    kernel = functools.partial(
        _kernel,
        splits=splits,
        block=block,
        columns=min(config.project_columns, max(pl.next_power_of_2(piece), TILE)),
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


def _kernel(inputs, outputs, *, splits: int, block: int, columns: int):
    x_ref, weight_ref, y_ref = inputs["x"], inputs["weight"], outputs["y"]
    own = pl.program_id(0)
    # Whole pieces fill the tile: y may have more rows than there are nodes.
    row = jnp.arange(TILE // splits)[:, None]
    column = own * block + jnp.arange(block)[None, :]
    inside = (row < y_ref.shape[0]) & (column < y_ref.shape[1])

    def advance(i, total):
        chunk = span(i, columns)
        x = load(x_ref, span(0, TILE), chunk)
        weight = load(weight_ref, span(own, block * splits), chunk)
        return total + product(x, weight, transpose_y=True)

    total = jnp.zeros((TILE, block * splits), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(weight_ref.shape[1], columns), advance, total)
    y = _join_pieces(total, splits)
    if "bias" in inputs:
        y += load(inputs["bias"], span(own, block)).astype(jnp.float32)[None, :]
    if "residual" in inputs:
        y = gather(inputs["residual"], row, column, mask=inside).astype(jnp.float32) + y
    scatter(y_ref, y, row, column, mask=inside)


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
