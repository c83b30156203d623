"""Lossless speculative decoding with trees from marginals, for Qwen3.6 hybrid models."""

from typing import TYPE_CHECKING

from tfm_jax.config import Sampling, TreeConfig

if TYPE_CHECKING:
    from tfm_jax.model import Generation, Model, load, random_model

__version__ = "0.1.0"
__all__ = [
    "Generation",
    "Model",
    "Sampling",
    "TreeConfig",
    "__version__",
    "load",
    "random_model",
]


def __getattr__(name: str) -> object:
    # JAX is imported with the model, so that settings made before its first use take effect.
    if name in ("Generation", "Model", "load", "random_model"):
        from tfm_jax import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
