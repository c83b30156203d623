"""A checkpoint of one network: its files checked, its tensors still on disk."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from tfm_jax.checkpoints import keymaps, quantised
from tfm_jax.checkpoints.build import parameter_shapes
from tfm_jax.checkpoints.errors import CheckpointError
from tfm_jax.checkpoints.matching import Match, assemble, match
from tfm_jax.checkpoints.safetensors_io import read_directory, read_file
from tfm_jax.checkpoints.torch_pickle import read_torch_file
from tfm_jax.config import ConfigError, DrafterConfig, VerifierConfig, WeaverConfig, token_ids

Config = TypeVar("Config", VerifierConfig, DrafterConfig, WeaverConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened(Generic[Config]):
    """What was found for one network, every shape checked and no weight read yet.

    Attributes:
      config: its configuration.
      source: directory or file it was read from.
      files: the weight files.
      tensors: arrays by published name, views of the files; where there is a `read`, shapes alone.
      read: makes the arrays.
      matched: which of them make which parameter, which were skipped or unknown.
      keymap: the table used.
      block: rows and columns of an 8-bit weight that share a scale.
    """

    config: Config
    source: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, np.ndarray]
    matched: Match
    keymap: keymaps.KeyMap
    block: tuple[int, int] = (128, 128)
    read: Callable[[], Mapping[str, np.ndarray]] | None = None

    def load(self, dtype: np.dtype | None = None) -> dict[str, np.ndarray]:
        """Parameters by dotted path, in `dtype` but for those that keep their precision."""
        return assemble(self.keymap, self.matched, self.values(), dtype=dtype, block=self.block)

    def values(self) -> Mapping[str, np.ndarray]:
        """The arrays by published name, as they are stored."""
        return self.tensors if self.read is None else self.read()


def open_verifier(directory: Path, *, strict: bool = True) -> Opened[VerifierConfig]:
    """A verifier in the Hugging Face layout, flat or nested, one file or shards, also FP8.

    The stop tokens of `generation_config.json` win over those of `config.json`. A tied model may
    repeat its embedding as `lm_head.weight`; a different one is refused. Unknown tensors are
    refused if `strict`, otherwise listed in `matched.unknown`.
    """
    file = directory / "config.json"
    published = read_json(file)
    config = _configure(file, VerifierConfig.from_hf, published)
    config = dataclasses.replace(config, eos_token_ids=_stop_ids(directory, config))
    try:
        block = quantised.block_size(published)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    tensors, files = read_directory(directory)
    if config.tie_word_embeddings:
        tensors = _without_tied_head(directory, tensors)
    return check(
        config, directory, files, tensors, keymap=keymaps.VERIFIER, strict=strict, block=block
    )


def open_drafter(directory: Path, *, strict: bool = True) -> Opened[DrafterConfig]:
    """A DFlash drafter: `config.json` and safetensors without embedding and output matrix."""
    file = directory / "config.json"
    published = read_json(file)
    config = _configure(file, DrafterConfig.from_hf, published)
    tensors, files = read_directory(directory)
    return check(config, directory, files, tensors, keymap=keymaps.DRAFTER, strict=strict)


def open_weaver(path: Path, *, strict: bool = True) -> Opened[WeaverConfig]:
    """A Weaver: a `.pth` file, a safetensors file beside its `config.json`, or a directory.

    A directory must hold one weight file, or `model.safetensors` among several.
    """
    file = _weaver_file(path) if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    source = file
    if file.suffix in (".pth", ".pt"):
        published, tensors = read_torch_file(file)
    elif file.suffix == ".safetensors":
        source = file.parent / "config.json"
        published, tensors = read_json(source), read_file(file)
    else:
        raise CheckpointError(f"{file}: a Weaver is a .pth or a .safetensors file")
    config = _configure(
        source, lambda c: WeaverConfig.from_published(c, keys=set(tensors)), published
    )
    return check(config, file, (file,), tensors, keymap=keymaps.WEAVER, strict=strict)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError if there is none."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def find_file(directory: Path, name: str) -> Path | None:
    """The file of that name, None if there is none; CheckpointError if it is no file."""
    path = directory / name
    if not path.is_file() and os.path.lexists(path):
        raise CheckpointError(f"{path} is no file, expected one or nothing of that name")
    return path if path.is_file() else None


def check(
    config: Config,
    source: Path,
    files: tuple[Path, ...],
    tensors: Mapping[str, np.ndarray],
    *,
    keymap: keymaps.KeyMap,
    strict: bool = True,
    block: tuple[int, int] = (128, 128),
    read: Callable[[], Mapping[str, np.ndarray]] | None = None,
) -> Opened[Config]:
    """`tensors` opened as the network of `config`; CheckpointError with all that does not fit."""
    shapes = parameter_shapes(config)
    matched = match(keymap, tensors, shapes, where=source, strict=strict, block=block)
    return Opened(
        config=config,
        source=source,
        files=files,
        tensors=tensors,
        matched=matched,
        keymap=keymap,
        block=block,
        read=read,
    )


def _configure(
    source: Path, make: Callable[[Mapping[str, Any]], Config], published: Mapping[str, Any]
) -> Config:
    try:
        return make(published)
    except ConfigError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _stop_ids(directory: Path, config: VerifierConfig) -> tuple[int, ...]:
    path = find_file(directory, "generation_config.json")
    value = None if path is None else read_json(path).get("eos_token_id")
    if value is None:
        return config.eos_token_ids
    try:
        return token_ids("eos_token_id", value, config.vocab_size)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _without_tied_head(directory: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    rest = {name: array for name, array in tensors.items() if name != "lm_head.weight"}
    embeddings = [array for name, array in rest.items() if name.endswith(".embed_tokens.weight")]
    head = tensors.get("lm_head.weight")
    if head is not None and not any(np.array_equal(head, table) for table in embeddings):
        raise CheckpointError(
            f"{directory}: tie_word_embeddings is true, but lm_head.weight differs from the "
            "embedding: one of the two is wrong"
        )
    return rest


def _weaver_file(directory: Path) -> Path:
    files = sorted(f for f in directory.iterdir() if f.suffix in (".pth", ".pt", ".safetensors"))
    if len(files) > 1:
        files = [file for file in files if file.name == "model.safetensors"] or files
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(
            f"{directory}: expected one Weaver file (.pth, .safetensors), found {names}; "
            "name the file itself"
        )
    return files[0]
