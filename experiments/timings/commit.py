"""Commit of all layers of Qwen3.6-27B after a round, by how many rows it accepted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.timings.case import Candidate, Case, relative_error
from pallas_kernels.commit import commit_kv, commit_linear, pallas, pallas_kv
from pallas_kernels.commit.specs import (
    SMALL,
    SMALL_KV,
    KVSpec,
    Spec,
    benchmark_kv_spec,
    benchmark_spec,
    make_inputs,
    make_kv,
    same,
    solve,
    solve_kv,
)

TOLERANCE = 1e-6
DEFAULT = pallas.default_config(128, 128)
SWEEP = ({"layers": 8}, {"layers": 24}, {"block_v": 32})


def cases(*, tiny: bool, sweep: bool = False) -> list[Case]:
    """Returns the cases: states and histories by accepted rows, then the key-value caches."""
    if tiny:
        return [_linear(SMALL[5], 3, [{}, {"layers": 2}]), _kv(SMALL_KV[5], [{}])]
    # The kernel's work does not depend on the tree, so one size is enough; the cuts differ in how
    # they move the state, which all counts do.
    counts = {16: [{}, *SWEEP] if sweep else [{}], 6: [{}], 1: [{}]}
    timed = [_linear(benchmark_spec(64, count), 48, cuts) for count, cuts in counts.items()]
    kv_changes = [{}, {"group": 8}, {"num_warps": 8}] if sweep else [{}]
    return [*timed, _kv(benchmark_kv_spec(), kv_changes)]


def _linear(spec: Spec, layers: int, changes: list[dict]) -> Case:
    """`layers` layers made of one: its columns rolled by one more in each."""
    inputs = make_inputs(spec)
    exact = [x[0] for x in solve(inputs)]
    rolled = dataclasses.replace(
        inputs,
        **{
            name: [np.roll(getattr(inputs, name)[0], i, axis=-1) for i in range(layers)]
            for name in ("states", "histories", "us", "inputs")
        },
        keys=inputs.keys[:1] * layers,
        log_decays=inputs.log_decays[:1] * layers,
    )
    columns = rolled.arguments(spec.dtype)
    arrays = [x for column in columns[:6] for x in column]
    updated = 2 * layers

    def candidate(kind: str, commit, note: str = "") -> Candidate:
        def call(token, *arrays):
            layer = [arrays[i * layers : (i + 1) * layers] for i in range(6)]
            path, count = arrays[6 * layers :]
            states, histories = commit(*layer, path, count + token.astype(jnp.int32))
            return (*states, *histories, token[None])

        return Candidate(kind=kind, call=call, note=note)

    def error(results) -> float:
        errors = [
            relative_error(x, np.roll(exact[i // layers], i % layers, axis=-1))
            for i, x in enumerate(results[:updated])
        ]
        return max(errors)

    xla = functools.partial(commit_linear, implementation="xla")
    # Reads the states, histories and the path's rows, writes the first two.
    rows = sum(x[0][: spec.count].nbytes for x in columns[2:6])
    traffic = 2 * (columns[0][0].nbytes + columns[1][0].nbytes) + rows
    return Case(
        label={"nodes": spec.nodes, "layers": layers, "count": spec.count},
        sets=[(*arrays, *columns[6:])],  # the states alone exceed the cache
        candidates=[
            *(candidate("pallas", _kernel(x), _note(x)) for x in changes),
            candidate("xla", xla),
        ],
        error=error,
        tolerance=TOLERANCE,
        bytes=layers * traffic,
        carried=updated,
        calls=40,
    )


def _kernel(changes: dict):
    if not changes:
        return functools.partial(commit_linear, implementation="pallas")
    interpret = jax.default_backend() == "cpu"
    config = dataclasses.replace(DEFAULT, **changes)
    return functools.partial(pallas.advance, config=config, interpret=interpret)


def _note(changes: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in changes.items())


def _kv(spec: KVSpec, changes: list[dict]) -> Case:
    caches, rows, *rest = make_kv(spec)
    exact = solve_kv(caches, rows, *rest)
    count = len(caches)

    def candidate(kind: str, commit, note: str = "") -> Candidate:
        def call(token, *arrays):
            path, accepted, length = arrays[2 * count :]
            length = length + token.astype(jnp.int32)
            moved = commit(arrays[:count], arrays[count : 2 * count], path, accepted, length)
            return (*moved, token[None])

        return Candidate(kind=kind, call=call, note=note)

    def kernel(change: dict):
        if not change:
            return functools.partial(commit_kv, implementation="pallas")
        return functools.partial(
            pallas_kv.compact, interpret=jax.default_backend() == "cpu", **change
        )

    def error(results) -> float:
        end = spec.length + spec.count
        pairs = zip(results[:count], exact, strict=True)
        return float(not all(same(x[:, :end], y[:, :end]) for x, y in pairs))

    return Case(
        label={"kv_layers": count // 2},
        sets=[(*caches, *rows, *rest)],
        candidates=[
            *(candidate("pallas", kernel(x), _note(x)) for x in changes),
            candidate("xla", functools.partial(commit_kv, implementation="xla"), "scatter"),
            candidate("xla", _overwrite, "whole path overwritten"),
        ],
        error=error,
        tolerance=0.0,
        bytes=2 * count * caches[0][:, : spec.count].nbytes,
        carried=count,
        calls=40,
    )


def _overwrite(caches, rows, path, count, length):
    """What a model without this operation does: writes all of the path, accepted or not."""
    path = jnp.where(jnp.arange(path.size) < count, path, path[0])
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=1)
    return [write(cache, own[:, path], length) for cache, own in zip(caches, rows, strict=True)]
