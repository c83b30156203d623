"""Settings that JAX reads when it is first used; nothing here imports it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def keep_compiled_programs() -> None:
    """Lets JAX keep all compiled programs on disk, so that a second run starts at once.

    In `$XDG_CACHE_HOME/tfm_jax/compile`, by default `~/.cache/tfm_jax/compile`. Variables that
    are set already win: JAX_COMPILATION_CACHE_DIR to move the folder,
    JAX_ENABLE_COMPILATION_CACHE=false to do without.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(caches) / "tfm_jax" / "compile"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    # By default JAX keeps only what took a second to compile.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def limit_gpu_memory(fraction: float) -> None:
    """Lets JAX reserve this share of the GPU's memory at its start.

    Raises:
      ValueError: not a share, or JAX has been imported and would not see it.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"--memory-fraction must lie in (0, 1], got {fraction}")
    if "jax" in sys.modules:
        raise ValueError("--memory-fraction comes too late: JAX has been imported already")
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the old name; JAX refuses both
    os.environ["XLA_CLIENT_MEM_FRACTION"] = str(fraction)
