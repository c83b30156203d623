"""DFlash block drafter (arXiv 2602.06036): one pass gives a marginal for each future position.

A block is the last committed token (the anchor) followed by mask tokens. Its rows read the
verifier's features of the text before the anchor through a key-value cache, and one another.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.attention_inputs import AttentionInputs, HeadColumns, attention_inputs
from pallas_kernels.choice import Implementation
from pallas_kernels.tree_attention import tree_attention
from tfm_jax.config import DrafterConfig
from tfm_jax.models.layers import (
    GatedMLP,
    Linear,
    Projections,
    RMSNorm,
    Stacked,
    attend,
    rotate,
    stack_projections,
    write_rows,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterCache:
    """Keys and values of the committed text, one leaf for each layer; row i is position i.

    Attributes:
      key: [KV heads, capacity, D] for each layer, normed and rotated.
      value: [KV heads, capacity, D] for each layer.
    """

    key: tuple[jax.Array, ...]
    value: tuple[jax.Array, ...]

    @property
    def capacity(self) -> int:
        return self.key[0].shape[1]


def visible_context(
    anchor: jax.Array | int, block_size: int, positions: jax.Array, window: int | None
) -> jax.Array:
    """Which context rows each row of a block sees: [block_size, S] bool.

    Context ends before the anchor, for every row; a window counts the querying row itself.

    Args:
      anchor: position of the block's first row.
      block_size: B rows at positions anchor .. anchor + B - 1.
      positions: [S] int32, positions of the context rows.
      window: of a sliding layer, None for a full one.
    """
    before = jnp.broadcast_to(positions < anchor, (block_size, positions.shape[0]))
    if window is None:
        return before
    queries = anchor + jnp.arange(block_size)
    return before & (queries[:, None] - positions[None, :] < window)


def visible_block(block_size: int, *, causal: bool, window: int | None) -> jax.Array:
    """Which rows of its own block each row sees: [block_size, block_size] bool."""
    rows = np.arange(block_size)  # a constant, and so is all that is made of it
    behind = rows[:, None] - rows[None, :]
    visible = behind >= 0 if causal else np.ones_like(behind, bool)
    return jnp.asarray(visible if window is None else visible & (np.abs(behind) < window))


class DrafterAttention(Projections):
    """Attention of block rows over context rows and over the block itself."""

    names = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        hidden, size = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = Linear(hidden, queries, rngs=rngs, dtype=dtype)
        self.k_proj = Linear(hidden, keys, rngs=rngs, dtype=dtype)
        self.v_proj = Linear(hidden, keys, rngs=rngs, dtype=dtype)
        self.o_proj = Linear(queries, hidden, rngs=rngs, dtype=dtype)
        self.q_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype)
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = size
        self.rope_theta = config.rope_theta

    def keys_values(
        self, key: jax.Array, value: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Keys (normed, rotated) and values, [KV heads, T, D], of projections [T, KV heads * D]."""
        key = self.k_norm(self._heads(key))
        key = rotate(key, positions, self.rope_theta, self.head_dim)
        return key.swapaxes(0, 1), self._heads(value).swapaxes(0, 1)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        context: tuple[jax.Array, jax.Array, jax.Array],
        own: jax.Array,
    ) -> jax.Array:
        """Over context keys and values and who sees them, bool [B, S]: the training form."""
        query, key, value = self._inputs(x, positions, "xla")  # training takes its gradient
        mixed = attend(query, [context, (key, value, own)])
        return self.o_proj(mixed.reshape(x.shape[0], -1))

    def read(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: tuple[jax.Array, jax.Array, jax.Array],
        window: int | None,
        own: jax.Array,
    ) -> jax.Array:
        """Over cached keys and values up to a length; the result [B, H] may come in parts."""
        mixed = tree_attention(*self._inputs(x, positions, "auto"), own, *cache, window=window)
        return self.o_proj.parts(mixed.reshape(x.shape[0], -1))

    def _inputs(
        self, x: jax.Array, positions: jax.Array, implementation: Implementation
    ) -> AttentionInputs:
        (query, key, value), starts = self.project_in_place(x)
        return attention_inputs(
            query,
            key,
            value,
            positions,
            self.q_norm.weight[...],
            self.k_norm.weight[...],
            self.q_norm.eps,
            heads=self.heads,
            key_heads=self.key_heads,
            theta=self.rope_theta,
            rotary=self.head_dim,
            columns=HeadColumns(**dict(zip("qkv", starts, strict=True)), step=self.head_dim),
            implementation=implementation,
        )

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, self.head_dim)


