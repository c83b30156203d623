"""Qwen3.5/3.6 text model: gated DeltaNet and gated attention layers in a 3:1 pattern.

Parameters carry the names and the [out, in] layout of the published checkpoints. Three ways
through the same weights: `prefill` (rows in sequence), `verify` (rows of a draft tree) and
`forward` (a whole text without caches, for training and scoring).
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import gdn_tree
from pallas_kernels.attention_inputs import HeadColumns, attention_inputs
from pallas_kernels.gdn_inputs import Columns, gates, gdn_inputs, gdn_output
from pallas_kernels.tree_attention import Gate, tree_attention
from tfm_jax.config import LINEAR, VerifierConfig
from tfm_jax.models.gated_delta import chunked_delta_rule, unit_length
from tfm_jax.models.layers import (
    GatedMLP,
    Linear,
    Projections,
    RMSNorm,
    attend,
    project,
    write_rows,
)
from tfm_jax.tree import Topology


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCache:
    """What a DeltaNet layer keeps of the committed text.

    Attributes:
      state: [HV, DK, DV] float32.
      history: [W - 1, C] the newest convolution inputs, oldest first, zeros before the text.
    """

    state: jax.Array
    history: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys (normed, rotated) and values [KV heads, capacity, D]; rows past the length are free."""

    key: jax.Array
    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearPending:
    """What a DeltaNet layer needs to advance along any path of the verified tree.

    Attributes:
      k: [N, HK, DK], of any length.
      k_scale: [N, HK] float32, makes the length one.
      u: [N, HV, DV] float32, corrected values.
      log_decay: [N, HV] float32, summed from the root.
      inputs: [N, C] convolution inputs; more columns may follow.
    """

    k: jax.Array
    k_scale: jax.Array
    u: jax.Array
    log_decay: jax.Array
    inputs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPending:
    """Keys and values [KV heads, N, D] of the verified rows."""

    key: jax.Array
    value: jax.Array


Cache = LinearCache | KVCache
Pending = LinearPending | KVPending


