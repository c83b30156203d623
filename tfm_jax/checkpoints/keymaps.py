"""Tables from published tensor names to the parameter paths of our modules.

Published names: transformers `qwen3_5` (verifier, with or without `language_model`), the DFlash
package (drafter, no prefix) and the two published Weaver layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


def drop_middle_axis(weight: np.ndarray) -> np.ndarray:
    """Depthwise taps [C, W] from the published [C, 1, W]."""
    if weight.ndim != 3 or weight.shape[1] != 1:
        raise ValueError(f"expected [C, 1, W], got {list(weight.shape)}")
    return weight[:, 0]


class Rule(NamedTuple):
    """One row of a table.

    Attributes:
      source: regular expression of the whole published name.
      target: our path, as a template of the expression's groups.
      transform: applied to the array, None to take it as it is.
      part: (index, count) where `count` published tensors, stacked by rows, make one of ours.
    """

    source: str
    target: str
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    part: tuple[int, int] = (0, 1)


class KeyMap(NamedTuple):
    """A table, the published names to skip, and the paths a narrower dtype must not reach."""

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    keep_precision: tuple[str, ...] = ()


_MODEL = r"model\.(?:language_model\.)?"
_LAYER = _MODEL + r"layers\.(\d+)\."

VERIFIER = KeyMap(
    rules=(
        Rule(_MODEL + r"(embed_tokens|norm)\.weight", r"\1.weight"),
        Rule(
            _LAYER + r"(input|post_attention)_layernorm\.weight", r"layers.\1.\2_layernorm.weight"
        ),
        Rule(_LAYER + r"mlp\.(gate|up|down)_proj\.weight", r"layers.\1.mlp.\2_proj.weight"),
        Rule(
            _LAYER + r"linear_attn\.(in_proj_(?:qkv|z|b|a)|out_proj|norm)\.weight",
            r"layers.\1.linear_attn.\2.weight",
        ),
        Rule(
            _LAYER + r"linear_attn\.conv1d\.weight",
            r"layers.\1.linear_attn.conv1d.weight",
            drop_middle_axis,
        ),
        Rule(_LAYER + r"linear_attn\.(A_log|dt_bias)", r"layers.\1.linear_attn.\2"),
        Rule(
            _LAYER + r"self_attn\.((?:q|k|v|o)_proj|(?:q|k)_norm)\.weight",
            r"layers.\1.self_attn.\2.weight",
        ),
        Rule(r"lm_head\.weight", r"lm_head.weight"),
    ),
    ignored=(r"model\.visual\..*", r"mtp\..*"),
    keep_precision=(r"layers\.\d+\.linear_attn\.(?:A_log|dt_bias|norm\.weight)",),
)

DRAFTER = KeyMap(
    rules=(
        Rule(r"(fc|hidden_norm|norm)\.weight", r"\1.weight"),
        Rule(
            r"layers\.(\d+)\.(input|post_attention)_layernorm\.weight",
            r"layers.\1.\2_layernorm.weight",
        ),
        Rule(
            r"layers\.(\d+)\.self_attn\.((?:q|k|v|o)_proj|(?:q|k)_norm)\.weight",
            r"layers.\1.self_attn.\2.weight",
        ),
        Rule(r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight", r"layers.\1.mlp.\2_proj.weight"),
    )
)

WEAVER = KeyMap(
    rules=(
        Rule(r"(embed_norm|output_norm|out_norm)\.(weight|bias)", r"\1.\2"),
        Rule(r"(token_in|proposal_in)\.(weight|bias)", r"\1.\2"),
        Rule(r"lm_head_query_in\.weight", r"lm_head_query_in.weight"),
        Rule(r"pos_emb", r"pos_emb"),
        Rule(r"blocks\.(\d+)\.(norm_attn|norm_mlp)\.(weight|bias)", r"blocks.\1.\2.\3"),
        Rule(r"blocks\.(\d+)\.(qkv_proj|o_proj)\.weight", r"blocks.\1.\2.weight"),
        Rule(r"blocks\.(\d+)\.q_proj\.weight", r"blocks.\1.qkv_proj.weight", part=(0, 3)),
        Rule(r"blocks\.(\d+)\.k_proj\.weight", r"blocks.\1.qkv_proj.weight", part=(1, 3)),
        Rule(r"blocks\.(\d+)\.v_proj\.weight", r"blocks.\1.qkv_proj.weight", part=(2, 3)),
        Rule(
            r"blocks\.(\d+)\.(fc1|fc2|gate_up_proj|down_proj)\.(weight|bias)",
            r"blocks.\1.\2.\3",
        ),
    )
)


def own_names(keymap: KeyMap) -> KeyMap:
    """The table of a checkpoint that already uses our paths."""
    return KeyMap(rules=(Rule(r"(.*)", r"\1"),), keep_precision=keymap.keep_precision)


def keeps_precision(keymap: KeyMap, path: str) -> bool:
    """Whether the parameter at `path` must not be stored in fewer bits than it came in."""
    return any(re.fullmatch(pattern, path) for pattern in keymap.keep_precision)
