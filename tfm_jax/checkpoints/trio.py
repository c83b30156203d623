"""Verifier, drafter and Weaver read together from any directory that holds them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Generic, NamedTuple

import jax.numpy as jnp
import numpy as np

from tfm_jax.checkpoints.errors import CheckpointError
from tfm_jax.checkpoints.opened import (
    Config,
    Opened,
    find_file,
    open_drafter,
    open_verifier,
    open_weaver,
)
from tfm_jax.checkpoints.pairing import check_pair
from tfm_jax.checkpoints.store import is_stored, open_store
from tfm_jax.config import DrafterConfig, VerifierConfig, WeaverConfig

DTYPES = ("bfloat16", "float32")


class Part(NamedTuple, Generic[Config]):
    """One network: its configuration and its parameters by dotted path, on the host."""

    config: Config
    params: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTrio:
    """Everything a directory holds for generation.

    Attributes:
      verifier: always there.
      drafter: None if there is none.
      weaver: None if there is none.
      tokenizer: path of `tokenizer.json`, None if there is none.
    """

    verifier: Part[VerifierConfig]
    drafter: Part[DrafterConfig] | None
    weaver: Part[WeaverConfig] | None
    tokenizer: Path | None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Stop tokens: those of `generation_config.json` if it has any, else of `config.json`."""
        return self.verifier.config.eos_token_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedTrio:
    """The three networks before their weights are read.

    Attributes:
      verifier: always there.
      drafter: None if there is none.
      weaver: None if there is none.
      text_files: directory of the tokenizer and of the generation settings.
    """

    verifier: Opened[VerifierConfig]
    drafter: Opened[DrafterConfig] | None
    weaver: Opened[WeaverConfig] | None
    text_files: Path

    def parts(self) -> dict[str, Opened]:
        """The networks that are there, by name."""
        named = {"verifier": self.verifier, "drafter": self.drafter, "weaver": self.weaver}
        return {name: part for name, part in named.items() if part is not None}


def read_trio(path: str | Path, *, dtype: str | None = None) -> StoredTrio:
    """Configurations and parameters of a converted directory, a trio or a single verifier.

    A trio has the folders `verifier/`, `dflash/` and `weaver/` in their published layouts; the
    last two may be absent. Weights that need no change stay mapped from their files.

    Args:
      path: the directory.
      dtype: "bfloat16" or "float32" for all weights but `A_log`, `dt_bias` and the gated norm,
        which are never narrowed; None keeps every tensor as it is stored.

    Raises:
      CheckpointError: with every problem found, before any weight is read.
    """
    wanted = check_dtype(dtype)
    opened = open_trio(path)
    verifier, drafter, weaver = opened.verifier, opened.drafter, opened.weaver
    tokenizer = find_file(opened.text_files, "tokenizer.json")
    return StoredTrio(
        verifier=Part(verifier.config, verifier.load(wanted)),
        drafter=None if drafter is None else Part(drafter.config, drafter.load(wanted)),
        weaver=None if weaver is None else Part(weaver.config, weaver.load(wanted)),
        tokenizer=tokenizer,
    )


def open_trio(
    path: str | Path,
    *,
    drafter: str | Path | None = None,
    weaver: str | Path | None = None,
    strict: bool = True,
) -> OpenedTrio:
    """What `read_trio` reads, checked for files, names, shapes and pairing, weights unread.

    Args:
      path: a converted directory, a trio or a single verifier.
      drafter: directory of a drafter to use instead of the one in `path`.
      weaver: directory or file of a Weaver to use instead of the one in `path`.
      strict: refuse tensors that no network has a place for.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(
            f"{root}: no such directory; models are read from local files, nothing is downloaded"
        )
    own_drafter: Opened[DrafterConfig] | None = None
    own_weaver: Opened[WeaverConfig] | None = None
    text_files = root
    if is_stored(root):
        verifier, own_drafter, own_weaver = open_store(root)
    elif (root / "verifier").is_dir():
        text_files = root / "verifier"
        verifier = open_verifier(text_files, strict=strict)
        if drafter is None and (root / "dflash").is_dir():
            own_drafter = open_drafter(root / "dflash", strict=strict)
        if weaver is None and (root / "weaver").is_dir():
            own_weaver = open_weaver(root / "weaver", strict=strict)
    else:
        verifier = open_verifier(root, strict=strict)
    opened = OpenedTrio(
        verifier=verifier,
        drafter=own_drafter if drafter is None else open_drafter(_existing(drafter), strict=strict),
        weaver=own_weaver if weaver is None else open_weaver(_existing(weaver), strict=strict),
        text_files=text_files,
    )
    check_pair(
        opened.verifier.config,
        None if opened.drafter is None else opened.drafter.config,
        None if opened.weaver is None else opened.weaver.config,
    )
    return opened


def check_dtype(dtype: str | None) -> np.dtype | None:
    """The NumPy dtype of that name; ValueError for all but bfloat16 and float32."""
    if dtype is None:
        return None
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return np.dtype(jnp.dtype(dtype))


def _existing(path: str | Path) -> Path:
    if not Path(path).exists():
        raise CheckpointError(f"{path}: no such file or directory")
    return Path(path)
