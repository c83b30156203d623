"""Weaver: a small causal adapter that turns the drafter's marginals into conditionals.

Section 2 of arXiv 2607.06763. A prefix of hidden states (the verifier's last one, then the
drafter's for each depth) and the nodes on a path give, at each node, a correction to the
drafter's logits over a pool of candidates. Both published variants: learned depth embedding
with a GELU MLP, and rotary positions with a SiLU-gated MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.weaver_step import (
    Activation,
    Block,
    Norm,
    Projection,
    Rotation,
    Weights,
)
from tfm_jax.config import WeaverConfig
from tfm_jax.models.layers import EXACT, Linear, attend, rms_norm, rotate, write_rows

EPS = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeaverMemory:
    """Keys and values of the prefix, then of the tree's nodes, one leaf for each block.

    Attributes:
      key: [heads, prefix + N, head size] for each block; node slot s is row prefix + s.
      value: [heads, prefix + N, head size] for each block. Slots not yet written are zero.
    """

    key: tuple[jax.Array, ...]
    value: tuple[jax.Array, ...]


def pool_logits(query: jax.Array, prior: jax.Array, head_rows: jax.Array) -> jax.Array:
    """Logits of each node's candidates, float32 [w, P]: `prior + head_rows . query`.

    The product takes operands in the dtype of `head_rows` and is accumulated and kept in
    float32. Padded candidates, those with a prior that is not finite, get -inf.

    Args:
      query: [w, D], from `Weaver.node_step` or `Weaver.chain`.
      prior: [w, P], the drafter's raw logits.
      head_rows: [w, P, D], rows of the verifier's output matrix.
    """
    residual = jnp.einsum(
        "wd,wpd->wp",
        query.astype(head_rows.dtype),
        head_rows,
        precision=EXACT if head_rows.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return jnp.where(jnp.isfinite(prior), prior.astype(jnp.float32) + residual, -jnp.inf)


class BiasedRMSNorm(nnx.Module):
    """`x / rms(x) * weight + bias`: no mean is subtracted, yet there is a bias."""

    def __init__(self, features: int, *, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.bias = nnx.Param(jnp.zeros((features,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = rms_norm(x.astype(jnp.float32), self.weight[...], EPS)
        return (y + self.bias[...].astype(jnp.float32)).astype(x.dtype)

    def growth_weights(self) -> Norm:
        return Norm(weight=self.weight[...], bias=self.bias[...])


class WeaverBlock(nnx.Module):
    """Pre-norm attention and MLP of one block."""

    def __init__(self, config: WeaverConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        rank, inner = config.d_rank, config.mlp_dim
        self.config = config
        self.norm_attn = BiasedRMSNorm(rank, dtype=dtype)
        self.norm_mlp = BiasedRMSNorm(rank, dtype=dtype)
        self.qkv_proj = Linear(rank, 3 * rank, rngs=rngs, dtype=dtype)
        self.o_proj = Linear(rank, rank, rngs=rngs, dtype=dtype)
        if config.variant == "learned_gelu":
            self.fc1 = Linear(rank, inner, rngs=rngs, dtype=dtype, bias=True)
            self.fc2 = Linear(inner, rank, rngs=rngs, dtype=dtype, bias=True)
        else:
            self.gate_up_proj = Linear(rank, 2 * inner, rngs=rngs, dtype=dtype, bias=True)
            self.down_proj = Linear(inner, rank, rngs=rngs, dtype=dtype, bias=True)

    def heads(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query [T, heads, size], key and value [heads, T, size] of rows `x` [T, R]."""
        config = self.config
        fused = self.qkv_proj(self.norm_attn(x))
        query, key, value = fused.reshape(x.shape[0], 3, config.num_heads, -1).swapaxes(0, 1)
        if config.variant == "rope_swiglu":
            query = rotate(query, positions, config.rope_base, config.head_dim)
            key = rotate(key, positions, config.rope_base, config.head_dim)
        return query, key.swapaxes(0, 1), value.swapaxes(0, 1)

    def __call__(
        self, x: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array
    ) -> jax.Array:
        """The residual stream [T, R] after this block; `visible` is [T, S] bool."""
        mixed = attend(query, [(key, value, visible)])
        x = x + self.o_proj(mixed.reshape(x.shape))
        return x + self._mlp(self.norm_mlp(x))

    def growth_weights(self) -> Block:
        """This block as `weaver_grow` reads it."""
        learned = self.config.variant == "learned_gelu"
        up, down = (self.fc1, self.fc2) if learned else (self.gate_up_proj, self.down_proj)
        return Block(
            qkv=_projection(self.qkv_proj, self.norm_attn),
            out=_projection(self.o_proj),
            up=_projection(up, self.norm_mlp),
            down=_projection(down),
        )

    def _mlp(self, x: jax.Array) -> jax.Array:
        if self.config.variant == "learned_gelu":
            inner = jax.nn.gelu(self.fc1(x), approximate=self.config.gelu == "tanh")
            return self.fc2(inner)
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)


