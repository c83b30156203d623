"""The directory that conversion makes: `config.json`, tokenizer files and an orbax checkpoint.

Parameters lie under `weights/` as a nested dictionary, network first, then the dotted path.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from tfm_jax.checkpoints import keymaps
from tfm_jax.checkpoints.errors import CheckpointError, refuse
from tfm_jax.checkpoints.opened import Opened, check, read_json
from tfm_jax.config import ConfigError, DrafterConfig, VerifierConfig, WeaverConfig, as_object

FORMAT = "tfm_jax"
VERSION = 1
_NETWORKS = ("verifier", "drafter", "weaver")


def is_stored(directory: Path) -> bool:
    """Whether `directory` was made by `write_store`, by its `config.json`."""
    path = directory / "config.json"
    return path.is_file() and _format(path) == FORMAT


def foreign_files(directory: Path) -> list[str]:
    """What lies in a converted directory, but was not written by its conversion."""
    described = read_json(directory / "config.json")
    written = {"config.json", *_sizes(directory, described), *_copied(directory, described)}
    present = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted({str(path.relative_to(directory)) for path in present} - written)


def write_store(
    directory: Path,
    configs: Mapping[str, VerifierConfig | DrafterConfig | WeaverConfig],
    params: Mapping[str, Mapping[str, np.ndarray]],
    *,
    copied: Sequence[str] = (),
) -> None:
    """Writes `config.json` and `weights/` into an existing directory.

    Args:
      directory: without `weights/`.
      configs: by network: `verifier`, and `drafter` and `weaver` if there are any.
      params: for the same networks, arrays by dotted path.
      copied: names of the files that are put beside these.
    """
    described: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for name, config in configs.items():
        described[name] = (
            config.to_published() if isinstance(config, WeaverConfig) else config.to_hf()
        )
    tree = {name: _nest(params[name]) for name in configs}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save((directory / "weights").absolute(), args=ocp.args.StandardSave(tree))
    # With the sizes a cut or absent file can be named before orbax trips over it.
    described["files"] = {
        str(file.relative_to(directory)): file.stat().st_size
        for file in sorted((directory / "weights").rglob("*"))
        if file.is_file()
    }
    described["copied"] = list(copied)
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n", "utf-8")


def open_store(
    directory: Path,
) -> tuple[Opened[VerifierConfig], Opened[DrafterConfig] | None, Opened[WeaverConfig] | None]:
    """Verifier, drafter and Weaver of a converted directory, each with the two-sided check.

    Shapes are those that the checkpoint names. What loads a network first reads the weights of all
    into host memory, once.
    """
    described = read_json(directory / "config.json")
    if described.get("version") != VERSION:
        raise CheckpointError(
            f"{directory} has version {described.get('version')!r} of the format, this program "
            f"reads {VERSION}; convert again"
        )
    _check_files(directory, _sizes(directory, described))
    try:
        parts = {name: as_object(described[name], name) for name in _NETWORKS if name in described}
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None
    weights = directory / "weights"
    tree = _from_orbax(weights, _outline)
    tensors = {name: dict(_flatten(part, make=_unread)) for name, part in tree.items()}
    restore = functools.cache(lambda: _from_orbax(weights, lambda orbax, path: orbax.restore(path)))
    absent = [name for name in parts if name not in tensors]
    if absent or "verifier" not in parts:
        raise CheckpointError(f"{directory} has no weights of: {', '.join(absent) or 'verifier'}")

    def network(name: str, config: Any, keymap: keymaps.KeyMap) -> Any:
        return check(
            config,
            directory,
            (weights,),
            tensors[name],
            keymap=keymaps.own_names(keymap),
            read=lambda: dict(_flatten(restore()[name], make=np.asarray)),
        )

    try:
        verifier = VerifierConfig.from_hf(parts["verifier"])
        drafter = DrafterConfig.from_hf(parts["drafter"]) if "drafter" in parts else None
        weaver = (
            WeaverConfig.from_published(parts["weaver"], keys=set(tensors["weaver"]))
            if "weaver" in parts
            else None
        )
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None
    return (
        network("verifier", verifier, keymaps.VERIFIER),
        None if drafter is None else network("drafter", drafter, keymaps.DRAFTER),
        None if weaver is None else network("weaver", weaver, keymaps.WEAVER),
    )


class _Uncopied(np.ndarray):
    """An array that saving reads in place: it is synchronous, so nothing can change it."""

    def __deepcopy__(self, memo: Any) -> _Uncopied:
        return self


def _sizes(directory: Path, described: Mapping[str, Any]) -> Mapping[str, int]:
    sizes = described.get("files", {})
    if not isinstance(sizes, dict):
        raise CheckpointError(
            f"{directory / 'config.json'}: files must be an object of sizes by name, got {sizes!r}"
        )
    return sizes


def _copied(directory: Path, described: Mapping[str, Any]) -> Sequence[str]:
    names = described.get("copied", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{directory / 'config.json'}: copied must be a list of file names, got {names!r}"
        )
    return names


def _check_files(directory: Path, sizes: Mapping[str, int]) -> None:
    problems = []
    for name, size in sizes.items():
        file = directory / name
        if not file.is_file():
            problems.append(f"{name} is not there")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes, {size} were written")
    if problems:
        problems.append("copy it again or convert again")
    refuse(directory, problems)


def _nest(params: Mapping[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in params.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array.view(_Uncopied)
    return tree


def _flatten(
    tree: Mapping[str, Any], *, make: Callable[[Any], np.ndarray], prefix: str = ""
) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, make=make, prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", make(value)


def _unread(array: Any) -> np.ndarray:
    """Shape and type of a stored array, without memory for its values."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _outline(orbax: ocp.Checkpointer, path: Path) -> Mapping[str, Any]:
    metadata = orbax.metadata(path).item_metadata
    if metadata is None:
        raise ValueError("it has no metadata")
    return metadata.tree


def _from_orbax(weights: Path, ask: Callable[[ocp.Checkpointer, Path], Any]) -> Any:
    """What orbax says of a checkpoint; CheckpointError if it cannot."""
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            return ask(checkpointer, weights.absolute())
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise CheckpointError(
            f"{weights} is damaged or incomplete, convert again: {_first_line(error)}"
        ) from error


def _format(path: Path) -> Any:
    try:
        return read_json(path).get("format")
    except CheckpointError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0][:200]
