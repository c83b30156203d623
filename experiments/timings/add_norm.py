"""Residual addition and norm of Qwen3.6-27B."""

import functools

import jax

from experiments.timings.case import Candidate, Case, relative_error, rotations
from pallas_kernels.add_norm import add_norm, pallas
from pallas_kernels.add_norm.specs import SMALL, Spec, benchmark_spec, make_inputs, solve

EPS = 1e-6
TOLERANCE = 4e-3  # one rounding of bfloat16
SETS = 16  # a layer's activations never leave the cache between two launches
CUTS = (
    {"block": 1024},
    {"block": 8192, "num_warps": 16},
)


def cases(*, tiny: bool, sweep: bool = False) -> list[Case]:
    """Returns the cases by rows."""
    if tiny:
        return [_case(SMALL[0], [{}])]
    swept = (1, 65) if sweep else ()
    whole = [
        _case(benchmark_spec(rows), [{}, *(CUTS if rows in swept else ())])
        for rows in (1, 16, 65, 128)
    ]
    return [*whole, *(_case(benchmark_spec(rows, parts=3), [{}]) for rows in (1, 65))]


def _case(spec: Spec, cuts: list[dict]) -> Case:
    arguments = make_inputs(spec)
    exact = solve(arguments, EPS, spec.zero_centred)

    def candidate(kind: str, function, note: str = "") -> Candidate:
        def call(token, x, delta, weight):
            weight = weight + token.astype(weight.dtype)
            return tuple(function(x, delta, weight, EPS, zero_centred=spec.zero_centred))

        return Candidate(kind=kind, call=call, note=note)

    def error(results) -> float:
        return max(relative_error(x, y.astype(float)) for x, y in zip(results, exact, strict=True))

    x, delta, weight = arguments
    parts = {"parts": spec.parts} if spec.parts else {}
    return Case(
        label={"nodes": spec.rows, **parts},
        sets=rotations(arguments, SETS),
        candidates=[
            *(candidate("pallas", _cut(cut), _note(cut)) for cut in cuts),
            candidate("xla", functools.partial(add_norm, implementation="xla")),
        ],
        error=error,
        tolerance=TOLERANCE,
        bytes=3 * x.nbytes + delta.nbytes + weight.nbytes,
    )


def _cut(cut: dict):
    if not cut:
        return functools.partial(add_norm, implementation="pallas")
    interpret = jax.default_backend() == "cpu"
    return functools.partial(pallas.add, config=pallas.Config(**cut), interpret=interpret)


def _note(cut: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in cut.items())
