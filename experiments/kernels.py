"""Times every kernel against what a user could use instead, in one run on one device.

    python -m experiments.kernels [--ops gdn_tree top_k] [--sweep] [--out DIR]

Every candidate first passes a correctness gate on the timed inputs; its error is part of the
report. Floors come from the read bandwidth and the matrix rate measured in the same run: a large
sum, which some products read a few percent faster. What failed, or took too long to compile, is
named in its row. `--sweep` adds kernel configurations. Without a GPU the gates run interpreted on
tiny shapes and no time is reported. Writes `kernels_<device>.json`, which `python -m
experiments.figures` draws.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from experiments.checkout import commit_id
from experiments.options import refusing
from experiments.progress import log
from experiments.store import device_file, store
from experiments.timings.case import Candidate, Case
from pallas_kernels.benchmark import Chain, Timing, compile_chain
from tfm_jax.files import check_new_file
from tfm_jax.training.arithmetic import matrix_rate

OPS = (
    "gdn_tree",
    "gdn_inputs",
    "add_norm",
    "skinny_matmul",
    "commit",
    "attention_inputs",
    "tree_attention",
    "top_k",
    "weaver_step",
)
RESULTS = pathlib.Path(__file__).parent / "results"
# What a chain does beside its calls: it has one small kernel a call that carries the order.
NOTHING = Candidate(kind="nothing", call=lambda token, *_: (token[None],))


def read_rate() -> float:
    """Bytes per second of a large read-only sum."""
    sets = [(jnp.full((1 << 30,), i, jnp.bfloat16),) for i in range(2)]
    total = lambda token, x: (jnp.sum(x, dtype=jnp.float32, keepdims=True) + token,)
    timing = compile_chain(total, sets, rounds=4).measure()
    return sets[0][0].nbytes / (timing.median_us * 1e-6)


class WrongResultError(ValueError):
    """A candidate's results are not those that were asked for."""


def gate(case: Case, candidate: Candidate) -> float:
    """The candidate's error; raises `WrongResultError` where it is no result at all."""
    copy = functools.partial(jax.tree.map, jnp.copy)
    copies = [copy(x) if i < case.carried else x for i, x in enumerate(case.sets[0])]
    error = case.error(jax.jit(candidate.call)(jnp.float32(0), *copies))
    if not error <= case.tolerance:
        raise WrongResultError(
            f"wrong result: error {error:.1e}, at most {case.tolerance:.0e} allowed"
        )
    return error


def prepare(case: Case, candidate: Candidate) -> tuple[Chain, float, float]:
    """The gated candidate as a program to time, its error, and the seconds this took."""
    start = time.perf_counter()
    error = 0.0 if candidate is NOTHING else gate(case, candidate)
    rounds = math.ceil(case.calls / len(case.sets))
    carried = 0 if candidate is NOTHING else case.carried
    chain = compile_chain(candidate.call, case.sets, rounds=rounds, carried=carried)
    return chain, error, time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Row:
    """One case of the report: what names it, and what was found."""

    label: dict[str, Any]
    found: dict[str, Any]


Report = dict[str, list[Row]]
Rates = dict[str, float]