class Embedding(nnx.Module):
    """A table [V, H] of input embeddings."""

    def __init__(self, vocab: int, hidden: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        noise = jax.random.normal(rngs.params(), (vocab, hidden), jnp.float32)
        self.weight = nnx.Param((noise * 0.02).astype(dtype))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.weight[...][ids]


class DepthwiseConv(nnx.Module):
    """Taps [C, W] of a causal depthwise convolution; the last one multiplies the row itself."""

    def __init__(self, channels: int, width: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        noise = jax.random.normal(rngs.params(), (channels, width), jnp.float32)
        self.weight = nnx.Param((noise * width**-0.5).astype(dtype))

    def __call__(self, taps: list[jax.Array]) -> jax.Array:
        """Weighs W inputs [T, C] of every row, oldest first."""
        weight = self.weight[...].astype(taps[0].dtype)
        y = taps[0] * weight[:, 0]
        for i, tap in enumerate(taps[1:], start=1):
            y = y + tap * weight[:, i]
        return y


class GatedDeltaNet(Projections):
    """Linear attention by the gated delta rule (the `linear_attention` mixer of Qwen3.5/3.6)."""

    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def __init__(self, config: VerifierConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        hidden, values = config.hidden_size, config.linear_num_value_heads

        def linear(i: int, o: int) -> Linear:
            return Linear(i, o, rngs=rngs, dtype=dtype)

        self.in_proj_qkv = linear(hidden, config.conv_dim)
        self.in_proj_z = linear(hidden, config.linear_value_dim)
        self.in_proj_b = linear(hidden, values)
        self.in_proj_a = linear(hidden, values)
        self.conv1d = DepthwiseConv(
            config.conv_dim, config.linear_conv_kernel_dim, rngs=rngs, dtype=dtype
        )
        # Decays between 1/16 and 1/1 a step and steps of 0.001 to 0.1: Mamba-2's ranges.
        self.A_log = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), (values,), minval=1.0, maxval=16.0))
        )
        steps = jnp.exp(
            jax.random.uniform(rngs.params(), (values,), minval=jnp.log(1e-3), maxval=jnp.log(1e-1))
        )
        self.dt_bias = nnx.Param(steps + jnp.log(-jnp.expm1(-steps)))
        self.norm = RMSNorm(config.linear_value_head_dim, config.rms_norm_eps, dtype=jnp.float32)
        self.out_proj = linear(config.linear_value_dim, hidden)
        self.config = config

    def empty_cache(self, dtype: jnp.dtype) -> LinearCache:
        c = self.config
        return LinearCache(
            state=jnp.zeros(
                (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim),
                jnp.float32,
            ),
            history=jnp.zeros((c.linear_conv_kernel_dim - 1, c.conv_dim), dtype),
        )

    def prefill(
        self, h: jax.Array, cache: LinearCache, count: jax.Array | int
    ) -> tuple[jax.Array, LinearCache]:
        """Runs rows [T, H] in sequence; rows from `count` on leave the cache as it is."""
        rows, width = h.shape[0], self.config.linear_conv_kernel_dim
        inputs, z, b, a = self.project_all(h)
        line = jnp.concatenate([cache.history.astype(inputs.dtype), inputs])
        q, k, v = self._heads([line[i : i + rows] for i in range(width)])
        g, beta = gates(a, b, self.A_log[...], self.dt_bias[...])
        real = (jnp.arange(rows) < count)[:, None]
        out, state = chunked_delta_rule(
            q,
            jnp.where(real[..., None], k, 0.0),
            jnp.where(real[..., None], v.astype(jnp.float32), 0.0),
            jnp.where(real, g, 0.0),
            jnp.where(real, beta, 0.0),
            cache.state,
        )
        history = jax.lax.dynamic_slice_in_dim(line, count, width - 1)
        cache = LinearCache(state=state, history=history.astype(cache.history.dtype))
        return self.out_proj(self._output(z, out)), cache

    def verify(
        self, h: jax.Array, cache: LinearCache, topology: Topology
    ) -> tuple[jax.Array, LinearPending]:
        """Runs tree rows [N, H], each after its own path; nothing is committed.

        The output [N, H] may come in parts, as `RMSNorm.after` takes it.
        """
        c = self.config
        (inputs, z, b, a), starts = self.project_in_place(h)
        columns = Columns(**dict(zip("xzba", starts, strict=True)))
        rows = gdn_inputs(
            inputs,
            cache.history,
            topology.taps,
            self.conv1d.weight[...],
            a,
            b,
            self.A_log[...],
            self.dt_bias[...],
            key_heads=c.linear_num_key_heads,
            key_dim=c.linear_key_head_dim,
            columns=columns,
        )
        result = gdn_tree.gdn_tree_verify(
            rows.q,
            rows.k,
            rows.v,
            rows.g,
            rows.beta,
            cache.state,
            topology.parents,
            topology=topology.gdn,
            q_scale=rows.q_scale,
            k_scale=rows.k_scale,
        )
        pending = LinearPending(
            k=rows.k,
            k_scale=rows.k_scale,
            u=result.u,
            log_decay=result.log_decay,
            inputs=inputs,
        )
        return self.out_proj.parts(self._output(z, result.out, columns.z)), pending

    def _heads(self, taps: list[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        c = self.config
        mixed = jax.nn.silu(self.conv1d(taps))
        q, k, v = jnp.split(mixed, [c.linear_key_dim, 2 * c.linear_key_dim], axis=-1)
        rows = mixed.shape[0]
        q = unit_length(q.reshape(rows, c.linear_num_key_heads, c.linear_key_head_dim))
        k = unit_length(k.reshape(rows, c.linear_num_key_heads, c.linear_key_head_dim))
        v = v.reshape(rows, c.linear_num_value_heads, c.linear_value_head_dim)
        return q * c.linear_key_head_dim**-0.5, k, v

    def _output(self, z: jax.Array, out: jax.Array, column: int | None = None) -> jax.Array:
        weight, eps = self.norm.weight[...], self.config.rms_norm_eps
        return gdn_output(out, z, weight, eps, column=column)


class GatedAttention(Projections):
    """Softmax attention with normed, partly rotated heads and a sigmoid output gate."""

    names = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: VerifierConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        hidden, size = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size

        def linear(i: int, o: int) -> Linear:
            return Linear(i, o, rngs=rngs, dtype=dtype)

        self.q_proj = linear(hidden, 2 * queries)
        self.k_proj = linear(hidden, keys)
        self.v_proj = linear(hidden, keys)
        self.o_proj = linear(queries, hidden)
        self.q_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, zero_centred=True)
        self.k_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, zero_centred=True)
        self.config = config

    def empty_cache(self, capacity: int, dtype: jnp.dtype) -> KVCache:
        shape = (self.config.num_key_value_heads, capacity, self.config.head_dim)
        return KVCache(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))

    def attend(
        self,
        h: jax.Array,
        positions: jax.Array,
        visible: jax.Array,
        cache: KVCache | None,
        length: jax.Array | int,
    ) -> tuple[jax.Array, KVPending]:
        """Rows [T, H] over the first `length` cache rows and, where `visible` [T, T], each other.

        Returns what `o_proj` takes, [T, heads * D], and the rows' own keys and values.
        """
        c, step = self.config, 2 * self.config.head_dim  # a head's gate follows its query
        (both, k, v), starts = self.project_in_place(h)
        columns = HeadColumns(**dict(zip("qkv", starts, strict=True)), step=step)
        q, k, v = attention_inputs(
            both,
            k,
            v,
            positions,
            self.q_norm.weight[...],
            self.k_norm.weight[...],
            c.rms_norm_eps,
            heads=c.num_attention_heads,
            key_heads=c.num_key_value_heads,
            theta=c.rope_theta,
            rotary=c.rotary_dim,
            zero_centred=True,
            columns=columns,
            implementation="xla" if cache is None else "auto",  # training takes its gradient
        )
        gate = Gate(logits=both, first=columns.q + c.head_dim, step=step)
        if cache is None:
            mixed = attend(q, [(k, v, visible)])
            mixed = (mixed * gate.factors(*q.shape[1:])).astype(q.dtype)
        else:
            mixed = tree_attention(q, k, v, visible, cache.key, cache.value, length, gate=gate)
        return mixed.reshape(h.shape[0], -1), KVPending(key=k, value=v)


