"""Growth under Weaver: one expansion of four nodes, each of its launches, and a whole tree."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.timings.case import Candidate, Case, relative_error
from pallas_kernels.choice import interpreted
from pallas_kernels.weaver_step import frontier, pallas, weaver_grow, xla
from pallas_kernels.weaver_step.attend import attend
from pallas_kernels.weaver_step.launch import Config
from pallas_kernels.weaver_step.project import project
from pallas_kernels.weaver_step.score import score
from pallas_kernels.weaver_step.specs import (
    SMALL,
    Spec,
    benchmark_spec,
    make_inputs,
    make_pools,
    path_error,
)
from pallas_kernels.weaver_step.state import GrownTree, Growth, Nodes, plant

_CACHE = 120e6  # bytes that surely push everything out of a Hopper GPU's last-level cache


def cases(*, tiny: bool, sweep: bool = False) -> list[Case]:
    """What is timed; `tiny` cases are small enough to be gated interpreted."""
    spec = SMALL[0] if tiny else benchmark_spec()
    inputs = _inputs(spec, jnp.float32 if tiny else jnp.bfloat16)
    growth, start = _half_grown(spec, inputs)
    found = [_expansion(spec, inputs, growth, start, sweep), _growth(spec, inputs)]
    if not tiny:
        found += [*_projections(spec, inputs, sweep), *_others(spec, inputs, growth, start, sweep)]
    return found


def _inputs(spec: Spec, dtype) -> tuple:
    """Arguments of `weaver_grow`; one table made on the device stands for both."""
    root, _, weights, *memory = make_inputs(
        dataclasses.replace(spec, vocabulary=spec.pool), dtype=dtype
    )

    @jax.jit
    def make_table(key):
        # A query of unit size would make one candidate certain.
        scale = jnp.asarray(0.7 * spec.rank**-0.5, dtype)
        return scale * jax.random.normal(key, (spec.vocabulary, spec.rank), dtype)

    table = make_table(jax.random.key(0))
    pools = make_pools(spec, np.random.default_rng(0))
    return root, pools, weights._replace(table=table, head=table), *memory


def _half_grown(spec: Spec, inputs: tuple) -> tuple[Growth, int]:
    """A growth with half of its nodes, and the row that the next ones go to."""
    root, pools, weights, key, value = inputs
    width, depths = spec.expand, spec.depths
    take = jax.jit(functools.partial(xla.take, width=width, depths=depths))
    expand = jax.jit(functools.partial(xla.expand, activation=spec.activation))
    growth = plant(root, spec.rows, spec.children, key, value)
    x = xla.embed(weights, growth.token[:width], growth.depth[:width])
    nodes = Nodes(x, growth.depth[:width], growth.score[:width])
    growth = expand(growth, nodes, weights, pools, jnp.int32(0))
    rounds = (spec.rows - 1) // width // 2
    for i in range(rounds):
        growth, nodes = take(growth, weights, jnp.int32(1 + i * width))
        growth = expand(growth, nodes, weights, pools, jnp.int32(1 + i * width))
    return growth, 1 + rounds * width


def _how(**changes: Any) -> dict[str, Any]:
    return {"config": Config(**changes), "interpret": interpreted()}


def _label(spec: Spec, **more: Any) -> dict[str, Any]:
    return {"nodes": spec.expand, "rank": spec.rank, "pool": spec.pool, **more}


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _gathered(spec: Spec, inputs: tuple) -> int:
    """Bytes of table rows that one expansion reads: a pool a node, and the nodes' own."""
    return spec.expand * (spec.pool + 1) * spec.rank * inputs[2].table.dtype.itemsize


