"""The timing scripts run on a CPU, check results there, and say that they timed nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from refusals import refused

from experiments import ablation, acceptance, ceiling, kernels, step
from experiments.store import store
from experiments.timings.case import Candidate, Case
from pallas_kernels.benchmark import compile_chain

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="times on a GPU")


def test_kernels_are_checked_without_a_gpu(tmp_path, capsys):
    kernels.main(["--ops", "top_k", "--out", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "kernels_cpu.json").read_text())
    (row,) = report["ops"]["top_k"]
    assert row["timed"] is False
    assert (row["pallas_error"], row["xla_error"]) == (0, 0)
    assert not any(name.endswith("_us") for name in row)


def test_a_stop_loses_only_what_was_not_timed(monkeypatch):
    """Each operation is kept before the next one is timed."""

    def cases(name):
        candidate = Candidate(kind="pallas", call=lambda token, x: (x + token,))
        return [
            Case(
                label={"case": name},
                sets=[(jnp.ones(3),)],
                candidates=[candidate],
                error=lambda results: 0.0,
                tolerance=1e-6,
                bytes=24,
            )
        ]

    loaded = lambda name: SimpleNamespace(cases=lambda tiny, sweep: cases(name))
    monkeypatch.setattr(kernels, "load", loaded)
    monkeypatch.setattr(kernels, "read_rate", lambda: 1e9)
    monkeypatch.setattr(kernels, "matrix_rate", lambda: 1e12)
    kept = []

    def keep(report, rates):
        kept.append({op: [dict(row.found) for row in rows] for op, rows in report.items()})

    ops = ["top_k", "add_norm", "commit"]
    report, rates = kernels.time_ops(ops, sweep=False, patience=60, keep=keep)
    assert rates == {"read_bandwidth_gbs": 1, "matrix_tflops": 1}
    assert [list(one) for one in kept] == [["top_k"], ["top_k", "add_norm"]]
    assert all("pallas_us" in rows[0] for one in kept for rows in one.values())
    assert list(report) == ops


def test_rows_are_stored_a_line_each(tmp_path):
    result = {"setting": {"a": [1, 2]}, "ops": {"x": [{"n": 1}, {"n": 2}], "y": []}, "rows": []}
    store(tmp_path / "r.json", result)
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text) == result
    assert [line.strip() for line in text.splitlines()][4:6] == ['{"n": 1},', '{"n": 2}']
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]


def test_a_wrong_candidate_does_not_pass_the_gate():
    case = Case(
        label={},
        sets=[(jnp.ones(3),)],
        candidates=[],
        error=lambda results: float(abs(results[0] - 1).max()),
        tolerance=1e-6,
        bytes=0,
    )
    assert kernels.gate(case, Candidate(kind="pallas", call=lambda token, x: (x + token,))) == 0
    with pytest.raises(ValueError, match="wrong result: error"):
        kernels.gate(case, Candidate(kind="pallas", call=lambda token, x: (2 * x,)))


def test_a_chain_updates_in_place_what_it_carries():
    def call(token, total, x):
        return total + x, (total + token).sum()

    chain = compile_chain(call, [(jnp.zeros(2), jnp.ones(2))], rounds=3, carried=1)
    _, ((total,),) = chain.program([(jnp.zeros(2),)], [(jnp.ones(2),)])
    assert total.tolist() == [3, 3]
    assert chain.calls == 3
    assert chain.measure(2).median_us > 0


@pytest.mark.slow
def test_rounds_are_timed_by_phase(tmp_path, tiny_preset, monkeypatch, capsys):
    monkeypatch.setattr(step, "ROUNDS", 2)
    arguments = [
        "--preset",
        str(tiny_preset),
        "--budgets",
        "4",
        "--contexts",
        "32",
        "--prefill",
        "40",
    ]
    step.main([*arguments, "--out", str(tmp_path)])
    report = json.loads((tmp_path / "step_cpu.json").read_text())
    assert report["timed"] is False
    methods = {row["method"]: row for row in report["rounds"]}
    assert set(methods) == {"ar", "dflash", "ddtree", "tfm"}
    assert methods["ar"]["ratio_to_ar"] == 1
    assert set(methods["tfm"]["phases_ms"]) == {"draft", "grow", "verify", "accept+commit"}
    shown = capsys.readouterr().out
    assert "breaks even" in shown
    assert all(method in shown for method in methods)


def test_the_floor_counts_what_plain_decoding_reads(tiny_trio):
    bench = step.Bench(trio=tiny_trio)
    a_row = 2 * 2 * 24 * 4  # keys and values of the one attention layer, float32
    assert step.floor_bytes(bench, 11) - step.floor_bytes(bench, 10) == a_row
    weights = sum(x.nbytes for x in jax.tree.leaves(tiny_trio.verifier))
    embedding = 83 * 40 * 4  # one row of it is read a token
    state = 2 * (6 * 12 * 20 + 3 * tiny_trio.verifier.config.conv_dim) * 4
    assert step.floor_bytes(bench, 0) == weights - embedding + state


@pytest.mark.parametrize(
    ("main", "options", "message"),
    [
        (step.main, ["--budgets", "0"], "budgets must be at least 1, got 0"),
        (step.main, ["--preset", "nope"], "nope"),
        (step.main, ["--accepted", "nan"], "accepted must be positive and finite, got nan"),
        (ablation.main, ["--count", "0"], "count must be at least 1, got 0"),
        (ablation.main, ["--new-tokens", "0"], "new_tokens must be at least 1, got 0"),
        (ceiling.main, ["--temperatures", "nan"], "temperature must be finite"),
        (ceiling.main, ["--anchors", "0"], "anchors must be at least 1, got 0"),
    ],
)
def test_numbers_that_no_run_could_have(main, options, message, tmp_path, capsys):
    with refused(capsys, message):
        main([*options, "--out", str(tmp_path / "out")])


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    for main, place, message in (
        (kernels.main, file, "file"),
        (step.main, file, "file"),
        (ablation.main, tmp_path, "the result is a file"),
        (ceiling.main, file / "out.json", "file"),
    ):
        with refused(capsys, message):
            main(["--out", str(place)])
    with pytest.raises(IsADirectoryError, match="the result is a file"):
        acceptance.main(out=tmp_path)
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


def test_acceptance_of_no_prompts_is_refused():
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        acceptance.measure(None, count=0)