class Weaver(nnx.Module):
    """Weaver adapter, without embedding and output matrix: those are the verifier's.

    It computes in the dtype of the hidden states and embeddings that it is given.
    `lm_head_query_in` starts at zero, so that an untrained Weaver gives the drafter's marginals.
    """

    def __init__(
        self, config: WeaverConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32
    ) -> None:
        rank = config.d_rank
        self.config = config
        self.embed_norm = BiasedRMSNorm(config.d_embed, dtype=dtype)
        self.output_norm = BiasedRMSNorm(config.d_model, dtype=dtype)
        self.out_norm = BiasedRMSNorm(rank, dtype=dtype)
        self.token_in = Linear(config.d_embed, rank, rngs=rngs, dtype=dtype, bias=True)
        self.proposal_in = Linear(config.d_model, rank, rngs=rngs, dtype=dtype, bias=True)
        self.lm_head_query_in = Linear(rank, config.d_model, rngs=rngs, dtype=dtype)
        self.lm_head_query_in.weight[...] = jnp.zeros((config.d_model, rank), dtype)
        if config.variant == "learned_gelu":
            noise = jax.random.normal(rngs.params(), (config.depth, rank), jnp.float32)
            self.pos_emb = nnx.Param((0.02 * noise).astype(dtype))
        self.blocks = nnx.List(
            WeaverBlock(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)
        )

    def prefix(
        self, verifier_hidden: jax.Array, drafter_hidden: jax.Array, nodes: int
    ) -> WeaverMemory:
        """Memory of one decoding step: the prefix's keys and values, and `nodes` empty slots.

        Args:
          verifier_hidden: [D], final-norm hidden state that predicted the root token.
          drafter_hidden: [K, D], final-norm hidden states of block rows 1..K.
          nodes: slots for the tree, the root included.
        """
        x = self.prefix_input(verifier_hidden, drafter_hidden)
        rows = x.shape[0]
        positions = jnp.arange(rows)
        causal = positions[:, None] >= positions[None, :]
        keys, values = [], []
        for index, block in enumerate(self.blocks):
            query, key, value = block.heads(x, positions)
            keys.append(jnp.pad(key, ((0, 0), (0, nodes), (0, 0))))
            values.append(jnp.pad(value, ((0, 0), (0, nodes), (0, 0))))
            if index + 1 < len(self.blocks):
                x = block(x, query, key, value, causal)
        return WeaverMemory(key=tuple(keys), value=tuple(values))

    def node_step(
        self,
        memory: WeaverMemory,
        token_embeddings: jax.Array,
        depths: jax.Array,
        start: jax.Array | int,
        ancestors: jax.Array,
    ) -> tuple[WeaverMemory, jax.Array]:
        """Adds w nodes in slots start .. start + w - 1; returns the memory and queries [w, D].

        Args:
          memory: holds the ancestors of all w nodes already, unless they are among the w.
          token_embeddings: [w, E], the verifier's embeddings of the nodes' tokens.
          depths: [w] int32, 0 for the root; clipped to K - 1, the deepest that scores children.
          start: first slot; start + w must not exceed the number of slots.
          ancestors: [w, N] bool, which slots each node sees: its ancestors and itself.
        """
        nodes, slots = ancestors.shape
        prefix = memory.key[0].shape[1] - slots
        if prefix < 1 or nodes != depths.shape[0]:
            raise ValueError(
                f"ancestors must be [{depths.shape[0]}, slots] with slots below the memory's "
                f"{memory.key[0].shape[1]} rows, got {ancestors.shape}"
            )
        depths = jnp.clip(depths, 0, self.config.depth - 1)
        x = self.node_input(token_embeddings, depths)
        visible = jnp.pad(ancestors, ((0, 0), (prefix, 0)), constant_values=True)
        keys, values = [], []
        for block, old_key, old_value in zip(self.blocks, memory.key, memory.value, strict=True):
            query, key, value = block.heads(x, depths + 1)
            keys.append(write_rows(old_key, key, prefix + start))
            values.append(write_rows(old_value, value, prefix + start))
            x = block(x, query, keys[-1], values[-1], visible)
        return WeaverMemory(key=tuple(keys), value=tuple(values)), self._query(x)

    def growth_weights(self, embeddings: jax.Array, output_rows: jax.Array) -> Weights:
        """Parameters for `weaver_grow`, the two large products folded into tables [V, R].

        A node's input becomes a row of one table, a candidate's score a product with a row of the
        other. Exact up to rounding to the dtype of the parameters.

        Args:
          embeddings: [V, E], the verifier's embedding.
          output_rows: [V, D], the verifier's output matrix.
        """
        return Weights(
            table=_by_rows(lambda rows: self.token_in(self.embed_norm(rows)), embeddings),
            head=_by_rows(
                lambda rows: _product(rows, self.lm_head_query_in.weight[...]), output_rows
            ),
            blocks=tuple(block.growth_weights() for block in self.blocks),
            out_norm=self.out_norm.growth_weights(),
            position=self.pos_emb[...] if self.config.variant == "learned_gelu" else None,
            rotation=self._rotation() if self.config.variant == "rope_swiglu" else None,
        )

    @property
    def activation(self) -> Activation:
        """The blocks' activation by the name that `weaver_grow` knows."""
        if self.config.variant == "rope_swiglu":
            return "silu_gated"
        return "gelu_tanh" if self.config.gelu == "tanh" else "gelu_erf"

    def _rotation(self) -> Rotation:
        size = self.config.head_dim
        frequencies = self.config.rope_base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
        angles = jnp.arange(self.config.depth + 1, dtype=jnp.float32)[:, None] * frequencies
        return Rotation(cos=jnp.cos(angles), sin=jnp.sin(angles))

    def chain(
        self, verifier_hidden: jax.Array, drafter_hidden: jax.Array, token_embeddings: jax.Array
    ) -> jax.Array:
        """Queries [K, D] along one path in a single pass: the training form.

        Row d is fed the path's token at depth d (row 0 the root's) and scores depth d + 1. It
        equals `node_step` on that path.

        Args:
          verifier_hidden: [D], as for `prefix`.
          drafter_hidden: [K, D], as for `prefix`.
          token_embeddings: [K, E].
        """
        depths = jnp.arange(token_embeddings.shape[0])
        prefix = self.prefix_input(verifier_hidden, drafter_hidden)
        nodes = self.node_input(token_embeddings, depths)
        x = jnp.concatenate([prefix, nodes])
        rows = jnp.arange(x.shape[0])
        positions = jnp.concatenate([rows[: prefix.shape[0]], depths + 1])
        causal = rows[:, None] >= rows[None, :]
        for index, block in enumerate(self.blocks):
            query, key, value = block.heads(x, positions)
            first = prefix.shape[0] if index + 1 == len(self.blocks) else 0
            x = block(x[first:], query[first:], key, value, causal[first:])
        return self._query(x)

    def prefix_input(self, verifier_hidden: jax.Array, drafter_hidden: jax.Array) -> jax.Array:
        """Block input of the prefix, [K + 1, R]: the verifier's row, then the drafter's."""
        width, depth = self.config.d_model, self.config.depth
        if verifier_hidden.shape != (width,):
            raise ValueError(f"verifier_hidden must be [{width}], got {verifier_hidden.shape}")
        rows = drafter_hidden.shape[0]
        if drafter_hidden.shape != (rows, width) or rows > depth:
            raise ValueError(
                f"drafter_hidden must be [K, {width}] with K at most {depth}, "
                f"got {drafter_hidden.shape}"
            )
        hidden = jnp.concatenate([verifier_hidden[None], drafter_hidden])
        x = self.proposal_in(self.output_norm(hidden))
        if self.config.variant == "learned_gelu":
            x = x + jnp.pad(self.pos_emb[...][:rows], ((1, 0), (0, 0))).astype(x.dtype)
        return x

    def node_input(self, token_embeddings: jax.Array, depths: jax.Array) -> jax.Array:
        """Block input of nodes, [w, R]."""
        width = self.config.d_embed
        if token_embeddings.shape != (depths.shape[0], width):
            raise ValueError(
                f"token embeddings must be [{depths.shape[0]}, {width}], "
                f"got {token_embeddings.shape}"
            )
        x = self.token_in(self.embed_norm(token_embeddings))
        if self.config.variant == "learned_gelu":
            x = x + self.pos_emb[...][depths].astype(x.dtype)
        return x

    def _query(self, x: jax.Array) -> jax.Array:
        return self.lm_head_query_in(self.out_norm(x))


_FOLDED = 16384  # rows folded at a time: no float32 copy of a whole table


def _by_rows(function: Callable[[jax.Array], jax.Array], table: jax.Array) -> jax.Array:
    """`function` of a table [V, ...], some rows at a time."""
    return jax.lax.map(jax.jit(function), table, batch_size=min(_FOLDED, table.shape[0]))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=EXACT if a.dtype == jnp.float32 else None)


def _projection(linear: Linear, norm: BiasedRMSNorm | None = None) -> Projection:
    return Projection(
        weight=linear.weight[...],
        bias=None if linear.bias is None else linear.bias[...],
        norm=None if norm is None else norm.growth_weights(),
    )
