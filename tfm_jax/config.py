"""Frozen configurations: the three networks, the draft tree and sampling."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

Kind = TypeVar("Kind")

LINEAR = "linear_attention"
FULL = "full_attention"
SLIDING = "sliding_attention"
MAX_POOL = 2**15 - 1  # two ranks share a sort key when trees are put in order
MAX_BUDGET = 1024  # "ddtree" counts its paths beforehand: in 2 s for these, 30 s for 4096
MAX_END_TOKENS = 8  # as many as a request has room for
_LARGEST = 2**31 - 1


class ConfigError(ValueError):
    """A configuration that is missing a value, or holds one this code does not support."""


class _Rule(NamedTuple):
    """What a field may hold.

    Attributes:
      allowed: in words, for messages.
      read: the value as it is kept, None for one that is not allowed.
    """

    allowed: str
    read: Callable[[Any], Any]


def as_int(value: Any) -> int | None:
    """A Python, NumPy or JAX integer as an int; None for anything else, booleans included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """A finite real number as a float; None for anything else, booleans included."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _integer(low: int) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        number = as_int(value)
        return number if number is not None and low <= number <= _LARGEST else None

    return read


def _number(holds: Callable[[float], bool]) -> Callable[[Any], float | None]:
    def read(value: Any) -> float | None:
        number = as_float(value)
        return number if number is not None and holds(number) else None

    return read


def _several(read_one: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...] | None]:
    def read(value: Any) -> tuple[Any, ...] | None:
        if not isinstance(value, list | tuple):
            return None
        found = tuple(read_one(one) for one in value)
        return found if found and None not in found else None

    return read


_SIZE = _Rule(f"an integer in 1..{_LARGEST}", _integer(1))
_INDEX = _Rule(f"an integer in 0..{_LARGEST}", _integer(0))
_INDICES = _Rule("a list of integers from 0 on, not empty", _several(_integer(0)))
_NAMES = _Rule(
    "a list of strings, not empty", _several(lambda one: one if isinstance(one, str) else None)
)
_FLAG = _Rule("true or false", lambda value: value if isinstance(value, bool) else None)

Size = Annotated[int, _SIZE]
Index = Annotated[int, _INDEX]
Indices = Annotated[tuple[int, ...], _INDICES]
Names = Annotated[tuple[str, ...], _NAMES]
Flag = Annotated[bool, _FLAG]
Epsilon = Annotated[float, _Rule("a number between 0 and 1", _number(lambda x: 0 < x < 1))]
Share = Annotated[float, _Rule("a number in (0, 1]", _number(lambda x: 0 < x <= 1))]
RopeBase = Annotated[float, _Rule("a number in (0, 1e30]", _number(lambda x: 0 < x <= 1e30))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """Dense Qwen3.5/3.6 text model, by the names of its `config.json` (`text_config`)."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    layer_types: Names
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Size = 4
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: RopeBase = 1e7
    partial_rotary_factor: Share = 0.25
    tie_word_embeddings: Flag = False
    max_position_embeddings: Size = 262144
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self)
        unknown = sorted(set(self.layer_types) - {LINEAR, FULL})
        if unknown:
            raise ConfigError(f"layer_types may hold {LINEAR!r} and {FULL!r}, got {unknown}")
        _check_divides("num_attention_heads", self.num_attention_heads, self.num_key_value_heads)
        _check_divides(
            "linear_num_value_heads", self.linear_num_value_heads, self.linear_num_key_heads
        )
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ConfigError(
                "head_dim * partial_rotary_factor must be even and positive, "
                f"got {self.head_dim} * {self.partial_rotary_factor}"
            )
        if self.linear_conv_kernel_dim < 2:
            raise ConfigError(
                f"linear_conv_kernel_dim must be at least 2, got {self.linear_conv_kernel_dim}"
            )
        ids = token_ids("eos_token_ids", self.eos_token_ids, self.vocab_size)
        object.__setattr__(self, "eos_token_ids", ids)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.linear_key_dim + self.linear_value_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> VerifierConfig:
        """Reads a flat (`qwen3_5_text`) or nested (`qwen3_5`) Hugging Face configuration."""
        text = _section(config, "text_config") or config
        model_type = text.get("model_type")
        if model_type != "qwen3_5_text":
            raise ConfigError(
                f"expected a dense Qwen3.5/3.6 text model (model_type 'qwen3_5_text'), "
                f"got {model_type!r}"
            )
        _refuse(text, "attention_bias", False)
        _refuse(text, "attn_output_gate", True)
        _refuse(text, "hidden_act", "silu")
        _refuse(text, "output_gate_type", "swish")
        _refuse_scaled_rope(text)
        rope = _section(text, "rope_parameters") or _section(text, "rope_scaling")
        interval = _obey(_SIZE, "full_attention_interval", text.get("full_attention_interval", 4))
        rows = _obey(_SIZE, "vocab_size", _need(text, "vocab_size"))
        eos = text.get("eos_token_id", config.get("eos_token_id"))
        return cls(
            **{name: _need(text, name) for name in _VERIFIER_SIZES},
            layer_types=_layer_types(
                text, lambda index: FULL if (index + 1) % interval == 0 else LINEAR
            ),
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", text.get("rope_theta", 1e7)),
            partial_rotary_factor=rope.get(
                "partial_rotary_factor", text.get("partial_rotary_factor", 0.25)
            ),
            tie_word_embeddings=config.get(
                "tie_word_embeddings", text.get("tie_word_embeddings", False)
            ),
            max_position_embeddings=text.get("max_position_embeddings", 262144),
            eos_token_ids=() if eos is None else token_ids("eos_token_id", eos, rows),
        )

    def to_hf(self) -> dict[str, Any]:
        """The flat `qwen3_5_text` configuration that `from_hf` reads back."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **{name: getattr(self, name) for name in _VERIFIER_SIZES},
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": list(self.layer_types),
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            },
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "eos_token_id": list(self.eos_token_ids),
            "attention_bias": False,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "mamba_ssm_dtype": "float32",
        }


_VERIFIER_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """DFlash block drafter, by the names of its `config.json` and `dflash_config`."""

    hidden_size: Size
    intermediate_size: Size
    layer_types: Names
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    target_layer_ids: Indices
    num_target_layers: Size
    mask_token_id: Index
    vocab_size: Size
    block_size: Size = 16
    sliding_window: Annotated[int | None, _SIZE] = None
    is_causal: Annotated[bool | None, _FLAG] = None
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: RopeBase = 1e7

    def __post_init__(self) -> None:
        _check_fields(self)
        unknown = sorted(set(self.layer_types) - {SLIDING, FULL})
        if unknown:
            raise ConfigError(f"layer_types may hold {SLIDING!r} and {FULL!r}, got {unknown}")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ConfigError("sliding layers need a positive sliding_window, got None")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, got {self.head_dim}")
        _check_divides("num_attention_heads", self.num_attention_heads, self.num_key_value_heads)
        ids = self.target_layer_ids
        if len(set(ids)) != len(ids):
            raise ConfigError(f"target_layer_ids must be distinct, got {list(ids)}")
        outside = [i for i in ids if i >= self.num_target_layers]
        if outside:
            raise ConfigError(
                f"target_layer_ids must lie in 0..{self.num_target_layers - 1}, got {outside}"
            )
        if self.block_size < 2:
            raise ConfigError(f"block_size must be at least 2, got {self.block_size}")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def depth(self) -> int:
        """Future positions drafted by one pass: the block without its anchor."""
        return self.block_size - 1

    def is_layer_causal(self, index: int) -> bool:
        """Whether a block row of this layer sees only block rows at or before it."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[index] == SLIDING

    def window(self, index: int) -> int | None:
        """Sliding window of this layer, counting the row itself; None for a full layer."""
        return self.sliding_window if self.layer_types[index] == SLIDING else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Reads a DFlash configuration; `dflash_config` wins over the top level."""
        nested = _section(config, "dflash_config")

        def find(name: str, default: Any = None) -> Any:
            return nested.get(name, config.get(name, default))

        if "conv_kernel_size" in nested or "selector_rank" in nested:
            raise ConfigError("this is a DFlash 2 checkpoint; only DFlash 1 is supported")
        _refuse(config, "attention_bias", False)
        _refuse(config, "hidden_act", "silu")
        _refuse_scaled_rope(config)
        for name in ("mask_token_id", "target_layer_ids"):
            if find(name) is None:
                raise ConfigError(f"the drafter's config.json has no {name}; it is never guessed")
        rope = _section(config, "rope_parameters")
        theta = rope.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ConfigError("the drafter's config.json has no rope_theta")
        causal = find("is_causal", find("causal"))
        return cls(
            **{name: _need(config, name) for name in _DRAFTER_SIZES},
            layer_types=_layer_types(config, lambda _: FULL),
            target_layer_ids=find("target_layer_ids"),
            mask_token_id=find("mask_token_id"),
            block_size=find("block_size", 16),
            sliding_window=config.get("sliding_window"),
            is_causal=causal,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
        )

    def to_hf(self) -> dict[str, Any]:
        """The configuration that `from_hf` reads back, in the published layout."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **{name: getattr(self, name) for name in _DRAFTER_SIZES},
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": list(self.layer_types),
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            **({} if self.is_causal is None else {"is_causal": self.is_causal}),
        }