def time_ops(
    ops: list[str], sweep: bool, patience: float, keep: Callable[[Report, Rates], None]
) -> tuple[Report, Rates]:
    """Compiles all candidates side by side, then times them one by one; also the card's rates.

    What fails, or has not been compiled after `patience` seconds, is named in its row under
    `<kind>_failed`. Before each further operation `keep` is called with those that are done.
    """
    started = time.perf_counter()
    pool = concurrent.futures.ThreadPoolExecutor(max((os.cpu_count() or 1) - 2, 2))
    cases = []
    report: Report = {op: [] for op in ops}
    # Exact results are work for the host: all operations at once.
    made = {op: pool.submit(load(op).cases, tiny=False, sweep=sweep) for op in ops}
    for op in ops:
        for case in made[op].result():
            row = Row(case.label, {})
            report[op].append(row)
            cases.append((op, case, row))
        log(f"{op}: inputs made after {time.perf_counter() - started:.0f} s")
    started = time.perf_counter()
    wanted = [
        (op, case, row, candidate)
        for op, case, row in cases
        for candidate in (NOTHING, *case.candidates)
    ]
    urgency = [urgent(case, candidate) for _, case, _, candidate in wanted]
    first = sorted(range(len(wanted)), key=urgency.__getitem__)
    futures = {i: pool.submit(prepare, wanted[i][1], wanted[i][3]) for i in first}
    ready = []
    for i, (op, case, row, candidate) in enumerate(wanted):
        future = futures[i]
        left = patience - (time.perf_counter() - started)
        try:
            ready.append((op, case, row, candidate, *future.result(max(left, 0.1))))
        except TimeoutError:
            fail(op, row, candidate, f"not compiled after {patience:.0f} s")
        except Exception as failure:  # one candidate's failure must not lose the others
            fail(op, row, candidate, f"{type(failure).__name__}: {failure}")
    # Nothing may compile while something is timed.
    pool.shutdown(wait=True, cancel_futures=True)
    log(f"compiled in {time.perf_counter() - started:.0f} s")

    rates = {"read_bandwidth_gbs": read_rate() / 1e9, "matrix_tflops": matrix_rate() / 1e12}
    log(", ".join(f"{name} {value:.0f}" for name, value in rates.items()))
    overhead, done = 0.0, {}
    for op, case, row, candidate, chain, error, seconds in ready:
        if op not in done and done:
            keep(done, rates)
        done[op] = report[op]
        timing = chain.measure()
        if candidate is NOTHING:
            overhead = timing.median_us
            row.found.update(floors(case, rates))
            continue
        record(row.found, candidate, timing, overhead, error)
        log(
            f"{op:14} {describe(case.label):40} {candidate.kind:10} "
            f"{timing.median_us - overhead:9.1f} us ({timing.low_us - overhead:.1f} to "
            f"{timing.high_us - overhead:.1f})  floor {row.found['floor_us']:.1f}  "
            f"error {error:.1e}  compile {seconds:.0f} s  {candidate.note}"
        )
    return report, rates


def fail(op: str, row: Row, candidate: Candidate, why: str) -> None:
    """Keeps why a candidate has no time, and says it."""
    reason = " ".join(f"{candidate.note} {why}".split())[:300]
    row.found.setdefault(f"{candidate.kind}_failed", []).append(reason)
    log(f"{op} {describe(row.label)} {candidate.kind}: {reason}")


def wrong(report: Report) -> list[str]:
    """Which candidates did not pass the gate."""
    return [
        f"{op} {describe(row.label)} {name.removesuffix('_failed')}: {reason}"
        for op, rows in report.items()
        for row in rows
        for name, reasons in row.found.items()
        if name.endswith("_failed")
        for reason in reasons
        if WrongResultError.__name__ in reason
    ]


def urgent(case: Case, candidate: Candidate) -> int:
    """What to compile first, should time run out: defaults, rivals, other configurations."""
    if candidate is NOTHING or candidate is case.candidates[0]:
        return 0
    return 2 if candidate.kind == "pallas" else 1


def load(op: str):
    return importlib.import_module(f"experiments.timings.{op}")


def describe(label: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in label.items())


def floors(case: Case, rates: Rates) -> dict[str, float]:
    """Microseconds that the traffic and the arithmetic of a call take at the measured rates."""
    memory = case.bytes / (rates["read_bandwidth_gbs"] * 1e3)
    arithmetic = case.flops / (rates["matrix_tflops"] * 1e6)
    return {
        "memory_floor_us": round(memory, 2),
        "arithmetic_floor_us": round(arithmetic, 2),
        "floor_us": round(max(memory, arithmetic), 2),
    }