def _expansion(spec: Spec, inputs: tuple, growth: Growth, start: int, sweep: bool) -> Case:
    _, pools, weights, *_ = inputs
    sizes = {"width": spec.expand, "depths": spec.depths}

    def call(module, how, token, growth, weights, pools):
        row = start + token.astype(jnp.int32)
        growth, nodes = module.take(growth, weights, row, **sizes, **how)
        growth = module.expand(growth, nodes, weights, pools, row, activation=spec.activation,
                               **how)  # fmt: skip
        return growth, nodes.depth

    candidates = [
        Candidate(kind="pallas", call=functools.partial(call, pallas, _how())),
        Candidate(kind="xla", call=functools.partial(call, xla, {})),
    ]
    if sweep:
        candidates += [
            Candidate(kind="pallas", call=functools.partial(call, pallas, _how(**c)), note=str(c))
            for c in ({"project_bytes": 32768}, {"project_columns": 256, "project_stages": 3})
        ]

    def error(outputs) -> float:
        return path_error(inputs, _with_offers(outputs[0], start, spec.expand), spec.activation)

    return Case(
        label=_label(spec),
        sets=[(growth, weights, pools)] * 4,  # parameters stay the same from round to round
        candidates=candidates,
        error=error,
        tolerance=0.05,
        bytes=_bytes(weights.blocks) + _gathered(spec, inputs),
        carried=1,
    )


def _with_offers(growth: Growth, start: int, width: int) -> GrownTree:
    """The tree below row `start + width`, with what its last nodes offer as further nodes."""
    rows, last = slice(0, start + width), slice(start, start + width)
    offers = [np.asarray(getattr(growth, f"offered_{name}")[last]).reshape(-1)
              for name in ("token", "score", "logprob", "rank")]  # fmt: skip
    token, total, logprob, rank = offers
    parent = np.repeat(np.arange(start, start + width), growth.offered_score.shape[1])
    depth = np.asarray(growth.depth)[parent] + 1
    new = (token, parent, depth, total, logprob, rank, total > -np.inf)
    old = (growth.token, growth.parent, growth.depth, growth.score, growth.logprob, growth.rank,
           growth.score > -jnp.inf)  # fmt: skip
    pairs = zip(old, new, strict=True)
    return GrownTree(*(jnp.asarray(np.concatenate([np.asarray(x)[rows], y])) for x, y in pairs))


def _growth(spec: Spec, inputs: tuple) -> Case:
    def call(implementation, token, root, *rest):
        root = root + token.astype(jnp.int32)
        return tuple(weaver_grow(root, *rest, **spec.options, implementation=implementation))

    return Case(
        label=_label(spec, part="growth", nodes=spec.budget),
        sets=[inputs] * 2,
        candidates=[
            Candidate(kind=kind, call=functools.partial(call, kind)) for kind in ("pallas", "xla")
        ],
        error=lambda tree: path_error(inputs, GrownTree(*tree), spec.activation),
        tolerance=0.05,
        # Every round reads all parameters, and a pool for each of its nodes.
        bytes=spec.rows // spec.expand * (_bytes(inputs[2].blocks) + _gathered(spec, inputs)),
        calls=16,
    )


def _projections(spec: Spec, inputs: tuple, sweep: bool) -> list[Case]:
    block = inputs[2].blocks[0]
    rng = np.random.default_rng(0)
    configs: list[dict[str, Any]] = [{}]
    if sweep:
        configs += [
            {"project_bytes": 32768},
            {"project_warps": 4},
            {"project_columns": 256, "project_stages": 3},
        ]

    def make(name: str, residual: bool, activation) -> Case:
        projection = getattr(block, name)
        outer, inner = projection.weight.shape
        x, y = (
            jnp.asarray(rng.standard_normal((spec.expand, n)), projection.weight.dtype)
            for n in (inner, outer)
        )
        arrays = (x, projection, y if residual else None)

        def call(function, token, x, projection, residual):
            x = x + token.astype(x.dtype)
            return (function(x, projection, activation=activation, residual=residual),)

        return _part(
            spec,
            name,
            sets=[
                jax.tree.map(functools.partial(jnp.roll, shift=i, axis=-1), arrays)
                for i in range(2 + int(_CACHE / _bytes(projection)))
            ],
            call=call,
            exact=xla.project,
            kernels=[
                (str(c or ""), functools.partial(_kernel, project, **_how(**c))) for c in configs
            ]
            if projection.norm is None
            else [],
            bytes_=_bytes(arrays) + y.nbytes,
        )

    def _kernel(project, x, projection, *, activation, residual, **how):
        return project(x, projection, residual=residual, **how)

    return [
        make("qkv", False, None),
        make("out", True, None),
        make("up", False, spec.activation),
        make("down", True, None),
    ]


