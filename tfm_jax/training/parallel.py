"""One batch over several devices: each takes its share of the rows, and holds all else whole."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_ROWS = "rows"
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """The first `count` devices; one device leaves all arrays where they are."""

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"devices must be positive, got {self.count}")
        if self.count > 1 and self.count > len(jax.devices()):
            raise ValueError(f"{self.count} devices asked for, {len(jax.devices())} found")

    def check(self, rows: int) -> None:
        """Raises ValueError if so many rows do not split evenly."""
        if rows % self.count:
            raise ValueError(f"{rows} rows a step do not split among {self.count} devices")

    def copy(self, tree: Tree) -> Tree:
        """The arrays of a pytree, whole on each device."""
        return tree if self.count == 1 else jax.device_put(tree, self.everywhere)

    def split(self, batch: Tree) -> Tree:
        """The arrays of a batch, an equal part of their rows on each device."""
        if self.count == 1:
            return batch
        return jax.device_put(batch, NamedSharding(self._mesh, PartitionSpec(_ROWS)))

    def gather(self, tree: Tree) -> Tree:
        """The arrays of `copy`, on the first device alone."""
        return tree if self.count == 1 else jax.device_put(tree, jax.devices()[0])

    @property
    def everywhere(self) -> NamedSharding | None:
        """Where `copy` puts arrays; None for one device."""
        return None if self.count == 1 else NamedSharding(self._mesh, PartitionSpec())

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()[: self.count]), (_ROWS,))
