"""Attention of a draft tree's rows over each other and a long cache of keys and values."""

from pallas_kernels.tree_attention.attend import tree_attention
from pallas_kernels.tree_attention.gate import Gate

__all__ = ["Gate", "tree_attention"]
