"""Tree verification of one gated delta-rule layer: checks and choice of implementation."""

import typing

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.checks import beyond
from pallas_kernels.choice import Implementation
from pallas_kernels.concrete import concrete
from pallas_kernels.gdn_tree import pallas, reference, xla
from pallas_kernels.gdn_tree.topology import TreeTopology, tree_topology

_NAME = "gdn_tree_verify"


class GDNTreeResult(typing.NamedTuple):
    """What verification returns for every node, zeros on padding rows.

    Attributes:
      out: float32 [N, HV, DV], the layer's output.
      u: float32 [N, HV, DV], the corrected value each node writes; `gdn_tree_commit` takes it.
      log_decay: float32 [N, HV], sum of `g` over root..node.
    """

    out: jax.Array
    u: jax.Array
    log_decay: jax.Array


def gdn_tree_verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    s0: jax.Array,
    parents: jax.Array,
    *,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    valid: jax.Array | None = None,
    implementation: Implementation = "auto",
    topology: TreeTopology | None = None,
) -> GDNTreeResult:
    """Returns outputs and corrected values of all tree nodes in one pass, without their states.

    Equal to running the gated delta rule token by token along each node's own path, see
    `reference.verify` (DFlash-TfM, arXiv 2607.06763). Unbatched; lift with `jax.vmap`. The `xla`
    and `reference` implementations can be differentiated.

    Args:
      q, k: [N, HK, DK] float32 or bfloat16. Times their scales `k` is L2-normalised or shorter,
        and `q` is so times DK^-1/2.
      v: [N, HV, DV] float32 or bfloat16; value head h reads key head h // (HV // HK).
      g: float32 [N, HV], log-decay, <= 0.
      beta: float32 [N, HV], write strength in [0, 1].
      s0: float32 [HV, DK, DV], the committed state above the root.
      parents: int32 [N]; `parents[i] < i`, -1 at the root, of which there is one, and on padding
        rows.
      q_scale, k_scale: float32 [N, HK], what each vector of `q` and `k` is to be multiplied by;
        None stands for 1. Raw bfloat16 vectors with scales are exact where rounded unit vectors
        are not, and cost the kernel half the products of float32 ones.
      valid: bool [N]; False marks padding rows, whose inputs may hold anything.
      implementation: "auto" takes "pallas" on a GPU that supports the shape, else "xla".
        "pallas" runs interpreted on a CPU. "reference" walks the nodes one by one.
      topology: `tree_topology(parents, valid)`, to share it between layers; goes without `valid`.

    Raises:
      TypeError: an argument of a type not listed above.
      ValueError: shapes that do not belong together, an unknown implementation, both `topology`
        and `valid`, or more than one root (checked unless traced).
      NotImplementedError: "pallas" on a device or shape it does not support.
    """
    scales = {"q_scale": q_scale, "k_scale": k_scale}
    _check(q, k, v, g, beta, s0, parents, scales)
    implementation = choice.choose(_NAME, implementation, _refusal(q.shape[0]))
    if topology is None:
        topology = tree_topology(parents, valid)
    elif valid is not None:
        raise ValueError("valid is already part of topology: give one of the two")
    elif topology.depth.shape != parents.shape:
        rows = topology.depth.shape[0]
        raise ValueError(f"topology has {rows} rows, parents {parents.shape[0]}")
    _check_root(topology)

    if implementation == "reference":
        parents = jnp.asarray(parents, jnp.int32)
        result = reference.verify(
            q, k, v, g, beta, s0, parents, topology.valid, q_scale=q_scale, k_scale=k_scale
        )
    elif implementation == "xla":
        result = xla.verify(q, k, v, g, beta, s0, topology, q_scale=q_scale, k_scale=k_scale)
    else:
        result = pallas.verify(
            q,
            k,
            v,
            g,
            beta,
            s0,
            pallas.describe(topology),
            q_scale=q_scale,
            k_scale=k_scale,
            interpret=choice.interpreted(),
        )
    return GDNTreeResult(*result)


def implementation_for(nodes: int) -> tuple[Implementation, str | None]:
    """What "auto" runs for trees of `nodes` rows on the default device.

    Returns the implementation, and why it is not the kernel on an accelerator that has none.
    """
    if choice.interpreted():
        return "xla", None
    try:
        return choice.choose(_NAME, "pallas", _refusal(nodes)), None
    except NotImplementedError as reason:
        return "xla", str(reason)


def _refusal(nodes: int) -> str | None:
    return beyond({"nodes": (nodes, pallas.MAX_NODES)})


def _check_root(topology: TreeTopology) -> None:
    depth = concrete(topology.depth)
    roots = [] if depth is None else [int(row) for row in (depth == 0).nonzero()[0]]
    if len(roots) > 1:
        raise ValueError(f"a tree has one root, got rows {roots[0]} and {roots[1]}")


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    s0: jax.Array,
    parents: jax.Array,
    scales: dict[str, jax.Array | None],
) -> None:
    given = {name: x for name, x in scales.items() if x is not None}
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "s0": s0, "parents": parents, **given}
    for name, x in named.items():
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(f"{name} must have three axes, [N, heads, size], got {x.shape}")
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise TypeError(f"{name} must be float32 or bfloat16, got {x.dtype}")
    for name, x in (("g", g), ("beta", beta), ("s0", s0), *given.items()):
        if x.dtype != jnp.float32:
            raise TypeError(f"{name} must be float32, got {x.dtype}")
    if parents.dtype not in (jnp.int32, jnp.int64):
        raise TypeError(f"parents must be int32, got {parents.dtype}")
    nodes, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    if 0 in k.shape or 0 in v.shape:
        raise ValueError(f"no axis may be empty, got k {k.shape} and v {v.shape}")
    if value_heads % key_heads:
        raise ValueError(f"{value_heads} value heads cannot share {key_heads} key heads evenly")
    expected = {
        "q": (q, k.shape),
        "v": (v, (nodes, value_heads, value_dim)),
        "g": (g, (nodes, value_heads)),
        "beta": (beta, (nodes, value_heads)),
        "s0": (s0, (value_heads, key_dim, value_dim)),
        "parents": (parents, (nodes,)),
        **{name: (x, (nodes, key_heads)) for name, x in given.items()},
    }
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(
                f"{name} must be {shape} for k {k.shape} and v {v.shape}, got {x.shape}"
            )
