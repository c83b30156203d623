"""Queries, keys and values of one attention layer of Qwen3.6-27B."""

import functools

import jax
import jax.numpy as jnp

from experiments.timings.case import Candidate, Case, relative_error
from pallas_kernels.attention_inputs import attention_inputs, pallas, turns
from pallas_kernels.attention_inputs.specs import (
    EPS,
    SMALL,
    Spec,
    benchmark_spec,
    make_inputs,
    solve,
)

TOLERANCE = 1e-2  # several roundings of bfloat16
SETS = 16  # a layer's activations never leave the cache between two launches
CUTS = tuple(
    {"block_n": block_n, "num_warps": num_warps}
    for block_n, num_warps in ((1, 1), (2, 1), (4, 1), (2, 2), (8, 4))
)


def cases(*, tiny: bool, sweep: bool = False) -> list[Case]:
    """Returns the cases by rows."""
    if tiny:
        return [_case(SMALL[7], [{}])]
    swept = (1, 65) if sweep else ()
    return [
        _case(benchmark_spec(rows), [{}, *(CUTS if rows in swept else ())])
        for rows in (1, 16, 65, 128)
    ]


def _case(spec: Spec, cuts: list[dict]) -> Case:
    inputs = make_inputs(spec)
    exact = solve(inputs, spec)
    wide, _, _, positions, *weights = inputs.stacked(spec).arguments(spec.dtype)
    # The layers of a step share the positions, so what is made of them is made once: a constant.
    wide = jnp.nan_to_num(wide)

    def candidate(kind: str, function, note: str = "") -> Candidate:
        def call(token, wide, q_weight, k_weight):
            q_weight = q_weight + token.astype(q_weight.dtype)
            return tuple(function(wide, wide, wide, positions, q_weight, k_weight))

        return Candidate(kind=kind, call=call, note=note)

    def error(results) -> float:
        return max(relative_error(x, y) for x, y in zip(results, exact.values(), strict=True))

    moved = sum(x.nbytes for x in inputs.arguments(spec.dtype)[:3])
    return Case(
        label={"nodes": spec.rows},
        sets=[(jnp.roll(wide, i, axis=-1), *weights) for i in range(SETS)],
        candidates=[
            *(candidate("pallas", _cut(spec, cut), _note(cut)) for cut in cuts),
            candidate("xla", functools.partial(attention_inputs, **_settings(spec, "xla"))),
        ],
        error=error,
        tolerance=TOLERANCE,
        bytes=2 * moved + sum(x.nbytes for x in weights),
    )


def _settings(spec: Spec, implementation: str) -> dict:
    return {**spec.settings, "columns": spec.columns, "implementation": implementation}


def _cut(spec: Spec, cut: dict):
    if not cut:
        return functools.partial(attention_inputs, **_settings(spec, "pallas"))
    kernel = functools.partial(
        pallas.prepare,
        eps=EPS,
        heads=spec.heads,
        key_heads=spec.key_heads,
        zero_centred=spec.zero_centred,
        columns=spec.columns,
        config=pallas.Config(**cut),
        interpret=jax.default_backend() == "cpu",
    )

    def call(q, k, v, positions, q_weight, k_weight):
        cos, sin = turns(positions, spec.theta, spec.rotary, q.dtype)
        return kernel(q, k, v, cos, sin, q_weight, k_weight)

    return call


def _note(cut: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in cut.items())
