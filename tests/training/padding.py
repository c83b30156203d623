"""A verifier whose vocabulary has more rows than there are tokens, and the same one without."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from tfm_jax.decoding.state import Trio

KNOWN = 70  # tokens; the tiny networks have 83 rows


def cut_and_padded(trio: Trio) -> tuple[Trio, Trio]:
    """The trio without the output rows from KNOWN on, and with loud ones there."""
    rows = trio.verifier.output_rows
    return _with_output(trio, rows[:KNOWN]), _with_output(trio, rows.at[KNOWN:].multiply(9.0))


def _with_output(trio: Trio, rows: jax.Array) -> Trio:
    verifier = nnx.merge(*nnx.split(trio.verifier))
    assert verifier.lm_head is not None
    verifier.lm_head.weight = nnx.Param(rows)
    return dataclasses.replace(trio, verifier=verifier)
