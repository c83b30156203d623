"""Lossless speculative decoding with trees from marginals, for Qwen3.6 hybrid models."""

from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.model import Generation, Model, load

__version__ = "0.1.0"
__all__ = ["Generation", "Model", "Sampling", "TreeConfig", "__version__", "load"]
