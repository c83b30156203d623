"""The two-sided check between the tensors of a checkpoint and the parameters of a module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tfm_jax.checkpoints.errors import refuse
from tfm_jax.checkpoints.keymaps import KeyMap, Rule, keeps_precision
from tfm_jax.checkpoints.quantised import SCALE_SUFFIX, dequantise, is_float8, scale_problem

_PLAIN = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


class Piece(NamedTuple):
    """A published tensor and the row of the table that claims it."""

    name: str
    rule: Rule


class Match(NamedTuple):
    """Which published tensors make which parameter.

    Attributes:
      pieces: for every parameter path its tensors, in the order in which they are stacked.
      ignored: published names that a pattern of the table skips, by pattern.
      unknown: published names without a place in the module.
    """

    pieces: dict[str, tuple[Piece, ...]]
    ignored: dict[str, tuple[str, ...]]
    unknown: tuple[str, ...]


def match(
    keymap: KeyMap,
    tensors: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    where: object,
    strict: bool = True,
    block: tuple[int, int] = (128, 128),
) -> Match:
    """The assignment of `tensors` to the parameters `shapes`; no value is read.

    Every tensor must be used, skipped by a pattern, or is unknown; every parameter must be
    given once, in its shape. Raises one CheckpointError with all problems; unknown tensors
    count as problems if `strict`.

    Args:
      tensors: published arrays by name, views of the file.
      shapes: parameter shapes by dotted path.
      where: named in the error.
      block: rows and columns of an 8-bit weight that share a scale.
    """
    found: dict[str, list[Piece]] = {}
    ignored: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name in sorted(tensors):
        pattern = _first(keymap.ignored, name)
        if pattern is not None:
            ignored.setdefault(pattern, []).append(name)
            continue
        if _is_scale(name, tensors):
            continue
        claim = _claim(keymap, name)
        if claim is None or claim[0] not in shapes:
            unknown.append(name)
        else:
            found.setdefault(claim[0], []).append(Piece(name, claim[1]))

    problems: list[str] = []
    pieces: dict[str, tuple[Piece, ...]] = {}
    for path, shape in shapes.items():
        pieces[path] = tuple(sorted(found.get(path, ()), key=lambda piece: piece.rule.part))
        problems += _problems(path, shape, pieces[path], tensors, block)
    if strict and unknown:
        problems.append(f"no place for {len(unknown)} tensors: {', '.join(unknown)}")
    refuse(where, problems)
    return Match(pieces, {k: tuple(v) for k, v in ignored.items()}, tuple(unknown))


def assemble(
    keymap: KeyMap,
    matched: Match,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: np.dtype | None = None,
    block: tuple[int, int] = (128, 128),
) -> dict[str, np.ndarray]:
    """The parameters by path. What needs no change stays a view of its file.

    Args:
      dtype: stores all but the paths that keep their precision in this type; these are only
        ever widened to it.
    """
    params = {}
    for path, pieces in matched.pieces.items():
        arrays = [_value(piece, tensors, block) for piece in pieces]
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        params[path] = _cast(array, dtype, keep=keeps_precision(keymap, path))
    return params


def _first(patterns: tuple[str, ...], name: str) -> str | None:
    return next((pattern for pattern in patterns if re.fullmatch(pattern, name)), None)


def _is_scale(name: str, tensors: Mapping[str, np.ndarray]) -> bool:
    weight = tensors.get(name.removesuffix(SCALE_SUFFIX))
    return name.endswith(SCALE_SUFFIX) and weight is not None and is_float8(weight)


def _claim(keymap: KeyMap, name: str) -> tuple[str, Rule] | None:
    for rule in keymap.rules:
        hit = re.fullmatch(rule.source, name)
        if hit:
            return hit.expand(rule.target), rule
    return None


def _problems(
    path: str,
    shape: tuple[int, ...],
    pieces: tuple[Piece, ...],
    tensors: Mapping[str, np.ndarray],
    block: tuple[int, int],
) -> list[str]:
    if not pieces:
        return [f"{path} is missing"]
    names = ", ".join(piece.name for piece in pieces)
    count = pieces[0].rule.part[1]
    if [piece.rule.part for piece in pieces] != [(i, count) for i in range(count)]:
        return [f"{path} needs one tensor or each of its parts once, got {names}"]
    problems = []
    for piece in pieces:
        problem = _storage_problem(piece.name, tensors, block)
        if problem:
            problems.append(f"{piece.name}: {problem}")
    try:
        given = [_transformed(piece, tensors[piece.name]).shape for piece in pieces]
    except ValueError as error:
        return [*problems, f"{names}: {error}"]
    rows, *rest = shape if shape else (1,)
    expected = (rows // count, *rest) if count > 1 else shape
    for piece, actual in zip(pieces, given, strict=True):
        if actual != expected:
            problems.append(f"{piece.name} is {list(actual)}, expected {list(expected)}")
    return problems


def _storage_problem(
    name: str, tensors: Mapping[str, np.ndarray], block: tuple[int, int]
) -> str | None:
    array = tensors[name]
    if is_float8(array):
        return scale_problem(array, tensors.get(name + SCALE_SUFFIX), block)
    if array.dtype not in _PLAIN:
        return f"stored as {array.dtype}, expected a float of 16 or 32 bits"
    return None


def _transformed(piece: Piece, array: np.ndarray) -> np.ndarray:
    return array if piece.rule.transform is None else piece.rule.transform(array)


def _value(piece: Piece, tensors: Mapping[str, np.ndarray], block: tuple[int, int]) -> np.ndarray:
    array = tensors[piece.name]
    if is_float8(array):
        array = dequantise(array, tensors[piece.name + SCALE_SUFFIX], block)
    return _transformed(piece, array)


def _cast(array: np.ndarray, dtype: np.dtype | None, *, keep: bool) -> np.ndarray:
    if dtype is None or (keep and array.dtype.itemsize >= dtype.itemsize):
        return array
    return array.astype(dtype, copy=False)
