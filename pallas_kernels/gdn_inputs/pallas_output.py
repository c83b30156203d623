"""The gated norm in one launch: a program owns a head and a block of rows."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import load, span, store
from pallas_kernels.gdn_inputs.pallas import Config, default_config, load_part


def finish(
    out: jax.Array,
    z: jax.Array,
    weight: jax.Array,
    eps: float,
    column: int = 0,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns the gated norm. Arguments as in `gdn_output`."""
    config = config or default_config(out.shape[0])
    made = _launch(out, z, weight, eps, column, config, interpret)
    return made.reshape(out.shape[0], -1)


# A function of its own to the tracer: a kernel is traced and lowered once for all layers.
@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _launch(out, z, weight, eps: float, column: int, config: Config, interpret: bool):
    rows, heads, _ = out.shape
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, column=column, config=config),
        grid=(heads, pl.cdiv(rows, config.block_n)),
        out_shape=jax.ShapeDtypeStruct(out.shape, z.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_output",
    )(out, z, weight)


def _kernel(out_ref, z_ref, weight_ref, y_ref, *, eps: float, column: int, config: Config):
    head, size = pl.program_id(0), out_ref.shape[2]
    rows = span(pl.program_id(1), config.block_n)
    columns = span(0, pl.next_power_of_2(size))
    y = load(out_ref, rows, head, columns)
    z = load_part(z_ref, rows, column + head * size, size).astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(y * y, axis=1) / size + eps)[:, None]
    y = y * scale * load(weight_ref, columns).astype(jnp.float32)[None, :]
    store(y_ref, (y * z * jax.nn.sigmoid(z)).astype(y_ref.dtype), rows, head, columns)
