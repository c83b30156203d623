"""Timed cases of `tree_attention`: one layer of Qwen3.6-27B over caches of many lengths."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.timings.case import Candidate, Case
from pallas_kernels.choice import interpreted
from pallas_kernels.tree_attention import hopper, mosaic, pallas, specs, xla

_CACHE = 60 * 10**6  # bytes, more than the last-level cache of a Hopper GPU
# Context and calls of a timed program: the longer the context, the slower a call.
_CALLS = {1024: 160, 8192: 80, 32768: 24, 131072: 12}
_SWEPT = (8192, 131072)
_LONG = 65536


def cases(*, tiny: bool, sweep: bool = False) -> list[Case]:
    """Returns the cases: 65 rows and one over four contexts; small ones if `tiny`."""
    if tiny:
        wanted = ("rising", "one_row")
        found = (spec for spec in specs.SMALL if spec.name in wanted)
        return [case for spec in found for case in _cases(spec, (spec.nodes,), 1, False)]
    made = []
    for context, calls in _CALLS.items():
        spec = specs.benchmark_spec(65, context)
        made += _cases(spec, (65, 1), calls, sweep and context in _SWEPT)
    # What a short context costs in a long cache.
    return made + _cases(specs.benchmark_spec(65, 1024, _LONG), (65,), _CALLS[1024], False)


def _cases(spec: specs.Spec, rows: tuple[int, ...], calls: int, sweep: bool) -> list[Case]:
    """Cases of one cache, read by the first rows of one tree."""
    inputs = specs.make_inputs(spec).rounded()
    exact = specs.solve(inputs)
    q, own_keys, own_values, visible, keys, values, length = inputs.arguments(jnp.bfloat16)
    read = 2 * spec.groups * spec.length * spec.size * 2
    shifts = range(max(2, -(-_CACHE // max(read, 1))) if calls > 1 else 1)
    caches = [(jnp.roll(keys, i, axis=-1), jnp.roll(values, i, axis=-1)) for i in shifts]
    made = []
    for n in rows:
        own = (q[:n], own_keys[:, :n], own_values[:, :n])
        heads = spec.groups * spec.ratio
        on_hopper = hopper.faster(own[0], keys, spec.window)
        label = {"rows": n, "context": spec.length}
        if spec.capacity >= 16 * spec.length:
            label["capacity"] = spec.capacity
        made.append(
            Case(
                label=label,
                sets=[(*own, *cache, length) for cache in caches],
                candidates=_candidates(spec, n, visible[:n, :n], sweep, on_hopper),
                # A row sees no later one, so the first rows come out as if they were alone.
                error=functools.partial(_error, exact=exact[:n]),
                tolerance=specs.TOLERANCE["bfloat16"],
                bytes=read + 4 * n * spec.size * (heads + spec.groups),
                flops=4 * n * heads * spec.size * spec.length,
                calls=calls,
            )
        )
    return made


def _error(result: tuple[jax.Array, ...], exact: np.ndarray) -> float:
    return specs.error(result[0], exact)


def _candidates(
    spec: specs.Spec, rows: int, visible: jax.Array, sweep: bool, on_hopper: bool
) -> list[Candidate]:
    """The kernel that `tree_attention` takes is "pallas"; where that is Hopper's, "triton" is also
    timed."""
    # The layers of a step share the tree, so what is made of it alone is made once: a constant.
    shared = {"visible": visible, "scale": spec.size**-0.5}

    def candidate(kind: str, attend: Callable, note: str = "") -> Candidate:
        return Candidate(
            kind=kind, call=functools.partial(_call, functools.partial(attend, **shared)), note=note
        )

    default = pallas.default_config(rows * spec.ratio, spec.size, jnp.dtype(jnp.bfloat16))
    configs = [default, *(_others(default) if sweep else ())]
    return [
        *([candidate("pallas", mosaic.attend, "mosaic")] if on_hopper else ()),
        *(
            candidate(
                "triton" if on_hopper else "pallas",
                functools.partial(pallas.attend, config=config, interpret=interpreted()),
                _describe(config),
            )
            for config in configs
        ),
        candidate("xla", xla.attend),
        candidate("dense", _dense),
    ]


def _call(
    attend: Callable,
    token: jax.Array,
    q: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
) -> tuple[jax.Array, ...]:
    length = length + token.astype(jnp.int32)
    out = attend(
        q=q, own_keys=own_keys, own_values=own_values, keys=keys, values=values, length=length
    )
    return (out,)


def _dense(
    q: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    visible: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """The plain form: scores of all rows with the whole capacity, masked."""
    nodes, heads, size = q.shape
    groups = keys.shape[0]
    ratio = heads // groups
    rows = q.reshape(nodes, groups, ratio, size).swapaxes(0, 1).reshape(groups, -1, size)
    past = jnp.arange(keys.shape[1]) < length
    values = jnp.where(past[:, None], values, 0)  # zero weights alone do not silence NaN
    parts = [(own_keys, own_values, jnp.repeat(visible, ratio, axis=0)), (keys, values, past)]
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = [
        jnp.where(seen, product("grd,gsd->grs", rows, k) * scale, -1e30) for k, _, seen in parts
    ]
    top = functools.reduce(jnp.maximum, (x.max(axis=-1, keepdims=True) for x in scores))
    weights = [
        jnp.where(seen, jnp.exp(x - top), 0.0) for x, (*_, seen) in zip(scores, parts, strict=True)
    ]
    total = sum(x.sum(axis=-1, keepdims=True) for x in weights)
    mixed = sum(
        product("grs,gsd->grd", x.astype(q.dtype), v)
        for x, (_, v, _) in zip(weights, parts, strict=True)
    )
    out = mixed / jnp.where(total > 0, total, 1.0)
    return out.reshape(groups, nodes, ratio, size).swapaxes(0, 1).reshape(q.shape).astype(q.dtype)


def _others(default: pallas.Config) -> list[pallas.Config]:
    """What a sweep compares the default with."""
    change = functools.partial(dataclasses.replace, default)
    if default.ahead:
        return [change(ahead=False), change(block_k=32, num_stages=4)]
    return [
        change(block_k=64, num_stages=3, programs=132),
        change(block_k=64, num_stages=2, programs=264),
    ]


def _describe(config: pallas.Config) -> str:
    ahead = " ahead" if config.ahead else ""
    return (
        f"q {config.block_q} k {config.block_k} stages {config.num_stages} "
        f"warps {config.num_warps} programs {config.programs}{ahead}"
    )
