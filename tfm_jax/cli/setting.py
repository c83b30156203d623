"""What a figure depends on: versions, device, kernel path, types."""

from __future__ import annotations

from typing import Any


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


def kernel_path(rows: int) -> tuple[str, str]:
    """The implementation that verifies a tree of `rows` rows on this device, and why."""
    import jax

    from pallas_kernels.gdn_tree import implementation_for

    implementation, reason = implementation_for(rows)
    if reason is None:
        reason = f"the default device is a {jax.default_backend().upper()}"
    return implementation, reason


def run_setting(model: str, dtype: Any, rows: int) -> dict[str, Any]:
    """`device_setting`, and the model, its type and the kernel path for trees of `rows` rows."""
    return {
        "model": model,
        "dtype": str(dtype),
        "kernels": kernel_path(rows)[0],
        **device_setting(),
    }
