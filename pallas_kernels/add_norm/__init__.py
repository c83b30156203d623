"""A residual addition and the RMS norm of its sum, in one launch."""

from pallas_kernels.add_norm.add import add_norm

__all__ = ["add_norm"]
