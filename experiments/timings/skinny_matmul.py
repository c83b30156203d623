"""Products of a few rows with the weights of Qwen3.6-27B."""

import functools

import jax

from experiments.timings.case import Candidate, Case, relative_error, rotations
from pallas_kernels.skinny_matmul import pallas, skinny_matmul
from pallas_kernels.skinny_matmul.specs import (
    SHAPES,
    SMALL,
    Spec,
    benchmark_spec,
    joined,
    make_inputs,
    solve,
)

TOLERANCE = 4e-3  # one rounding of bfloat16
SETS = 2  # the weights alone exceed the cache
# Further cuts: (block_n, block_k, splits, num_warps, num_stages).
WHOLE = ((128, 64, 1, 8, 4), (64, 128, 1, 4, 4), (128, 128, 1, 8, 3), (64, 64, 1, 4, 5))
PARTS = (
    (64, 128, 3, 4, 4),
    (64, 64, 4, 4, 4),
    (128, 64, 6, 4, 4),
)


def cases(*, tiny: bool, sweep: bool = False) -> list[Case]:
    """Returns the cases by weight and rows."""
    if tiny:
        return [_case("small", SMALL[4], [None])]
    found = []
    for name, (_, _, parts) in SHAPES.items():
        for rows in (1, 16, 65, 129):
            cuts = [pallas.Config(**_names(cut)) for cut in (PARTS if parts else WHOLE)]
            swept = sweep and rows != 129
            found.append(_case(name, benchmark_spec(name, rows), [None, *(cuts if swept else ())]))
    return found


def _case(name: str, spec: Spec, cuts: list[pallas.Config | None]) -> Case:
    arguments = make_inputs(spec)
    exact = solve(arguments)

    def candidate(kind: str, function, note: str = "") -> Candidate:
        def call(token, x, weight):
            return (function(x + token.astype(x.dtype), weight),)

        return Candidate(kind=kind, call=call, note=note)

    x, weight = arguments
    return Case(
        label={"rows": spec.rows, "weight": name},
        sets=rotations(arguments, SETS),
        candidates=[
            *(candidate("pallas", _kernel(spec, cut), _note(cut)) for cut in cuts),
            candidate("xla", functools.partial(skinny_matmul, implementation="xla")),
        ],
        error=lambda results: relative_error(joined(results[0]), exact),
        tolerance=TOLERANCE,
        bytes=weight.nbytes + x.nbytes + spec.rows * spec.outputs * (4 if spec.parts else 2),
        flops=2 * spec.rows * spec.inputs * spec.outputs,
    )


def _names(cut: tuple[int, ...]) -> dict[str, int]:
    names = ("block_n", "block_k", "splits", "num_warps", "num_stages")
    return dict(zip(names, cut, strict=True))


def _kernel(spec: Spec, cut: pallas.Config | None):
    if cut is None:
        return functools.partial(skinny_matmul, parts=spec.parts, implementation="pallas")
    interpret = jax.default_backend() == "cpu"
    return functools.partial(pallas.multiply, parts=spec.parts, config=cut, interpret=interpret)


def _note(cut: pallas.Config | None) -> str:
    if cut is None:
        return ""
    return (
        f"n{cut.block_n} k{cut.block_k} splits{cut.splits} w{cut.num_warps} stages{cut.num_stages}"
    )