_DRAFTER_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_target_layers",
    "vocab_size",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeaverConfig:
    """Weaver adapter: `d_model`, `d_rank`, ... are the names of its published configuration."""

    d_model: Size
    d_embed: Size
    d_rank: Size
    num_heads: Size
    mlp_dim: Size
    num_layers: Size = 1
    depth: Size = 15
    candidate_pool_size: Size = 512
    variant: Literal["learned_gelu", "rope_swiglu"] = "learned_gelu"
    gelu: Literal["tanh", "erf"] = "tanh"
    rope_base: RopeBase = 10000.0

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.variant not in ("learned_gelu", "rope_swiglu"):
            raise ConfigError(f"variant must be learned_gelu or rope_swiglu, got {self.variant!r}")
        if self.gelu not in ("tanh", "erf"):
            raise ConfigError(f"gelu must be tanh or erf, got {self.gelu!r}")
        _check_divides("d_rank", self.d_rank, self.num_heads)
        if self.variant == "rope_swiglu" and self.head_dim % 2:
            raise ConfigError(
                "heads of variant rope_swiglu must be of even size, got d_rank / num_heads = "
                f"{self.d_rank} / {self.num_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.d_rank // self.num_heads

    @classmethod
    def from_published(cls, config: Mapping[str, Any], *, keys: set[str]) -> WeaverConfig:
        """Reads a published configuration; the tensor names in `keys` decide the variant."""
        learned = "pos_emb" in keys
        rotary = any("gate_up_proj" in key for key in keys)
        if learned == rotary:
            raise ConfigError(
                "a Weaver has either `pos_emb` (early variant) or `gate_up_proj` (later variant); "
                f"this one has {'both' if learned else 'neither'}"
            )
        for name, served in (("encoder_mode", 3), ("score_head", 4)):
            _refuse(config, name, served)
        return cls(
            d_model=_need(config, "d_model"),
            d_embed=config.get("d_embed", config["d_model"]),
            d_rank=_need(config, "d_rank"),
            num_heads=_need(config, "num_heads"),
            mlp_dim=_need(config, "mlp_dim"),
            num_layers=config.get("num_layers", 1),
            depth=_obey(_SIZE, "K", _need(config, "K")),
            candidate_pool_size=_need(config, "candidate_pool_size"),
            variant="learned_gelu" if learned else "rope_swiglu",
            gelu=config.get("gelu", "tanh"),
            rope_base=config.get("rope_base", 10000.0),
        )

    def to_published(self) -> dict[str, Any]:
        """The configuration that `from_published` reads back."""
        extra: dict[str, Any] = (
            {"gelu": self.gelu}
            if self.variant == "learned_gelu"
            else {"rope_base": self.rope_base, "activation": "swiglu"}
        )
        return {
            "d_model": self.d_model,
            "d_embed": self.d_embed,
            "d_rank": self.d_rank,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "mlp_dim": self.mlp_dim,
            "K": self.depth,
            "candidate_pool_size": self.candidate_pool_size,
            **extra,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """Shape of a draft tree: `budget` drafted nodes, grown `expand` at a time.

    Attributes:
      budget: drafted nodes, the root not counted (B in the paper), at most MAX_BUDGET. 63 and their
        root fill 64 rows, a whole tile of the matrix units.
      expand: frontier entries that become nodes at once (w); one Weaver call expands them all.
      children: pool tokens offered by an expanded node; 8 in the authors' code, which binds where
        the target is uncertain.
      pool: candidates kept per future position (K); limited by the vocabulary.
    """

    budget: int = 63
    expand: int = 4
    children: int = 32
    pool: int = 512

    def __post_init__(self) -> None:
        for name in ("budget", "expand", "children", "pool"):
            value = as_int(getattr(self, name))
            if value is None or value < 1:
                raise ConfigError(
                    f"TreeConfig.{name} must be a positive integer, got {getattr(self, name)!r}"
                )
            object.__setattr__(self, name, value)
        for name, most in (("budget", MAX_BUDGET), ("pool", MAX_POOL)):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"TreeConfig.{name} must be at most {most}, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from the verifier's logits.

    Attributes:
      temperature: 0 takes the argmax (lowest id on ties); above it, logits are divided by it.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep tokens while the probability before them is below this.
      min_p: keep tokens at least this share as probable as the best one.
      seed: the noise of a position depends on the seed and the position alone, so every
        method emits the same text for the same seed.
      shared_noise: above temperature 0, pick candidates and grow the draft tree under the noise
        that will choose the target's tokens. The output is unchanged; more of it is drafted
        correctly.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    shared_noise: bool = True

    def __post_init__(self) -> None:
        for name, allowed, holds in (
            ("temperature", "be finite and not negative, at most 1e6", lambda x: 0 <= x <= 1e6),
            ("top_p", "lie in (0, 1]", lambda x: 0 < x <= 1),
            ("min_p", "lie in [0, 1]", lambda x: 0 <= x <= 1),
        ):
            value = as_float(getattr(self, name))
            if value is None or not holds(value):
                raise ConfigError(f"{name} must {allowed}, got {getattr(self, name)!r}")
            object.__setattr__(self, name, value)
        for name, high in (("top_k", 2**31 - 1), ("seed", 2**32 - 1)):
            object.__setattr__(self, name, integer_up_to(high, name, getattr(self, name)))
        if not isinstance(self.shared_noise, bool):
            raise ConfigError(f"shared_noise must be true or false, got {self.shared_noise!r}")


def integer_up_to(high: int, name: str, value: Any) -> int:
    """`value` as an int; ConfigError that names it if it is no integer in 0..`high`."""
    number = as_int(value)
    if number is None or not 0 <= number <= high:
        raise ConfigError(f"{name} must be an integer in 0..{high}, got {value!r}")
    return number


def made(kind: type[Kind], entries: Mapping[str, Any], where: str) -> Kind:
    """`kind(**entries)` with lists as tuples; ConfigError that names `where` if they do not fit."""
    as_object(entries, where)
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in entries.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def as_object(value: Any, name: str) -> Mapping[str, Any]:
    """`value` itself; ConfigError that names it if it is no JSON object."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be an object, got {value!r}")
    return value


def token_ids(name: str, value: Any, rows: int) -> tuple[int, ...]:
    """One id or several as a tuple; ConfigError if they are no end tokens of `rows` rows."""
    several = value if isinstance(value, list | tuple) else [value]
    ids = tuple(as_int(one) for one in several)
    known = tuple(one for one in ids if one is not None and 0 <= one < rows)
    if len(known) < len(ids) or len(ids) > MAX_END_TOKENS:
        raise ConfigError(
            f"{name} must be an id or a list of at most {MAX_END_TOKENS} ids in 0..{rows - 1}, "
            f"got {value!r}"
        )
    return known


def _check_fields(config: VerifierConfig | DrafterConfig | WeaverConfig) -> None:
    """Checks every field that has a rule, and keeps numbers and lists as the rule reads them."""
    for field in dataclasses.fields(config):
        rule = _rules(type(config)).get(field.name)
        value = getattr(config, field.name)
        if rule is not None and not (value is None and field.default is None):
            object.__setattr__(config, field.name, _obey(rule, field.name, value))


@functools.cache
def _rules(kind: type) -> dict[str, _Rule]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: rule for name, hint in hints.items() for rule in getattr(hint, "__metadata__", ())
    }


def _obey(rule: _Rule, name: str, value: Any) -> Any:
    kept = rule.read(value)
    if kept is None:
        raise ConfigError(f"{name} must be {rule.allowed}, got {value!r}")
    return kept


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return {} if value is None else as_object(value, name)


def _layer_types(config: Mapping[str, Any], usual: Callable[[int], str]) -> tuple[str, ...]:
    """`layer_types`, one for each of `num_hidden_layers`; the usual ones if there are none."""
    layers = _obey(_SIZE, "num_hidden_layers", _need(config, "num_hidden_layers"))
    given = config.get("layer_types")
    if given is None:
        return tuple(usual(index) for index in range(layers))
    types = _obey(_NAMES, "layer_types", given)
    if len(types) != layers:
        raise ConfigError(f"layer_types has {len(types)} entries, num_hidden_layers is {layers}")
    return types


def _need(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        raise ConfigError(f"the configuration has no {name}")
    return value


def _refuse_scaled_rope(config: Mapping[str, Any]) -> None:
    """Refuses rotary positions of another kind, under any name that they have been given."""
    for name in ("rope_parameters", "rope_scaling"):
        section = _section(config, name)
        for key in ("rope_type", "type"):
            if section.get(key, "default") != "default":
                raise ConfigError(f"{name}.{key} must be 'default', got {section[key]!r}")
        if section.get("factor", 1) != 1:
            raise ConfigError(f"{name}.factor is not supported, got {section['factor']!r}")


def _refuse(config: Mapping[str, Any], name: str, supported: Any) -> None:
    value = config.get(name, supported)
    if value != supported:
        raise ConfigError(f"{name} = {value!r} is not supported, only {supported!r}")


def _check_divides(name: str, whole: int, part: int) -> None:
    if part < 1 or whole % part:
        raise ConfigError(f"{name} = {whole} is not a multiple of {part}")
