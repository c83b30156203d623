"""Times the kernels against what a user could use instead, on the machine's GPU.

    python -m experiments.kernels [--sweep] [--nodes 16 32 64 128] [--out DIR]

Every candidate first passes a correctness gate on the timed inputs; its error is part of the
table. `--sweep` times a list of kernel configurations instead of the default one. Without a GPU the
same steps run interpreted on tiny shapes and no time is reported.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import subprocess
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import compile_chain, measure
from pallas_kernels.gdn_tree import TreeTopology, pallas, per_branch, specs, tree_topology, xla

SETS = 16  # input sets in rotation; together beyond the 50 MB cache of a Hopper GPU
ROUNDS = 10
COMPILE_SECONDS = 75
RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to verify a tree; `call(token, q, k, v, g, beta, s0, parents, topology)`."""

    name: str
    nodes: int
    call: Callable


def with_token(topology: TreeTopology, token: jax.Array) -> TreeTopology:
    return dataclasses.replace(topology, depth=topology.depth + token.astype(jnp.int32))


def call_pallas(config, token, q, k, v, g, beta, s0, parents, topology):
    interpret = jax.default_backend() == "cpu"
    topology = with_token(topology, token)
    return pallas.verify(q, k, v, g, beta, s0, topology, config=config, interpret=interpret)


def call_xla(token, q, k, v, g, beta, s0, parents, topology):
    return xla.verify(q, k, v, g, beta, s0, with_token(topology, token))


def call_per_branch(block_v, token, q, k, v, g, beta, s0, parents, topology):
    interpret = jax.default_backend() == "cpu"
    parents = parents + token.astype(jnp.int32)
    return per_branch.verify(q, k, v, g, beta, s0, parents, block_v=block_v, interpret=interpret)


def call_nothing(token, q, k, v, g, beta, s0, parents, topology):
    """The chain's own cost per call: one small kernel that carries the order."""
    return (parents + token.astype(jnp.int32),)


def list_candidates(nodes: int, value_dim: int, key_dim: int, sweep: bool) -> list[Candidate]:
    def kernel(config):
        name = (
            f"n{config.block_n} v{config.block_v} k{config.block_k} w{config.num_warps} "
            f"prep{config.prepare_warps} {config.read}/{config.solve}"
        )
        call = functools.partial(call_pallas, config)
        return Candidate(name=f"pallas {name}", nodes=nodes, call=call)

    default = pallas.default_config(nodes, key_dim, value_dim)
    configs = [default]
    if sweep:
        configs += [c for c in sweep_configs(nodes) if c != default]
    widths = (32, 64) if sweep and nodes == 128 else (min(32, value_dim),)
    return [
        Candidate(name="nothing", nodes=nodes, call=call_nothing),
        *map(kernel, configs),
        Candidate(name="xla", nodes=nodes, call=call_xla),
        *(
            Candidate(
                name=f"per-branch v{width}",
                nodes=nodes,
                call=functools.partial(call_per_branch, width),
            )
            for width in widths
        ),
    ]


def sweep_configs(nodes: int) -> list[pallas.Config]:
    make = functools.partial(pallas.Config)
    if nodes == 16:
        shapes = [(16, 32, 32, 4, 0), (16, 64, 64, 4, 0), (16, 32, 64, 2, 0), (16, 64, 32, 4, 0),
                  (16, 16, 64, 1, 0), (16, 32, 64, 4, 4), (64, 32, 64, 4, 0)]  # fmt: skip
    elif nodes == 32:
        shapes = [(32, 32, 32, 4, 0), (32, 64, 32, 4, 0), (32, 32, 32, 2, 0), (32, 32, 64, 8, 0),
                  (32, 32, 64, 4, 4), (16, 32, 32, 4, 0), (64, 32, 64, 4, 0)]  # fmt: skip
    elif nodes == 64:
        shapes = [(64, 32, 64, 4, 0), (64, 64, 64, 4, 0), (64, 64, 64, 8, 0), (64, 64, 64, 4, 4),
                  (64, 32, 64, 4, 8), (64, 32, 128, 4, 4), (32, 32, 64, 4, 4)]  # fmt: skip
    else:
        shapes = [(64, 32, 64, 4, 4), (64, 32, 64, 4, 8), (64, 64, 64, 8, 8), (64, 64, 64, 4, 4),
                  (64, 32, 64, 4, 0), (64, 64, 64, 8, 0), (32, 32, 64, 4, 4)]  # fmt: skip
    configs = [
        make(block_n=n, block_v=v, block_k=k, num_warps=w, prepare_warps=p)
        for n, v, k, w, p in shapes
    ]
    best = configs[0] if nodes < 64 else configs[3 if nodes == 64 else 0]
    return [
        *configs,
        dataclasses.replace(best, solve="bf16x6"),
        dataclasses.replace(best, solve="bf16x3", read="bf16x3"),
    ]


def make_sets(spec: specs.Spec) -> tuple[list[tuple], np.ndarray]:
    """The input sets in rotation, bfloat16, and the exact output for the first."""
    inputs = specs.make_inputs(spec).rounded()
    expected = specs.solve(inputs).out
    *args, parents, valid = inputs.arguments(jnp.bfloat16)
    topology = jax.jit(tree_topology)(parents, valid)
    copies = [args] + [[jnp.roll(x, i, axis=-1) for x in args] for i in range(1, SETS)]
    return [(*copy, parents, topology) for copy in copies], expected


