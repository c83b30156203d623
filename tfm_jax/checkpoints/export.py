"""Parameters written in the published layout: `config.json` and one safetensors file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
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
    beside: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes one network as `config.json` and `model.safetensors`; equal input, equal bytes.

    After a kill at any point the directory holds the old network, the new one, or no
    `config.json`, without which nothing loads it.

    Args:
      directory: made if it does not exist; other files in it stay.
      config: of the network, which decides the names.
      params: arrays by dotted path, all of them (`module_params` gives them).
      dtype: see `read_trio`.
      extra: more entries of `config.json`.
      metadata: more entries of the safetensors header, such as source and licence.
      beside: contents of more files by name, such as the tokenizer's.
      overwrite: replace files of these names if they exist.

    Raises:
      CheckpointError: parameters and configuration do not fit, the files exist, or there are
        other weights beside which a reader would not take these.
    """
    directory, beside = Path(directory), beside or {}
    names = ("config.json", *beside, "model.safetensors")
    check_target(directory, names, overwrite=overwrite)
    keymap = keymaps.VERIFIER if isinstance(config, VerifierConfig) else keymaps.WEAVER
    own = keymaps.own_names(keymap)
    matched = match(own, params, parameter_shapes(config), where=type(config).__name__)
    stored = assemble(own, matched, params, dtype=check_dtype(dtype))
    tensors = published(config, stored)
    described = config.to_published() if isinstance(config, WeaverConfig) else config.to_hf()
    if dtype is not None:
        described["dtype"] = dtype
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Files take their places in reverse order: the configuration last.
        partial = {name: stack.enter_context(whole_file(directory / name)) for name in names}
        text = json.dumps({**described, **(extra or {})}, indent=2) + "\n"
        partial["config.json"].write_text(text, "utf-8")
        for name, content in beside.items():
            partial[name].write_bytes(content)
        save_file(
            {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)},
            partial["model.safetensors"],
            metadata={"format": "pt", **(metadata or {})},
        )
        (directory / "config.json").unlink(missing_ok=True)


def check_target(
    directory: Path,
    names: Sequence[str] = ("config.json", "model.safetensors"),
    *,
    overwrite: bool = False,
) -> None:
    """Raises CheckpointError if `write_hf` would not write files of these names there."""
    there = [name for name in names if (directory / name).exists()]
    if there and not overwrite:
        raise CheckpointError(
            f"{directory}: {', '.join(there)} exists; pass overwrite to replace it"
        )
    kinds = ("*.safetensors", "*.safetensors.index.json")
    others = sorted({file.name for kind in kinds for file in directory.glob(kind)} - {*names})
    if others:
        more = ", ..." * (len(others) > 3)
        raise CheckpointError(
            f"{directory} holds other weights, {', '.join(others[:3])}{more}: a reader would not "
            "take new ones beside them; name another directory"
        )


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
