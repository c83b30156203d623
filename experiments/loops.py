"""The device loop of `generate`, compiled ahead of its first run: in threads, many at once."""

from __future__ import annotations

from collections.abc import Callable

import jax

from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.generate import device_loop, rounds_limit
from tfm_jax.decoding.state import Trio, empty_state, make_request


def compile_loop(trio: Trio, method: str, shape: TreeConfig, capacity: int) -> Callable:
    """The compiled loop, a function of (trio, state, request, until); nothing is allocated.

    Args:
      trio: the networks of `method`, as `networks_for` gives them.
      method, shape: of the rounds.
      capacity: rows of every cache.
    """
    state = jax.eval_shape(lambda: empty_state(trio, capacity))
    request = make_request(Sampling(), end_tokens=(), vocab_limit=1, total=1)  # data, any will do
    return (
        device_loop()
        .lower(trio, state, request, rounds_limit(), method=method, shape=shape)
        .compile()
    )