def gate(candidate: Candidate, sets: list[tuple], expected: np.ndarray) -> float:
    """Relative error of the output by norm; raises if it is not a result at all."""
    out = np.asarray(jax.jit(candidate.call)(jnp.float32(0), *sets[0])[0])
    error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
    if not error < 1e-3:
        raise ValueError(f"wrong result: relative error {error:.1e}")
    return error


def prepare(candidate: Candidate, sets: list[tuple], expected: np.ndarray) -> tuple:
    start = time.perf_counter()
    error = 0.0 if candidate.name == "nothing" else gate(candidate, sets, expected)
    compiled = compile_chain(candidate.call, sets, rounds=ROUNDS)
    return compiled, error, time.perf_counter() - start


def floor_us(spec: specs.Spec) -> float:
    """Time to move the layer's inputs and outputs once at 4.2 TB/s."""
    wide = spec.nodes * spec.value_heads * spec.value_dim
    keys = spec.nodes * spec.key_heads * spec.key_dim
    state = spec.value_heads * spec.key_dim * spec.value_dim
    return (4 * state + 2 * (2 * keys + wide) + 2 * 4 * wide) / 4.2e6


def time_gdn_tree(sizes: list[int], sweep: bool) -> list[dict]:
    """Compiles all candidates side by side, then times them one by one."""
    problems = {nodes: (specs.benchmark_spec(nodes), *make_sets(specs.benchmark_spec(nodes)))
                for nodes in sizes}  # fmt: skip
    pool = concurrent.futures.ThreadPoolExecutor(14)
    started = time.perf_counter()
    jobs = []
    for nodes, (spec, sets, expected) in problems.items():
        candidates = list_candidates(nodes, spec.value_dim, spec.key_dim, sweep)
        jobs += [(c, pool.submit(prepare, c, sets, expected)) for c in candidates]
    rows = {nodes: {"nodes": nodes, "floor_us": round(floor_us(problems[nodes][0]), 2)}
            for nodes in sizes}  # fmt: skip
    ready = []
    for candidate, job in jobs:
        left = COMPILE_SECONDS - (time.perf_counter() - started)
        try:
            ready.append((candidate, *job.result(max(left, 0.1))))
        except concurrent.futures.TimeoutError:
            print(f"{candidate.nodes:4} {candidate.name:44} not compiled in time", flush=True)
        except Exception as failure:
            print(f"{candidate.nodes:4} {candidate.name:44} {str(failure)[:90]}", flush=True)
    # Nothing may compile while something is timed.
    pool.shutdown(wait=True, cancel_futures=True)
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)

    overhead = {}
    for candidate, compiled, error, seconds in ready:
        nodes, sets = candidate.nodes, problems[candidate.nodes][1]
        timing = measure(compiled, sets, calls=SETS * ROUNDS)
        if candidate.name == "nothing":
            overhead[nodes] = timing.median_us
        net = timing.median_us - overhead[nodes]
        print(
            f"{nodes:4} {candidate.name:44} {net:7.1f} us  (raw {timing.median_us:.1f}, "
            f"{timing.low_us:.1f} to {timing.high_us:.1f})  error {error:.1e}  "
            f"compile {seconds:.0f} s",
            flush=True,
        )
        record(rows[nodes], candidate, net, timing, error)
    return list(rows.values())


def record(row: dict, candidate: Candidate, net: float, timing, error: float) -> None:
    """Keeps the fastest candidate of each kind in the row."""
    kind = candidate.name.split()[0].replace("-", "_")
    if kind == "nothing" or net >= row.get(f"{kind}_us", float("inf")):
        return
    row[f"{kind}_us"] = round(net, 2)
    row[f"{kind}_spread_us"] = [round(timing.low_us, 2), round(timing.high_us, 2)]
    row[f"{kind}_error"] = error
    if kind == "pallas":
        row |= {"error": error, "config": candidate.name.removeprefix("pallas ")}


def check_interpreted() -> list[dict]:
    """The same gate on a CPU, interpreted: says that the kernels are right, not how fast."""
    spec = specs.Spec(name="tiny", nodes=17, tree="spine", max_depth=7, value_heads=2)
    sets, expected = make_sets(spec)
    row = {"nodes": spec.nodes, "timed": False}
    for candidate in list_candidates(spec.nodes, spec.value_dim, spec.key_dim, sweep=False)[1:]:
        error = gate(candidate, sets, expected)
        row[candidate.name.split()[0].replace("-", "_") + "_error"] = error
        print(f"{spec.nodes:4} {candidate.name:44} no timing (interpreted)  error {error:.1e}")
    return [row]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times the kernels.")
    parser.add_argument("--sweep", action="store_true", help="time many kernel configurations")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args(arguments)
    device = jax.devices()[0].device_kind
    on_gpu = jax.default_backend() == "gpu"
    rows = time_gdn_tree(options.nodes, options.sweep) if on_gpu else check_interpreted()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    report = {
        "device": device,
        "jax": jax.__version__,
        "commit": commit,
        "ops": {"gdn_tree": rows},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"kernels_{device.replace(' ', '_').lower()}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}", flush=True)


if __name__ == "__main__":
    main()
