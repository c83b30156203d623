"""What a figure depends on: versions, device, kernel path, types."""

from __future__ import annotations

from typing import Any

from tfm_jax.config import VerifierConfig


def device_setting() -> dict[str, str]:
    """Versions and the default device."""
    import jax

    import tfm_jax

    return {
        "tfm_jax": tfm_jax.__version__,
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }


def kernel_path(config: VerifierConfig, rows: int) -> tuple[str, str]:
    """The implementation that verifies a tree of `rows` rows on this device, and why."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.gdn_tree import pallas

    platform = jax.default_backend()
    if platform == "cpu":
        return "xla", "this is a CPU"
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    q = jax.ShapeDtypeStruct((rows, heads[0], config.linear_key_head_dim), jnp.float32)
    v = jax.ShapeDtypeStruct((rows, heads[1], config.linear_value_head_dim), jnp.float32)
    reason = pallas.unsupported(q, v, platform)  # type: ignore[arg-type]
    return ("xla", reason) if reason else ("pallas", "this GPU has what the kernel needs")


def run_setting(model: str, verifier: VerifierConfig, dtype: Any, rows: int) -> dict[str, Any]:
    """`device_setting`, and the model, its type and the kernel path for trees of `rows` rows."""
    return {
        "model": model,
        "dtype": str(dtype),
        "kernels": kernel_path(verifier, rows)[0],
        **device_setting(),
    }
