"""Telling values from tracers, so that what can be checked is checked."""

import jax
import numpy as np


def concrete(x: jax.Array | np.ndarray | int) -> np.ndarray | None:
    """`x` on the host; None inside a trace, where there is no value yet."""
    try:
        return np.asarray(x)
    except jax.errors.TracerArrayConversionError:
        return None