def _others(spec: Spec, inputs: tuple, growth: Growth, start: int, sweep: bool) -> list[Case]:
    _, pools, weights, *_ = inputs
    dtype = weights.table.dtype
    rng = np.random.default_rng(1)
    width = spec.expand
    depth = jnp.asarray(rng.integers(2, 6, width), jnp.int32)
    x, qkv = (jnp.asarray(rng.standard_normal((width, n * spec.rank)), dtype) for n in (1, 3))
    logits = jnp.asarray(3 * rng.standard_normal((width, spec.pool)), jnp.float32)
    nodes = Nodes(x, depth, -jnp.ones((width,), jnp.float32))

    def swept(function, *changes: dict[str, Any]) -> list[tuple[str, Callable]]:
        configs = [{}, *(changes if sweep else ())]
        return [(str(c or ""), functools.partial(function, **_how(**c))) for c in configs]

    def call_attend(function, token, key, value, qkv, growth):
        row = start + token.astype(jnp.int32)
        mixed, key, value = function(qkv, depth, key, value, growth, row, weights.rotation)
        return key, value, mixed

    def call_score(function, token, x, pools, weights):
        return (function(x + token.astype(x.dtype), depth, weights, pools),)

    def score_kernel(x, depth, weights, pools, **how):
        return score(x, depth, weights.head, weights.out_norm, pools, **how)

    def call_offer(function, token, growth, logits, nodes, pools):
        growth = function(growth, nodes, logits + token, pools, jnp.int32(start))
        return growth, logits

    def call_take(function, token, growth, weights):
        growth, nodes = function(growth, weights, start + token.astype(jnp.int32))
        return growth, nodes.x

    sizes = {"width": width, "depths": spec.depths}
    part = functools.partial(_part, spec)
    seen = spec.depths + 1 + start
    row_bytes = spec.rank * dtype.itemsize
    return [
        part(
            "attend",
            sets=[(growth.key[0], growth.value[0], qkv, growth)] * 2,
            call=call_attend,
            exact=xla.attend,
            kernels=swept(attend, {"attend_warps": 4}, {"attend_warps": 16}),
            bytes_=2 * seen * row_bytes + 6 * width * row_bytes,
            carried=2,
        ),
        part(
            "score",
            sets=[
                (x, make_pools(spec, np.random.default_rng(seed)), weights) for seed in range(16)
            ],
            call=call_score,
            exact=xla.score,
            kernels=swept(
                score_kernel, {"score_bytes": 32768}, {"score_bytes": 32768, "score_warps": 4}
            ),
            bytes_=_gathered(spec, inputs),
        ),
        part(
            "offer",
            sets=[(growth, logits, nodes, pools)] * 2,
            call=call_offer,
            exact=xla.offer,
            pick=lambda outputs: outputs[0].offered_logprob[start : start + width],
            kernels=swept(
                frontier.offer, {"offer_block": 16}, {"offer_block": 64}, {"offer_warps": 4}
            ),
            bytes_=3 * logits.nbytes,
            carried=1,
        ),
        part(
            "take",
            sets=[(growth, weights)] * 2,
            call=call_take,
            exact=functools.partial(xla.take, **sizes),
            kernels=swept(
                functools.partial(pallas.take, **sizes),
                {"take_warps": 1},
                {"take_warps": 2},
                {"take_warps": 8},
            ),
            bytes_=2 * width * row_bytes,
            carried=1,
        ),
    ]


def _part(
    spec: Spec,
    name: str,
    *,
    sets: list[tuple],
    call: Callable,
    exact: Callable,
    kernels: list[tuple[str, Callable]],
    bytes_: int,
    carried: int = 0,
    pick: Callable = lambda outputs: outputs[-1],
) -> Case:
    """One launch against the same piece by XLA; exact is what XLA gives in float32."""

    def error(outputs) -> float:
        def widen(x):
            return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

        @jax.jit
        def run(inputs):
            return pick(call(exact, jnp.float32(0), *jax.tree.map(widen, inputs)))

        return relative_error(pick(outputs), np.asarray(run(sets[0]), np.float64))

    return Case(
        label=_label(spec, part=name),
        sets=sets,
        candidates=[
            *(
                Candidate(kind="pallas", call=functools.partial(call, kernel), note=note)
                for note, kernel in kernels
            ),
            Candidate(kind="xla", call=functools.partial(call, exact)),
        ],
        error=error,
        tolerance=1e-2,
        bytes=bytes_,
        carried=carried,
    )
