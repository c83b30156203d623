"""Prologue and epilogue of one gated delta-rule layer of Qwen3.6-27B."""

import functools

import jax
import jax.numpy as jnp

from experiments.timings.case import Candidate, Case, relative_error
from pallas_kernels.gdn_inputs import GDNInputs, gdn_inputs, gdn_output, pallas, pallas_output
from pallas_kernels.gdn_inputs.specs import (
    SMALL,
    Spec,
    benchmark_spec,
    make_inputs,
    scaled,
    solve,
    solve_output,
)

EPS = 1e-6
TOLERANCE = 1e-2  # several roundings of bfloat16
SETS = 16  # past the cache from 65 rows on; a smaller layer's activations never leave it
CUTS = tuple(
    {"block_n": block_n, "num_warps": num_warps}
    for block_n, num_warps in ((2, 4), (4, 4), (8, 8), (16, 4))
)


def cases(*, tiny: bool, sweep: bool = False) -> list[Case]:
    """Returns the cases: the prologue at several tree sizes, then the epilogue."""
    if tiny:
        return [_inputs(SMALL[5], [{}]), _output(SMALL[5], [{}])]
    specs = [benchmark_spec(rows) for rows in (1, 16, 65, 128)]
    made = []
    for build in (_inputs, _output):
        for spec in specs:
            cuts = CUTS if sweep and spec.rows == 65 else ()
            made.append(build(spec, [{}, *cuts]))
    return made


def _inputs(spec: Spec, cuts: list[dict]) -> Case:
    inputs = make_inputs(spec)
    exact = solve(inputs, spec)
    columns = inputs.columns()
    x, history, taps, weight, _, _, *gates = inputs.stacked().arguments(spec.dtype)
    sizes = {"key_heads": spec.key_heads, "key_dim": spec.key_dim, "columns": columns}

    def candidate(kind: str, function, note: str = "") -> Candidate:
        def call(token, x, history, taps, weight, *gates):
            taps = taps + token.astype(jnp.int32)
            return tuple(function(x, history, taps, weight, x, x, *gates, **sizes))

        return Candidate(kind=kind, call=call, note=note)

    def error(results) -> float:
        made = scaled(GDNInputs(*results))
        return max(relative_error(made[name], exact[name]) for name in exact)

    narrow = inputs.arguments(spec.dtype)
    read = sum(array.nbytes for array in narrow)
    written = narrow[0].nbytes + 2 * 4 * spec.rows * (spec.value_heads + spec.key_heads)
    return Case(
        label={"nodes": spec.rows},
        sets=_rolled((x, history, taps, weight, *gates)),
        candidates=[
            *(candidate("pallas", _cut(gdn_inputs, pallas.prepare, x), _note(x)) for x in cuts),
            candidate("xla", functools.partial(gdn_inputs, implementation="xla")),
        ],
        error=error,
        tolerance=TOLERANCE,
        bytes=read + written,
    )


def _output(spec: Spec, cuts: list[dict]) -> Case:
    inputs = make_inputs(spec)
    exact = solve_output(inputs, EPS)
    narrow = inputs.output_arguments(spec.dtype)
    column = inputs.columns().z

    def candidate(kind: str, function, note: str = "") -> Candidate:
        def call(token, out, z, weight):
            return (function(out, z, weight + token, EPS, column=column),)

        return Candidate(kind=kind, call=call, note=note)

    return Case(
        label={"nodes": spec.rows, "part": "output"},
        sets=_rolled(inputs.stacked().output_arguments(spec.dtype)),
        candidates=[
            *(
                candidate("pallas", _cut(gdn_output, pallas_output.finish, x), _note(x))
                for x in cuts
            ),
            candidate("xla", functools.partial(gdn_output, implementation="xla")),
        ],
        error=lambda results: relative_error(results[0], exact),
        tolerance=TOLERANCE,
        bytes=sum(x.nbytes for x in narrow) + narrow[1].nbytes,
    )


def _rolled(arguments: tuple) -> list[tuple]:
    """Input sets with all but the taps rolled along the last axis."""

    def roll(x: jax.Array, i: int) -> jax.Array:
        return x if x.dtype == jnp.int32 else jnp.roll(x, i, axis=-1)

    return [tuple(roll(x, i) for x in arguments) for i in range(SETS)]


def _cut(function, kernel, cut: dict):
    if not cut:
        return functools.partial(function, implementation="pallas")
    interpret = jax.default_backend() == "cpu"
    return functools.partial(kernel, config=pallas.Config(**cut), interpret=interpret)


def _note(cut: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in cut.items())
