"""Products of a few rows with a large weight, bound by reading the weight."""

from pallas_kernels.skinny_matmul.multiply import skinny_matmul

__all__ = ["skinny_matmul"]
