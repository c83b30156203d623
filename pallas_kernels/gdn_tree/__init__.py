"""Verification of a draft tree through a gated delta-rule layer, and commit of a path of it."""

from pallas_kernels.gdn_tree.commit import gdn_tree_commit, gdn_tree_commit_path
from pallas_kernels.gdn_tree.topology import NO_PARENT, TreeTopology, tree_topology
from pallas_kernels.gdn_tree.verify import (
    GDNTreeResult,
    gdn_tree_verify,
    implementation_for,
)

__all__ = [
    "NO_PARENT",
    "GDNTreeResult",
    "TreeTopology",
    "gdn_tree_commit",
    "gdn_tree_commit_path",
    "gdn_tree_verify",
    "implementation_for",
    "tree_topology",
]