def record(
    row: dict[str, Any], candidate: Candidate, timing: Timing, overhead: float, error: float
) -> None:
    """Keeps the fastest candidate of each kind in the row, if it takes longer than the chain."""
    kind, net = candidate.kind, timing.median_us - overhead
    if net <= 0:
        lost = f"{candidate.note} hidden: a chain without the call takes {overhead:.1f} us".strip()
        row.setdefault(f"{kind}_failed", []).append(lost)
        return
    if net >= row.get(f"{kind}_us", math.inf):
        return
    row[f"{kind}_us"] = round(net, 2)
    row[f"{kind}_spread_us"] = [
        round(timing.low_us - overhead, 2),
        round(timing.high_us - overhead, 2),
    ]
    row[f"{kind}_error"] = error
    if candidate.note:
        row[f"{kind}_note"] = candidate.note
    if kind == "pallas":
        row |= {"error": error, "floor_share": round(row["floor_us"] / net, 3)}


def check_ops(ops: list[str]) -> Report:
    """The gates alone, interpreted: says that the kernels are right, not how fast they are."""
    report: Report = {op: [] for op in ops}
    for op in ops:
        for case in load(op).cases(tiny=True):
            row = Row(case.label, {"timed": False})
            report[op].append(row)
            for candidate in case.candidates:
                error = gate(case, candidate)
                row.found[f"{candidate.kind}_error"] = error
                log(
                    f"{op:14} {describe(case.label):40} {candidate.kind:10} no timing "
                    f"(interpreted)  error {error:.1e}"
                )
    return report


def show(report: Report, rates: Rates) -> None:
    """Prints one table an operation: times, ratios to the kernel, floor, error."""
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for op, rows in report.items():
        kinds = list(
            dict.fromkeys(
                name.rpartition("_")[0]
                for row in rows
                for name in row.found
                if name.endswith(("_error", "_failed"))
            )
        )
        times = [f"{kind}, us" for kind in kinds] if rates else []
        table = Table("case", *times, *["floor, us"] * bool(rates), "error", title=op)
        for row in rows:
            mine = row.found.get("pallas_us")
            error = row.found.get("pallas_error")
            cells = [describe(row.label)]
            if rates:
                cells += [cell(row.found, mine, kind) for kind in kinds]
                cells.append(f"{row.found.get('floor_us', math.nan):.1f}")
            table.add_row(*cells, "-" if error is None else f"{error:.0e}")
        console.print(table)


def cell(found: dict[str, Any], mine: float | None, kind: str) -> str:
    us = found.get(f"{kind}_us")
    if us is None:
        return "failed" if f"{kind}_failed" in found else "-"
    return f"{us:.1f}" if kind == "pallas" or not mine else f"{us:.1f} ({us / mine:.1f}x)"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times the kernels.")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="what to time")
    parser.add_argument("--sweep", action="store_true", help="time more kernel configurations")
    parser.add_argument(
        "--compile-seconds", type=float, default=120, help="leave out what takes longer to compile"
    )
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the report")
    parser.add_argument("--json", action="store_true", help="print the report instead of tables")
    options = parser.parse_args(arguments)
    device = jax.devices()[0].device_kind
    setting = {"device": device, "jax": jax.__version__, "commit": commit_id()}
    ops = [op for op in OPS if op in options.ops]
    path = device_file(options.out, "kernels")
    with refusing(parser):
        check_new_file(path)

    def result(found: Report, rates: Rates) -> dict[str, Any]:
        rows = {op: [row.label | row.found for row in rows] for op, rows in found.items()}
        return setting | {name: round(rate, 1) for name, rate in rates.items()} | {"ops": rows}

    def keep(found: Report, rates: Rates) -> None:
        store(path, result(found, rates))

    if jax.default_backend() == "gpu":
        found, rates = time_ops(ops, options.sweep, options.compile_seconds, keep)
    else:
        found, rates = check_ops(ops), {}
    keep(found, rates)
    if options.json:
        print(json.dumps(result(found, rates), indent=1))
    else:
        show(found, rates)
    log(f"written to {path}")
    if failed := wrong(found):
        sys.exit("wrong results:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
