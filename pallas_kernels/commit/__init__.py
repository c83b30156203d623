"""Advance of every layer's caches along an accepted path of a verified tree, in few launches."""

from pallas_kernels.commit.kv import commit_kv
from pallas_kernels.commit.linear import commit_linear

__all__ = ["commit_kv", "commit_linear"]
