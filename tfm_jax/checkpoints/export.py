"""Parameters written in the published layout: `config.json` and one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tfm_jax.checkpoints import keymaps
from tfm_jax.checkpoints.build import parameter_shapes
from tfm_jax.checkpoints.errors import CheckpointError
from tfm_jax.checkpoints.matching import assemble, match
from tfm_jax.checkpoints.trio import check_dtype
from tfm_jax.config import DrafterConfig, VerifierConfig, WeaverConfig
from tfm_jax.files import whole_file


def write_hf(
    directory: str | Path,
    config: VerifierConfig | DrafterConfig | WeaverConfig,
    params: Mapping[str, np.ndarray],
    *,
    dtype: str | None = None,
    extra: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes one network as `config.json` and `model.safetensors`; equal input, equal bytes.

    Args:
      directory: made if it does not exist; other files in it stay.
      config: of the network, which decides the names.
      params: arrays by dotted path, all of them (`module_params` gives them).
      dtype: see `read_trio`.
      extra: more entries of `config.json`.
      metadata: more entries of the safetensors header, such as source and licence.
      overwrite: replace the two files if they exist.

    Raises:
      CheckpointError: parameters and configuration do not fit, or the files exist.
    """
    directory = Path(directory)
    weights = directory / "model.safetensors"
    if weights.exists() and not overwrite:
        raise CheckpointError(f"{weights} exists; pass overwrite to replace it")
    keymap = keymaps.VERIFIER if isinstance(config, VerifierConfig) else keymaps.WEAVER
    own = keymaps.own_names(keymap)
    matched = match(own, params, parameter_shapes(config), where=type(config).__name__)
    stored = assemble(own, matched, params, dtype=check_dtype(dtype))
    names = published(config, stored)
    described = config.to_published() if isinstance(config, WeaverConfig) else config.to_hf()
    if dtype is not None:
        described["dtype"] = dtype
    directory.mkdir(parents=True, exist_ok=True)
    with whole_file(weights) as partial:
        save_file(
            {name: np.ascontiguousarray(names[name]) for name in sorted(names)},
            partial,
            metadata={"format": "pt", **(metadata or {})},
        )
    text = json.dumps({**described, **(extra or {})}, indent=2) + "\n"
    (directory / "config.json").write_text(text, "utf-8")


def published(
    config: VerifierConfig | DrafterConfig | WeaverConfig, params: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """`params` under their published names: the inverse of the tables in `keymaps`."""
    if isinstance(config, VerifierConfig):
        return dict(_verifier_tensor(path, array) for path, array in params.items())
    if isinstance(config, WeaverConfig) and config.variant == "learned_gelu":
        return _with_separate_projections(params)
    return dict(params)


def _verifier_tensor(path: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    if path == "lm_head.weight":
        return path, array
    if path.endswith(".conv1d.weight"):
        array = array[:, None, :]
    return f"model.{path}", array


def _with_separate_projections(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {}
    for path, array in params.items():
        if path.endswith(".qkv_proj.weight"):
            block = path.removesuffix("qkv_proj.weight")
            for name, part in zip("qkv", np.split(array, 3), strict=True):
                tensors[f"{block}{name}_proj.weight"] = part
        else:
            tensors[path] = array
    return tensors
