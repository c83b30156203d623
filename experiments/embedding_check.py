"""Whether a wide trio computes what the small one does: float32, one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.embedding import WideTrio, widened
from experiments.widening import copied
from tfm_jax.checkpoints import StoredTrio, build_drafter, build_verifier, build_weaver, fill
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.layers import project
from tfm_jax.models.qwen36 import DecoderLayer, Verifier
from tfm_jax.models.weaver import Weaver
from tfm_jax.presets import Geometry


def largest_differences(
    small: StoredTrio, sizes: Geometry, tokens: Sequence[int], *, seed: int = 0
) -> dict[str, float]:
    """Largest difference of every part from the small one, over the largest value expected.

    Parts are made, run on the small trio's inputs and let go, one after the other.

    Args:
      small: with float32 weights.
      sizes, seed: as for `embed`.
      tokens: a text, longer than a block of the drafter.

    Returns:
      By part: `layers` that hold a small one, `extra_layers` (output against input), `logits`,
      `drafter` (hidden states of a block), `weaver` (queries along a path).
    """
    wide = widened(small, sizes, seed=seed)
    assert small.drafter is not None
    assert small.weaver is not None
    verifier = build_verifier(small.verifier.config, small.verifier.params)
    drafter = build_drafter(small.drafter.config, small.drafter.params)
    weaver = build_weaver(small.weaver.config, small.weaver.params)
    text = jnp.asarray(tokens, jnp.int32)
    states = [verifier.embed_tokens(text)]
    for layer in verifier.layers:
        states.append(_forward(layer, states[-1]))
    final = verifier.norm(states[-1])

    anchor = text.size - drafter.config.block_size
    block = text[anchor:].at[1:].set(drafter.config.mask_token_id)
    drafting = (
        [states[i + 1] for i in drafter.config.target_layer_ids],
        verifier.embed_tokens(block),
    )
    drafted = _draft(drafter, *drafting, anchor)
    scoring = (
        final[anchor - 1],
        drafted[1 : 1 + weaver.config.depth],
        verifier.embed_tokens(text[anchor : anchor + weaver.config.depth]),
    )
    queries = _query(weaver, *scoring)

    axis = wide.hidden
    found = _layers(wide, states)
    found["logits"] = _logits(wide, verifier, text, final)
    module = build_drafter(wide.sizes.drafter, wide.drafter.params())
    features, embeddings = drafting
    inputs = [copied(x, axis) for x in features], copied(embeddings, axis)
    found["drafter"] = _difference(_draft(module, *inputs, anchor), copied(drafted, axis))
    module = build_weaver(wide.sizes.weaver, wide.weaver())
    result = _query(module, *(copied(x, axis) for x in scoring))
    found["weaver"] = _difference(result, copied(queries, axis))
    return found


def _layers(wide: WideTrio, states: list[jax.Array]) -> dict[str, float]:
    """Every wide layer on the input of the small layer that it holds, or that comes next."""
    config = wide.sizes.verifier
    found = {"layers": 0.0, "extra_layers": 0.0}
    done = 0
    for kind, source, make in zip(
        config.layer_types, wide.verifier.held, wide.verifier.layers, strict=True
    ):
        outline = nnx.eval_shape(
            lambda kind=kind: DecoderLayer(config, kind, rngs=nnx.Rngs(0), dtype=jnp.float32)
        )
        part = "extra_layers" if source is None else "layers"
        result = _forward(fill(outline, make()), copied(states[done], wide.hidden))
        done += source is not None
        expected = copied(states[done], wide.hidden)
        # `max` would lose a NaN.
        found[part] = float(np.maximum(found[part], _difference(result, expected)))
    return found


def _logits(wide: WideTrio, verifier: Verifier, text: jax.Array, final: jax.Array) -> float:
    ends = wide.verifier.ends()
    expected = copied(verifier.embed_tokens(text), wide.hidden)
    if not jnp.array_equal(ends.pop("embed_tokens.weight")[text], expected):
        raise ValueError("wide embeddings are not copies of the small ones")
    logits = verifier.logits(final)
    result = project(copied(final, wide.hidden), ends["lm_head.weight"])
    return _difference(result[:, : logits.shape[1]], logits)


@jax.jit
def _forward(layer: DecoderLayer, x: jax.Array) -> jax.Array:
    return layer.forward(x)


@jax.jit
def _draft(
    drafter: Drafter, features: list[jax.Array], embeddings: jax.Array, anchor: jax.Array
) -> jax.Array:
    joined = jnp.concatenate(features, axis=-1)
    return drafter.blocks(joined, embeddings[None], jnp.asarray(anchor)[None])[0]


@jax.jit
def _query(weaver: Weaver, hidden: jax.Array, drafted: jax.Array, path: jax.Array) -> jax.Array:
    return weaver.chain(hidden, drafted, path)


def _difference(result: jax.Array, expected: jax.Array) -> float:
    return float(jnp.abs(result - expected).max() / jnp.abs(expected).max())
