"""Timed cases of `top_k`: the drafter's pool, 512 candidates out of the vocabulary."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from experiments.timings.case import Candidate, Case, rotations
from pallas_kernels.choice import interpreted
from pallas_kernels.top_k import pallas, specs, xla

_CACHE = 60 * 10**6  # bytes, more than the last-level cache of a Hopper GPU


def cases(*, tiny: bool, sweep: bool = False) -> list[Case]:
    """Returns the cases: 15 rows, float32 and bfloat16; a small one if `tiny`."""
    if tiny:
        spec = specs.Spec(rows=2, columns=1300, k=40, kind="few", limit=1299)
        return [_case(spec, most_sets=2, sweep=False)]
    return [
        _case(
            specs.Spec(rows=15, columns=248320, k=512, limit=248077, dtype=dtype),
            most_sets=8,
            sweep=sweep and dtype == "float32",
        )
        for dtype in ("float32", "bfloat16")
    ]


def _case(spec: specs.Spec, *, most_sets: int, sweep: bool) -> Case:
    inputs = specs.make_inputs(spec)
    expected = specs.solve(inputs, spec.k, spec.limit)
    # Rolled copies bring padding's NaN among the real columns: no rows to time.
    clean = specs.make_inputs(dataclasses.replace(spec, limit=None), seed=1)
    count = min(most_sets, -(-_CACHE // inputs.nbytes))
    limit = jnp.int32(spec.limit)
    sets = [(x, limit) for (x,) in rotations((jnp.asarray(clean),), count)]
    sets[0] = (jnp.asarray(inputs), limit)
    configs = [pallas.default_config(spec.rows, spec.columns)]
    if sweep:
        # One change at a time from the default.
        configs += [config for config in _configs() if config not in configs]
    outputs = spec.rows * spec.k * (inputs.itemsize + 4)
    return Case(
        label={
            "rows": spec.rows,
            "columns": spec.columns,
            "k": spec.k,
            "dtype": spec.dtype,
        },
        sets=sets,
        candidates=[
            *(
                Candidate(
                    kind="pallas",
                    call=functools.partial(_call_pallas, config, spec.k),
                    note=_describe(config),
                )
                for config in configs
            ),
            Candidate(kind="xla", call=functools.partial(_call_xla, spec.k)),
        ],
        error=lambda result: specs.mistakes(result, expected),
        tolerance=0.5 / expected[1].size,  # not one entry wrong
        bytes=inputs.nbytes + outputs,
    )


def _call_pallas(config: pallas.Config, k: int, token, x, limit) -> tuple[jax.Array, ...]:
    limit = limit + token.astype(jnp.int32)
    return pallas.top_k(x, k, limit, config=config, interpret=interpreted())


def _call_xla(k: int, token, x, limit) -> tuple[jax.Array, ...]:
    return xla.top_k(x, k, limit + token.astype(jnp.int32))


def _describe(config: pallas.Config) -> str:
    return (
        f"g{config.group} c{config.chunk}/w{config.read_warps} launches{config.launches} "
        f"s{config.shares} b{config.block}x{config.wide} w{config.num_warps}"
    )


def _configs() -> list[pallas.Config]:
    make = pallas.Config
    return [
        make(launches=2),
        make(chunk=2048),
        make(num_warps=8),
        make(group=32),
        make(shares=4),
    ]
