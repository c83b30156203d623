"""The largest entries of every row of a wide array, sorted, ties to the lowest id."""

from pallas_kernels.top_k.select import top_k

__all__ = ["top_k"]
