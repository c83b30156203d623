"""What a growth is made of: Weaver's parameters, the pools, and the tree while it grows."""

import typing

import jax
import jax.numpy as jnp

Activation = typing.Literal["gelu_tanh", "gelu_erf", "silu_gated"]

NO_PARENT = -1
EPS = 1e-6


class Norm(typing.NamedTuple):
    """`x / sqrt(mean(x^2) + 1e-6) * weight + bias`, both [K]: no mean is subtracted."""

    weight: jax.Array
    bias: jax.Array


class Projection(typing.NamedTuple):
    """`weight @ norm(x) + bias`: weight [out, in], bias [out] or None, norm over `in` or None."""

    weight: jax.Array
    bias: jax.Array | None = None
    norm: Norm | None = None


class Block(typing.NamedTuple):
    """One transformer block of rank R.

    Attributes:
      qkv: [3 R, R], rows q, k, v; with the attention's norm.
      out: [R, R].
      up: [M, R], or [2 M, R] with gate rows first for "silu_gated"; with bias and the MLP's norm.
      down: [R, M], with bias.
    """

    qkv: Projection
    out: Projection
    up: Projection
    down: Projection


class Rotation(typing.NamedTuple):
    """Rotary tables, float32 [positions, head size / 2] each; a node of depth d stands at d + 1."""

    cos: jax.Array
    sin: jax.Array


class Weights(typing.NamedTuple):
    """Weaver's parameters as a growth reads them, all in one dtype, float32 or bfloat16.

    Weaver's products with the verifier's matrices are folded into two tables.

    Attributes:
      table: [V, R], what a token feeds the first block: token_in(embed_norm(E)).
      head: [V, R], what a candidate's score is a product with: W_out @ lm_head_query_in.
      blocks: one or more.
      out_norm: over R.
      position: [positions, R] added to a node of depth d, or None.
      rotation: for rotary blocks, or None.
    """

    table: jax.Array
    head: jax.Array
    blocks: tuple[Block, ...]
    out_norm: Norm
    position: jax.Array | None = None
    rotation: Rotation | None = None


class Pools(typing.NamedTuple):
    """Candidates of D depths, row d for the children of nodes of depth d.

    Attributes:
      ids: int32 [D, P], below 0 where there is no candidate.
      prior: float32 [D, P], the drafter's raw logits; not finite where there is no candidate.
      noise: float32 [D, P], added after the temperature.
      temperature: float32 scalar; divides logits whose best one has been made zero.
    """

    ids: jax.Array
    prior: jax.Array
    noise: jax.Array
    temperature: jax.Array


class GrownTree(typing.NamedTuple):
    """Rows of a grown tree, the root first, parents before their children.

    Attributes:
      token: int32 [N]; 0 at padding.
      parent: int32 [N]; -1 at the root and at padding.
      depth: int32 [N].
      score: float32 [N], sum of log-probabilities along the path; -inf at padding.
      logprob: float32 [N], of the node's own step; 0 at the root, -inf at padding.
      rank: int32 [N], position in the pool row; -1 at the root and at padding.
      valid: bool [N].
    """

    token: jax.Array
    parent: jax.Array
    depth: jax.Array
    score: jax.Array
    logprob: jax.Array
    rank: jax.Array
    valid: jax.Array


class Growth(typing.NamedTuple):
    """A tree while it grows: its rows, what they see and remember, and the children on offer.

    Children of row p are `offered_*[p]`, best first. Row p's score -inf says it is no node.

    Attributes:
      token, parent, depth, rank: int32 [rows].
      score, logprob: float32 [rows].
      ancestors: int8 [rows, rows], 1 at ancestors and self.
      taken: int32 [rows], how many of a row's offers have become nodes, always its best.
      offered_score, offered_logprob: float32 [rows, C].
      offered_token, offered_rank: int32 [rows, C].
      key, value: [heads, prefix + rows, head size] for each block.
    """

    token: jax.Array
    parent: jax.Array
    depth: jax.Array
    rank: jax.Array
    score: jax.Array
    logprob: jax.Array
    ancestors: jax.Array
    taken: jax.Array
    offered_score: jax.Array
    offered_logprob: jax.Array
    offered_token: jax.Array
    offered_rank: jax.Array
    key: tuple[jax.Array, ...]
    value: tuple[jax.Array, ...]


class Nodes(typing.NamedTuple):
    """w nodes in consecutive rows that are about to be expanded.

    Attributes:
      x: [w, R], what they feed the first block.
      depth: int32 [w].
      score: float32 [w], -inf at padding.
    """

    x: jax.Array
    depth: jax.Array
    score: jax.Array


def plant(
    root: jax.Array,
    rows: int,
    children: int,
    key: tuple[jax.Array, ...],
    value: tuple[jax.Array, ...],
) -> Growth:
    """A growth of `rows` rows that holds the root alone and offers nothing."""
    first = jnp.arange(rows) == 0
    offers = (rows, children)
    return Growth(
        token=jnp.where(first, root, 0).astype(jnp.int32),
        parent=jnp.full((rows,), NO_PARENT, jnp.int32),
        depth=jnp.zeros((rows,), jnp.int32),
        rank=jnp.full((rows,), -1, jnp.int32),
        score=jnp.where(first, 0.0, -jnp.inf).astype(jnp.float32),
        logprob=jnp.where(first, 0.0, -jnp.inf).astype(jnp.float32),
        ancestors=(first[:, None] & first[None, :]).astype(jnp.int8),
        taken=jnp.zeros((rows,), jnp.int32),
        offered_score=jnp.full(offers, -jnp.inf, jnp.float32),
        offered_logprob=jnp.full(offers, -jnp.inf, jnp.float32),
        offered_token=jnp.zeros(offers, jnp.int32),
        offered_rank=jnp.zeros(offers, jnp.int32),
        key=key,
        value=value,
    )
