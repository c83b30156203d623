"""The gated norm in one launch: a program owns a head and a block of rows."""

import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import load, span, store
from pallas_kernels.gdn_inputs.pallas import Config, default_config

# The notice is about the backend's future, and nothing a caller can act on.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def finish(
    out: jax.Array,
    z: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns the gated norm. Arguments as in `gdn_output`."""
    config = config or default_config(out.shape[0])
    return _launch(out, z.reshape(out.shape), weight, eps, config, interpret).reshape(z.shape)


# A function of its own to the tracer: a kernel is traced and lowered once for all layers.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _launch(out, z, weight, eps: float, config: Config, interpret: bool):
    rows, heads, _ = out.shape
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, config=config),
        grid=(heads, pl.cdiv(rows, config.block_n)),
        out_shape=jax.ShapeDtypeStruct(out.shape, z.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_output",
    )(out, z, weight)


def _kernel(out_ref, z_ref, weight_ref, y_ref, *, eps: float, config: Config):
    head, size = pl.program_id(0), out_ref.shape[2]
    rows = span(pl.program_id(1), config.block_n)
    columns = span(0, pl.next_power_of_2(size))
    y = load(out_ref, rows, head, columns)
    z = load(z_ref, rows, head, columns).astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(y * y, axis=1) / size + eps)[:, None]
    y = y * scale * load(weight_ref, columns).astype(jnp.float32)[None, :]
    store(y_ref, (y * z * jax.nn.sigmoid(z)).astype(y_ref.dtype), rows, head, columns)