class DecoderLayer(nnx.Module):
    """Mixer and MLP, each behind its norm and added to the residual stream."""

    def __init__(
        self, config: VerifierConfig, kind: str, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, zero_centred=True)

        self.input_layernorm = norm()
        if kind == LINEAR:
            self.linear_attn = GatedDeltaNet(config, rngs=rngs, dtype=dtype)
        else:
            self.self_attn = GatedAttention(config, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, rngs=rngs, dtype=dtype)
        self.kind = kind

    def prefill(
        self, x: jax.Array, cache: Cache, start: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, Cache]:
        h = self.input_layernorm(x)
        if isinstance(cache, LinearCache):
            mixed, cache = self.linear_attn.prefill(h, cache, count)
        else:
            rows = jnp.arange(x.shape[0])
            causal = rows[:, None] >= rows
            mixed, own = self.self_attn.attend(h, start + rows, causal, cache, start)
            mixed = self.self_attn.o_proj(mixed)
            cache = KVCache(
                key=write_rows(cache.key, own.key, start),
                value=write_rows(cache.value, own.value, start),
            )
        return self._finish(x + mixed), cache

    def mix(
        self, h: jax.Array, cache: Cache, length: jax.Array, topology: Topology
    ) -> tuple[jax.Array, Pending]:
        """What the mixer makes of normed tree rows `h` [N, H], perhaps in parts."""
        if isinstance(cache, LinearCache):
            return self.linear_attn.verify(h, cache, topology)
        attention, positions = self.self_attn, length + topology.depths
        mixed, own = attention.attend(h, positions, topology.ancestors, cache, length)
        return attention.o_proj.parts(mixed), own

    def forward(self, x: jax.Array) -> jax.Array:
        h, rows = self.input_layernorm(x), jnp.arange(x.shape[0])
        if self.kind == LINEAR:
            cache = self.linear_attn.empty_cache(x.dtype)
            mixed, _ = self.linear_attn.prefill(h, cache, x.shape[0])
        else:
            mixed, _ = self.self_attn.attend(h, rows, rows[:, None] >= rows, None, 0)
            mixed = self.self_attn.o_proj(mixed)
        return self._finish(x + mixed)

    def _finish(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(self.post_attention_layernorm(x))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hidden:
    """Hidden states of T rows.

    Attributes:
      final: [T, H] after the final norm.
      features: [T, F * H] raw outputs of the tapped layers, in the order asked for.
    """

    final: jax.Array
    features: jax.Array


class Verifier(nnx.Module):
    """The target model: everything it emits defines what lossless means."""

    def __init__(
        self, config: VerifierConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32
    ) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, kind, rngs=rngs, dtype=dtype) for kind in config.layer_types]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, zero_centred=True)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)
        )
        self.config = config

    @property
    def dtype(self) -> jnp.dtype:
        return self.embed_tokens.weight[...].dtype

    @property
    def output_rows(self) -> jax.Array:
        """The output matrix [V, H]: the embedding itself where the two are tied."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return head.weight[...]

    def empty_caches(self, capacity: int) -> tuple[Cache, ...]:
        """One cache a layer, with room for `capacity` positions."""
        return tuple(
            layer.linear_attn.empty_cache(self.dtype)
            if layer.kind == LINEAR
            else layer.self_attn.empty_cache(capacity, self.dtype)
            for layer in self.layers
        )

    def prefill(
        self,
        tokens: jax.Array,
        caches: tuple[Cache, ...],
        start: jax.Array,
        count: jax.Array,
        taps: tuple[int, ...] = (),
    ) -> tuple[Hidden, tuple[Cache, ...]]:
        """Appends the first `count` of T tokens at position `start` to the caches."""
        x = self.embed_tokens(tokens)
        features: dict[int, jax.Array] = {}
        advanced = []
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x, cache = layer.prefill(x, cache, start, count)
            advanced.append(cache)
            if i in taps:
                features[i] = x
        return _hidden(self.norm(x), features, taps), tuple(advanced)

    def verify(
        self,
        tokens: jax.Array,
        caches: tuple[Cache, ...],
        length: jax.Array,
        topology: Topology,
        taps: tuple[int, ...] = (),
    ) -> tuple[Hidden, tuple[Pending, ...]]:
        """Runs the N tree tokens in one pass, each seeing the committed text and its path."""
        chex.assert_shape(topology.ancestors, (tokens.size, tokens.size))
        x = self.embed_tokens(tokens)
        h = self.layers[0].input_layernorm(x)
        following = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        features: dict[int, jax.Array] = {}
        pending = []
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x, h, update = _verify_layer(layer, following[i], x, h, cache, length, topology)
            pending.append(update)
            if i in taps:
                features[i] = x
        return _hidden(h, features, taps), tuple(pending)

    def forward(self, tokens: jax.Array, taps: tuple[int, ...] = ()) -> Hidden:
        """Runs a whole text [T] without caches."""
        x = self.embed_tokens(tokens)
        features: dict[int, jax.Array] = {}
        for i, layer in enumerate(self.layers):
            x = layer.forward(x)
            if i in taps:
                features[i] = x
        return _hidden(self.norm(x), features, taps)

    def logits(self, final: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of final-norm hidden states [..., H]."""
        return project(final, self.output_rows, out_dtype=jnp.float32)


# A function of its own to the tracer: layers of a kind are traced and lowered once.
@jax.jit
def _verify_layer(
    layer: DecoderLayer,
    following: RMSNorm,
    x: jax.Array,
    h: jax.Array,
    cache: Cache,
    length: jax.Array,
    topology: Topology,
) -> tuple[jax.Array, jax.Array, Pending]:
    """Residual stream and its next norm after a layer, from those before it, and the update."""
    mixed, update = layer.mix(h, cache, length, topology)
    x, h = layer.post_attention_layernorm.after(x, mixed)
    x, h = following.after(x, layer.mlp.parts(h))
    return x, h, update


def _hidden(final: jax.Array, features: dict[int, jax.Array], taps: tuple[int, ...]) -> Hidden:
    tapped = [features[i] for i in taps] or [final[:, :0]]
    return Hidden(final=final, features=jnp.concatenate(tapped, axis=-1))
