"""Options that several commands share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from tfm_jax.cli.runtime import limit_gpu_memory
from tfm_jax.config import Sampling, TreeConfig

if TYPE_CHECKING:
    from tfm_jax.model import Model

Method = Literal["ar", "dflash", "ddtree", "tfm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """How the model is held.

    Attributes:
      dtype: Type of weights and activations. [default: float32 on a CPU, else bfloat16]
      memory_fraction: Share of the GPU's memory that JAX reserves. [default: JAX's own, 0.75]
    """

    dtype: Literal["float32", "bfloat16"] | None = None
    memory_fraction: float | None = None

    def load(self, model: str) -> Model:
        """The model on the default device; JAX is imported here, after its settings."""
        if self.memory_fraction is not None:
            limit_gpu_memory(self.memory_fraction)
        import tfm_jax

        return tfm_jax.load(model, dtype=self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """Shape of a draft tree; `dflash` drafts a chain and uses budget and pool alone.

    Attributes:
      budget: Drafted nodes a round, at most 1024.
      expand: Nodes that get children at once, in one call of the Weaver.
      children: Children offered to a node.
      pool: Candidate tokens kept per future position.
    """

    budget: int = TreeConfig.budget
    expand: int = TreeConfig.expand
    children: int = TreeConfig.children
    pool: int = TreeConfig.pool

    def config(self) -> TreeConfig:
        """The checked settings; ConfigError for a value out of range."""
        return TreeConfig(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a token is chosen from the verifier's logits.

    Attributes:
      temperature: 0 takes the most probable token.
      top_k: Keep the k most probable tokens; 0 keeps all.
      top_p: Keep tokens while the probability before them is below this.
      min_p: Keep tokens at least this share as probable as the best one.
      seed: Equal seeds give equal text, in every method.
      shared_noise: Grow trees under the noise that will choose the tokens. The text is the same.
    """

    temperature: float = Sampling.temperature
    top_k: int = Sampling.top_k
    top_p: float = Sampling.top_p
    min_p: float = Sampling.min_p
    seed: int = Sampling.seed
    shared_noise: bool = Sampling.shared_noise

    def config(self) -> Sampling:
        """The checked settings; ConfigError for a value out of range."""
        return Sampling(**dataclasses.asdict(self))
