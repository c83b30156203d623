"""A small trio inside the sizes of a larger one: real acceptance at real cost.

Every tensor gets its full size, no weight is zero, and logits, drafts and scores stay those of the
small trio up to rounding (see `experiments.widening`). Layers without a counterpart hold random
weights; their heads and inner channels come in pairs whose outputs cancel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.widening import (
    Axis,
    Rule,
    columns,
    evenly,
    exactly,
    grouped,
    joined,
    norm,
    product,
    rows,
    same,
    spread,
    table,
    widen_all,
)
from tfm_jax.checkpoints import StoredTrio, build_drafter, build_verifier, build_weaver
from tfm_jax.config import LINEAR, ConfigError, DrafterConfig, VerifierConfig, WeaverConfig
from tfm_jax.decoding.state import Trio
from tfm_jax.model import Model, serving
from tfm_jax.models.dflash import DrafterLayer
from tfm_jax.models.qwen36 import DecoderLayer
from tfm_jax.presets import Geometry
from tfm_jax.text import load_tokenizer

Params = dict[str, Any]
Make = Callable[[], Params]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideStack:
    """A wide network of layers; parameters are made when asked for.

    Attributes:
      held: for every wide layer, the small layer in it; None where it adds nothing.
      layers: parameters of each wide layer, by their names inside it.
      ends: all other parameters.
    """

    held: tuple[int | None, ...]
    layers: tuple[Make, ...]
    ends: Make

    def params(self) -> Params:
        """All parameters by dotted path."""
        inside = {
            f"layers.{i}.{name}": x
            for i, make in enumerate(self.layers)
            for name, x in make().items()
        }
        return inside | self.ends()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideTrio:
    """Recipes of the three wide networks, and their sizes.

    Attributes:
      sizes: those of the preset, with special tokens and length limit of the small trio.
      hidden: the axis of all residual streams but Weaver's.
      verifier, drafter, weaver: make their parameters on the default device.
    """

    sizes: Geometry
    hidden: Axis
    verifier: WideStack
    drafter: WideStack
    weaver: Make


def embed(small: StoredTrio, sizes: Geometry, *, seed: int = 0) -> Model:
    """The function of `small` in the sizes of a preset; arguments and errors as for `widened`."""
    wide = widened(small, sizes, seed=seed)
    assert small.tokenizer is not None
    # No name holds the parameters: `serving` joins them and lets go of what it joined.
    trio = Trio(
        verifier=build_verifier(wide.sizes.verifier, wide.verifier.params()),
        drafter=build_drafter(wide.sizes.drafter, wide.drafter.params()),
        weaver=build_weaver(wide.sizes.weaver, wide.weaver()),
    )
    return Model(
        trio=serving(trio),
        tokenizer=load_tokenizer(small.tokenizer),
        end_tokens=small.eos_token_ids,
    )


def widened(small: StoredTrio, sizes: Geometry, *, seed: int = 0) -> WideTrio:
    """How `small` becomes a trio of other sizes; nothing is made yet.

    Texts must be shorter than the sliding windows of both drafters.

    Args:
      small: with drafter, Weaver and tokenizer; its types of weights are kept.
      sizes: of the wide trio.
      seed: of the weights that do not matter.

    Raises:
      ConfigError: a size that must be equal is not, or one axis does not fit into the other.
    """
    if small.drafter is None or small.weaver is None or small.tokenizer is None:
        raise ConfigError("an embedding needs a verifier with drafter, Weaver and tokenizer")
    verifier, drafter, weaver = small.verifier.config, small.drafter.config, small.weaver.config
    wide = _wide_sizes(verifier, drafter, weaver, sizes)
    hidden = evenly(verifier.hidden_size, wide.verifier.hidden_size)
    embeddings = small.verifier.params["embed_tokens.weight"]
    dtype = jnp.dtype(embeddings.dtype)
    # Hardware generator: 27 billion numbers in little time, and programs that compile fast.
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    return WideTrio(
        sizes=wide,
        hidden=hidden,
        verifier=_stack(
            params={"lm_head.weight": embeddings} | small.verifier.params,
            held=place(
                verifier.layer_types,
                wide.verifier.layer_types,
                drafter.target_layer_ids,
                wide.drafter.target_layer_ids,
            ),
            kinds=wide.verifier.layer_types,
            ends=_verifier_ends(verifier, wide.verifier, hidden),
            real=lambda kind: _compiled(_verifier_layer(verifier, wide.verifier, kind, hidden)),
            extra=lambda kind: _extra_verifier_layer(wide.verifier, kind, dtype),
            key=keys[0],
        ),
        drafter=_stack(
            params=small.drafter.params,
            held=place(drafter.layer_types, wide.drafter.layer_types),
            kinds=wide.drafter.layer_types,
            ends=_drafter_ends(drafter, hidden),
            real=lambda kind: _compiled(_drafter_layer(drafter, wide.drafter, hidden)),
            extra=lambda kind: _extra_drafter_layer(wide.drafter, dtype),
            key=keys[1],
        ),
        weaver=functools.partial(
            _compiled(_weaver_rules(weaver, wide.weaver, hidden)), small.weaver.params, keys[2]
        ),
    )


def place(
    kinds: Sequence[str],
    wide_kinds: Sequence[str],
    taps: Sequence[int] = (),
    wide_taps: Sequence[int] = (),
) -> tuple[int | None, ...]:
    """For every wide layer, the small layer that it holds; None where it adds nothing.

    Layers keep their kind and order, and the residual stream after wide layer `wide_taps[i]` is
    that after small layer `taps[i]`.

    Raises:
      ConfigError: there is no such place for a layer.
    """
    held: list[int | None] = [None] * len(wide_kinds)
    free = 0
    pairs = list(zip(taps, wide_taps, strict=True))
    for layer, kind in enumerate(kinds):
        first = max([free, *(wide + 1 for tap, wide in pairs if tap < layer)])
        last = min([len(wide_kinds) - 1, *(wide for tap, wide in pairs if tap >= layer)])
        found = next((i for i in range(first, last + 1) if wide_kinds[i] == kind), None)
        if found is None:
            raise ConfigError(
                f"layer {layer} needs a {kind} layer among {first}..{last} of the wide network, "
                f"so that its layers {list(wide_taps)} give what {list(taps)} gave"
            )
        held[found] = layer
        free = found + 1
    return tuple(held)


def _stack(
    *,
    params: Mapping[str, Any],
    held: tuple[int | None, ...],
    kinds: Sequence[str],
    ends: Mapping[str, Rule],
    real: Callable[[str], Callable[[Params, jax.Array], Params]],
    extra: Callable[[str], Callable[[jax.Array], Params]],
    key: jax.Array,
) -> WideStack:
    # One program for all layers of a kind.
    real, extra = functools.cache(real), functools.cache(extra)

    def layer(index: int, kind: str, source: int | None) -> Make:
        own = jax.random.fold_in(key, index)
        if source is None:
            return functools.partial(extra(kind), own)
        start = f"layers.{source}."
        small = {name[len(start) :]: x for name, x in params.items() if name.startswith(start)}
        return functools.partial(real(kind), small, own)

    outside = {name: x for name, x in params.items() if not name.startswith("layers.")}
    return WideStack(
        held=held,
        layers=tuple(
            layer(i, kind, source) for i, (kind, source) in enumerate(zip(kinds, held, strict=True))
        ),
        ends=functools.partial(_compiled(ends), outside, jax.random.fold_in(key, len(kinds))),
    )


def _compiled(rules: Mapping[str, Rule]) -> Callable[[Params, jax.Array], Params]:
    return jax.jit(lambda params, key: widen_all(params, rules, key))


def _compiled_extra(
    layer: Callable[[nnx.Rngs], nnx.Module], rules: Mapping[str, Rule]
) -> Callable[[jax.Array], Params]:
    """Makes a random layer and widens it."""

    def make(key: jax.Array) -> Params:
        first, second, third = jax.random.split(key, 3)
        flat = nnx.to_flat_state(nnx.state(layer(nnx.Rngs(params=first))))
        params = {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}
        noise = iter(jax.random.split(third, len(params)))
        for name, x in params.items():
            if x.ndim == 1:  # norms start as constants
                params[name] = x + 0.1 * jax.random.normal(next(noise), x.shape, x.dtype)
        return widen_all(params, rules, second)

    return jax.jit(make)


def _verifier_ends(small: VerifierConfig, wide: VerifierConfig, hidden: Axis) -> dict[str, Rule]:
    vocabulary = exactly(small.vocab_size, wide.vocab_size)
    return {
        "embed_tokens.weight": table(vocabulary, hidden),
        "norm.weight": norm(hidden, zero_centred=True),
        "lm_head.weight": product(vocabulary, hidden),
    }


def _verifier_layer(
    small: VerifierConfig,
    wide: VerifierConfig,
    kind: str,
    hidden: Axis,
    *,
    cancelled: bool = False,
) -> dict[str, Rule]:
    """Rules of a layer; a cancelled one adds nothing to the residual stream."""
    mixer = _delta_rules if kind == LINEAR else _attention_rules
    return {
        "input_layernorm.weight": norm(hidden, zero_centred=True),
        "post_attention_layernorm.weight": norm(hidden, zero_centred=True),
        **mixer(small, wide, hidden, cancelled),
        **_mlp_rules(small.intermediate_size, wide.intermediate_size, hidden, cancelled),
    }


def _mlp_rules(small: int, wide: int, hidden: Axis, cancelled: bool) -> dict[str, Rule]:
    inner = spread(small, wide)
    return {
        "mlp.gate_proj.weight": product(inner, hidden),
        "mlp.up_proj.weight": product(inner, hidden),
        "mlp.down_proj.weight": product(hidden, inner, cancelled=cancelled),
    }


def _delta_rules(
    small: VerifierConfig, wide: VerifierConfig, hidden: Axis, cancelled: bool
) -> dict[str, Rule]:
    key_heads = spread(small.linear_num_key_heads, wide.linear_num_key_heads)
    value_heads = grouped(
        key_heads,
        small.linear_num_value_heads // small.linear_num_key_heads,
        wide.linear_num_value_heads // wide.linear_num_key_heads,
    )
    keys = key_heads.blocks(small.linear_key_head_dim)
    values = value_heads.blocks(small.linear_value_head_dim)
    mixed = joined([keys, keys, values])  # queries, keys, values
    return {
        "linear_attn.in_proj_qkv.weight": product(mixed, hidden),
        "linear_attn.in_proj_z.weight": product(values, hidden),
        "linear_attn.in_proj_b.weight": product(value_heads, hidden),
        "linear_attn.in_proj_a.weight": product(value_heads, hidden),
        "linear_attn.conv1d.weight": rows(mixed),
        "linear_attn.A_log": rows(value_heads),
        "linear_attn.dt_bias": rows(value_heads),
        "linear_attn.norm.weight": same,
        "linear_attn.out_proj.weight": product(hidden, values, cancelled=cancelled),
    }


def _attention_rules(
    small: VerifierConfig | DrafterConfig,
    wide: VerifierConfig | DrafterConfig,
    hidden: Axis,
    cancelled: bool,
    *,
    gated: bool = True,
) -> dict[str, Rule]:
    key_heads = spread(small.num_key_value_heads, wide.num_key_value_heads)
    heads = grouped(
        key_heads,
        small.num_attention_heads // small.num_key_value_heads,
        wide.num_attention_heads // wide.num_key_value_heads,
    )
    size = small.head_dim
    keys = key_heads.blocks(size)
    queries = heads.blocks(2 * size if gated else size)  # each head's query, then its gate
    return {
        "self_attn.q_proj.weight": product(queries, hidden),
        "self_attn.k_proj.weight": product(keys, hidden),
        "self_attn.v_proj.weight": product(keys, hidden),
        "self_attn.o_proj.weight": product(hidden, heads.blocks(size), cancelled=cancelled),
        "self_attn.q_norm.weight": same,
        "self_attn.k_norm.weight": same,
    }


def _extra_verifier_layer(
    wide: VerifierConfig, kind: str, dtype: jnp.dtype
) -> Callable[[jax.Array], Params]:
    heads, groups = _halves(wide.num_attention_heads, wide.num_key_value_heads)
    values, keys = _halves(wide.linear_num_value_heads, wide.linear_num_key_heads)
    half = dataclasses.replace(
        wide,
        intermediate_size=wide.intermediate_size // 2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        linear_num_value_heads=values,
        linear_num_key_heads=keys,
    )
    hidden = exactly(wide.hidden_size, wide.hidden_size)
    return _compiled_extra(
        lambda rngs: DecoderLayer(half, kind, rngs=rngs, dtype=dtype),
        _verifier_layer(half, wide, kind, hidden, cancelled=True),
    )


def _drafter_ends(small: DrafterConfig, hidden: Axis) -> dict[str, Rule]:
    features = joined([hidden] * len(small.target_layer_ids))
    return {
        "fc.weight": product(hidden, features),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }


def _drafter_layer(
    small: DrafterConfig, wide: DrafterConfig, hidden: Axis, *, cancelled: bool = False
) -> dict[str, Rule]:
    return {
        "input_layernorm.weight": norm(hidden),
        "post_attention_layernorm.weight": norm(hidden),
        **_attention_rules(small, wide, hidden, cancelled, gated=False),
        **_mlp_rules(small.intermediate_size, wide.intermediate_size, hidden, cancelled),
    }


def _extra_drafter_layer(wide: DrafterConfig, dtype: jnp.dtype) -> Callable[[jax.Array], Params]:
    heads, groups = _halves(wide.num_attention_heads, wide.num_key_value_heads)
    half = dataclasses.replace(
        wide,
        intermediate_size=wide.intermediate_size // 2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
    )
    hidden = exactly(wide.hidden_size, wide.hidden_size)
    return _compiled_extra(
        lambda rngs: DrafterLayer(half, rngs=rngs, dtype=dtype),
        _drafter_layer(half, wide, hidden, cancelled=True),
    )


def _halves(heads: int, groups: int) -> tuple[int, int]:
    """Heads and groups of a layer that fits in twice."""
    if groups < 2:
        raise ConfigError(f"a layer that adds nothing needs two groups of heads, got {groups}")
    return groups // 2 * (heads // groups), groups // 2


def _weaver_rules(small: WeaverConfig, wide: WeaverConfig, hidden: Axis) -> dict[str, Rule]:
    rank = evenly(small.d_rank, wide.d_rank)
    heads = spread(small.num_heads, wide.num_heads).blocks(small.head_dim)
    inner = spread(small.mlp_dim, wide.mlp_dim)
    block = {
        "norm_attn.weight": norm(rank),
        "norm_attn.bias": rows(rank),
        "norm_mlp.weight": norm(rank),
        "norm_mlp.bias": rows(rank),
        "qkv_proj.weight": product(joined([heads] * 3), rank),
        "o_proj.weight": product(rank, heads),
        "fc1.weight": product(inner, rank),
        "fc1.bias": rows(inner),
        "fc2.weight": product(rank, inner),
        "fc2.bias": rows(rank),
    }
    return {
        "embed_norm.weight": norm(hidden),
        "embed_norm.bias": rows(hidden),
        "output_norm.weight": norm(hidden),
        "output_norm.bias": rows(hidden),
        "out_norm.weight": norm(rank),
        "out_norm.bias": rows(rank),
        "token_in.weight": product(rank, hidden),
        "token_in.bias": rows(rank),
        "proposal_in.weight": product(rank, hidden),
        "proposal_in.bias": rows(rank),
        "lm_head_query_in.weight": product(hidden, rank),
        "pos_emb": columns(rank),
        **{f"blocks.{i}.{name}": r for i in range(small.num_layers) for name, r in block.items()},
    }


_VERIFIER_SAME = (
    "head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "rms_norm_eps",
    "rope_theta",
    "partial_rotary_factor",
)
_DRAFTER_SAME = ("head_dim", "block_size", "is_causal", "rms_norm_eps", "rope_theta")
_WEAVER_SAME = ("head_dim", "num_layers", "depth", "variant", "gelu")


def _wide_sizes(
    verifier: VerifierConfig, drafter: DrafterConfig, weaver: WeaverConfig, sizes: Geometry
) -> Geometry:
    """`sizes` with the special tokens and the length limit of the small trio."""
    pairs = (
        ("verifier", verifier, sizes.verifier, _VERIFIER_SAME),
        ("drafter", drafter, sizes.drafter, _DRAFTER_SAME),
        ("Weaver", weaver, sizes.weaver, _WEAVER_SAME),
    )
    for network, small, wide, names in pairs:
        for name in names:
            given, expected = getattr(wide, name), getattr(small, name)
            if given != expected:
                raise ConfigError(
                    f"the wide {network} has {name} = {given}, the small one {expected}: "
                    "they must be equal"
                )
    if weaver.variant != "learned_gelu":
        raise ConfigError(f"only Weavers of variant learned_gelu can grow, got {weaver.variant}")
    if sizes.verifier.tie_word_embeddings:
        raise ConfigError("the wide verifier ties its output matrix to its embedding; it must not")
    taps = len(drafter.target_layer_ids), len(sizes.drafter.target_layer_ids)
    if taps[0] != taps[1]:
        raise ConfigError(f"the wide drafter reads {taps[1]} verifier layers, the small {taps[0]}")
    limits = verifier.max_position_embeddings, sizes.verifier.max_position_embeddings
    return Geometry(
        verifier=dataclasses.replace(
            sizes.verifier,
            eos_token_ids=verifier.eos_token_ids,
            max_position_embeddings=min(limits),
        ),
        drafter=dataclasses.replace(sizes.drafter, mask_token_id=drafter.mask_token_id),
        weaver=sizes.weaver,
    )
