"""The `tfm` command: reads the arguments, runs one command, turns failures into one line."""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Sequence

import tyro

from tfm_jax.cli.bench import bench
from tfm_jax.cli.compare import compare
from tfm_jax.cli.convert import convert
from tfm_jax.cli.data import data
from tfm_jax.cli.generate import generate
from tfm_jax.cli.info import info
from tfm_jax.cli.runtime import keep_compiled_programs
from tfm_jax.cli.train import train
from tfm_jax.cli.verify import verify

COMMANDS = {
    "generate": generate,
    "compare": compare,
    "verify": verify,
    "convert": convert,
    "info": info,
    "bench": bench,
    "data": data,
    "train": train,
}

SUMMARY = "Lossless speculative decoding with trees from marginals (DFlash-TfM), in JAX."

# Statuses; the last two are what a shell reports for a process ended by SIGINT and SIGPIPE.
FAILED, INTERRUPTED, READER_GONE = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    0: done. 1: a comparison found a difference. 2: bad input or not enough memory, with one line
    on standard error; TFM_DEBUG=1 raises the error instead.

    Args:
      arguments: those of the process if not given.
    """
    keep_compiled_programs()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        try:
            status = tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="tfm",
                description=SUMMARY,
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
        finally:
            sys.stdout.flush()  # here, where a closed pipe is caught, also after --help
        return status or 0
    except BrokenPipeError:
        # What is still buffered must not fail once more when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        # A program may still run on the device: taking JAX down under it would crash.
        atexit.register(os._exit, INTERRUPTED)
        return INTERRUPTED
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        message = _explain(error)
        if message is None or os.environ.get("TFM_DEBUG"):
            raise
        print(f"error: {message}", file=sys.stderr)
        return FAILED


def _explain(error: Exception) -> str | None:
    """One line for the user; None for an error that only a traceback explains."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return (
            "out of memory: lower --max-new-tokens or shorten the prompt (caches), lower --budget "
            "or --pool (trees), or take --dtype bfloat16 (weights); on a GPU --memory-fraction "
            f"sets the share that JAX may use [{text[:200]}]"
        )
    if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
        return None
    return text or type(error).__name__