class DrafterLayer(nnx.Module):
    """Pre-norm attention and gated MLP on block rows; context enters as keys and values only."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype)
        self.self_attn = DrafterAttention(config, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype)
        self.mlp = GatedMLP(hidden, config.intermediate_size, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        context: tuple[jax.Array, jax.Array, jax.Array],
        own: jax.Array,
    ) -> jax.Array:
        """The residual stream after this layer: the training form.

        Args:
          x: [B, H] block rows.
          positions: [B] int32.
          context: keys [KV heads, S, D], values [KV heads, S, D], visible [B, S] bool.
          own: [B, B] bool, which block rows see which.
        """
        x = x + self.self_attn(self.input_layernorm(x), positions, context, own)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nnx.Module):
    """DFlash drafter, without embedding and output matrix: those are the verifier's."""

    context_maps: Stacked | None = None

    def __init__(
        self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        features = len(config.target_layer_ids) * hidden
        self.config = config
        self.fc = Linear(features, hidden, rngs=rngs, dtype=dtype)
        self.hidden_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.layers = nnx.List(
            DrafterLayer(config, rngs=rngs, dtype=dtype) for _ in config.layer_types
        )
        self.norm = RMSNorm(hidden, eps, dtype=dtype)

    def stack(self) -> None:
        """Joins the maps of one input in place, for decoding; names no longer are published ones.

        What all layers read of the context is one product too. Its weights are copies: the same
        ones lie beside the queries' for the block.
        """
        self.context_maps = Stacked(self._context_parts())
        stack_projections(self)

    def empty_cache(self, capacity: int, dtype: jnp.dtype) -> DrafterCache:
        """A cache of zeros for `capacity` positions."""
        if capacity < 1:
            raise ValueError(f"capacity must be positive, got {capacity}")
        config = self.config
        shape = (config.num_key_value_heads, capacity, config.head_dim)
        layers = range(config.num_hidden_layers)
        return DrafterCache(
            key=tuple(jnp.zeros(shape, dtype) for _ in layers),
            value=tuple(jnp.zeros(shape, dtype) for _ in layers),
        )

    def context(self, features: jax.Array) -> jax.Array:
        """Context rows that every layer reads, [T, H], from features [T, F * H].

        Features are the verifier's residual streams after layers `target_layer_ids`, in that
        order. Raises ValueError on another width.
        """
        expected = self.fc.weight[...].shape[1]
        if features.ndim != 2 or features.shape[1] != expected:
            raise ValueError(f"features must be [T, {expected}], got {features.shape}")
        return self.hidden_norm(self.fc(features))

    def extend(
        self, cache: DrafterCache, features: jax.Array, start: jax.Array | int
    ) -> DrafterCache:
        """The cache with rows start .. start + T - 1 made from `features`.

        A row depends on its own feature and position alone. So rows of tokens that were not
        accepted, or of padding, may be written too: advance the length by fewer, and the next
        call overwrites them.

        Args:
          cache: rows below `start` are kept.
          features: [T, F * H].
          start: position of the first row; start + T must not exceed the capacity.
        """
        rows = features.shape[0]
        if rows > cache.capacity:
            raise ValueError(f"{rows} feature rows do not fit a cache of {cache.capacity}")
        context = self.context(features)
        made = self._keys_values(context, start + jnp.arange(rows))
        keys, values = [], []
        for key, value, (k, v) in zip(cache.key, cache.value, made, strict=True):
            keys.append(write_rows(key, k, start))
            values.append(write_rows(value, v, start))
        return DrafterCache(key=tuple(keys), value=tuple(values))

    def __call__(
        self, block_embeddings: jax.Array, cache: DrafterCache, length: jax.Array | int
    ) -> jax.Array:
        """Hidden states of one block, [B, H], after the final norm; the cache stays as it is.

        Row j >= 1 times the verifier's output matrix predicts the token at its own position,
        length + j. Row 0 is the anchor.

        Args:
          block_embeddings: [B, H], the verifier's embeddings of [anchor, mask, ..., mask].
          cache: rows below `length` are read; the others may hold anything.
          length: committed rows, which is the anchor's position.
        """
        self._check_embeddings(block_embeddings, 2)
        rows = block_embeddings.shape[0]
        length = jnp.asarray(length, jnp.int32)
        positions = length + jnp.arange(rows)
        x, following = block_embeddings, [layer.input_layernorm for layer in self.layers]
        h = following[0](x)
        for index, (layer, norm) in enumerate(
            zip(self.layers, (*following[1:], self.norm), strict=True)
        ):
            cached = (cache.key[index], cache.value[index], length)
            window, own = self.config.window(index), self._own(index, rows)
            mixed = layer.self_attn.read(h, positions, cached, window, own)
            x, h = layer.post_attention_layernorm.after(x, mixed)
            x, h = norm.after(x, layer.mlp.parts(h))
        return h

    def blocks(
        self,
        features: jax.Array,
        block_embeddings: jax.Array,
        anchors: jax.Array,
        keep: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden states of many independent blocks of one text, [N, B, H]: the training form.

        Block n equals what `__call__` gives with the context rows before anchors[n]. Context
        scores are one [N * B, S] product, own-block scores are [N, B, B].

        Args:
          features: [S, F * H], row i is position i.
          block_embeddings: [N, B, H].
          anchors: [N] int32, positions of the blocks' first rows.
          keep: [N] bool; a block that is not kept sees nothing. All are kept if not given.
        """
        self._check_embeddings(block_embeddings, 3)
        rows = block_embeddings.shape[1]
        context = self.context(features)
        made = self._keys_values(context, jnp.arange(features.shape[0]))
        positions = anchors[:, None] + jnp.arange(rows)
        if keep is None:
            keep = jnp.ones(anchors.shape, bool)
        x = block_embeddings
        for index, layer in enumerate(self.layers):
            seen, own = self.block_masks(index, features.shape[0], rows, anchors, keep)
            over_blocks = jax.vmap(layer.__call__, in_axes=(0, 0, (None, None, 0), 0))
            x = over_blocks(x, positions, (*made[index], seen), own)
        return self.norm(x)

    def block_masks(
        self, layer: int, context: int, block_size: int, anchors: jax.Array, keep: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What training blocks see in one layer: context [N, B, S] and themselves [N, B, B]."""
        window = self.config.window(layer)
        at = jnp.arange(context)
        seen = jax.vmap(lambda anchor: visible_context(anchor, block_size, at, window))(anchors)
        return seen & keep[:, None, None], self._own(layer, block_size) & keep[:, None, None]

    def _context_parts(self) -> list[Linear]:
        return [
            part
            for layer in self.layers
            for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        ]

    def _keys_values(
        self, context: jax.Array, positions: jax.Array
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Every layer's keys and values, [KV heads, T, D] each, of context rows [T, H]."""
        if self.context_maps is not None:
            made = self.context_maps(context)
        else:
            made = [part(context) for part in self._context_parts()]
        return [
            layer.self_attn.keys_values(key, value, positions)
            for layer, key, value in zip(self.layers, made[0::2], made[1::2], strict=True)
        ]

    def _own(self, layer: int, rows: int) -> jax.Array:
        config = self.config
        return visible_block(
            rows, causal=config.is_layer_causal(layer), window=config.window(layer)
        )

    def _check_embeddings(self, embeddings: jax.Array, rank: int) -> None:
        hidden = self.config.hidden_size
        if embeddings.ndim != rank or embeddings.shape[-1] != hidden:
            shape = "[B, H]" if rank == 2 else "[N, B, H]"
            raise ValueError(
                f"block embeddings must be {shape} with H = {hidden}, got {embeddings.shape}"
            )
