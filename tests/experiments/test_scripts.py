"""The timing scripts run on a CPU, check results there, and say that they timed nothing."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from refusals import refused

from experiments import ablation, acceptance, ceiling, kernels, step
from experiments.checkout import commit_id
from experiments.store import store
from experiments.timings.case import Candidate, Case
from pallas_kernels.benchmark import Chain, Timing, compile_chain

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="times on a GPU")


@pytest.fixture
def slower(monkeypatch):
    """Every measurement takes longer than the one before it."""
    clock = itertools.count(1.0)

    def measure(_: Chain) -> Timing:
        us = next(clock)
        return Timing(median_us=us, low_us=us, high_us=us)

    monkeypatch.setattr(Chain, "measure", measure)


def test_kernels_are_checked_without_a_gpu(tmp_path, capsys):
    kernels.main(["--ops", "top_k", "--out", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "kernels_cpu.json").read_text())
    (row,) = report["ops"]["top_k"]
    assert row["timed"] is False
    assert (row["pallas_error"], row["xla_error"]) == (0, 0)
    assert not any(name.endswith("_us") for name in row)


@pytest.mark.usefixtures("slower")
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


@pytest.mark.usefixtures("slower")
def test_what_failed_is_named_in_its_row(monkeypatch, tmp_path, capsys):
    """A wrong result and one that does not compile; the program says so by its exit."""

    def broken(token, x):
        raise NotImplementedError("no such\nthing")

    calls = {
        "pallas": lambda token, x: (2 * x,),
        "xla": lambda token, x: (x + token,),
        "dense": broken,
    }
    case = Case(
        label={"case": 1},
        sets=[(jnp.ones(3),)],
        candidates=[Candidate(kind=kind, call=call) for kind, call in calls.items()],
        error=lambda results: float(abs(results[0] - 1).max()),
        tolerance=1e-6,
        bytes=24,
    )
    loaded = lambda name: SimpleNamespace(cases=lambda tiny, sweep: [case])
    monkeypatch.setattr(kernels, "load", loaded)
    monkeypatch.setattr(kernels, "read_rate", lambda: 1e9)
    monkeypatch.setattr(kernels, "matrix_rate", lambda: 1e12)
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "gpu")
    with pytest.raises(SystemExit) as stop:
        kernels.main(["--ops", "top_k", "--out", str(tmp_path)])
    assert "top_k case=1 pallas: WrongResultError: wrong result: error 1.0e+00" in str(stop.value)
    assert "dense" not in str(stop.value)
    (row,) = json.loads((tmp_path / "kernels_cpu.json").read_text())["ops"]["top_k"]
    assert row["dense_failed"] == ["NotImplementedError: no such thing"]
    assert "pallas_us" not in row
    assert "xla_us" in row
    assert capsys.readouterr().out.count("failed") == 2


def test_a_time_within_that_of_the_chain_is_no_time():
    row = {"floor_us": 1.0}
    candidate = Candidate(kind="pallas", call=lambda *_: (), note="warps 4")
    for median in (5.0, 2.0, 3.5):
        timing = Timing(median_us=median, low_us=median - 0.1, high_us=median + 0.1)
        kernels.record(row, candidate, timing, 2.0, 1e-3)
    assert row["pallas_us"] == 1.5
    assert row["pallas_failed"] == ["warps 4 hidden: a chain without the call takes 2.0 us"]


def test_no_commit_is_known_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert commit_id() == "unknown"


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
        (acceptance.main, ["--count", "0"], "count must be at least 1, got 0"),
        (acceptance.main, ["--budgets", "16", "0"], "budget"),
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
        (acceptance.main, tmp_path, "the result is a file"),
    ):
        with refused(capsys, message):
            main(["--out", str(place)])
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


def test_accepted_lengths_are_kept_row_by_row(tmp_path, capsys, monkeypatch):
    """Twelve tokens in 12, 6, 4 and 3 rounds; the last method's second text is another one."""
    rounds = {"ar": 12, "dflash": 6, "ddtree": 4, "tfm": 3}

    def generate(prompt, *, max_new_tokens, method, tree, sampling, end_tokens):
        tokens = [prompt[0], sampling.seed, *range(max_new_tokens - 2)]
        if method == "tfm" and sampling.seed == 1:
            tokens[-1] = 99
        count = rounds[method]
        stats = SimpleNamespace(emitted_tokens=12, rounds=count, decode_seconds=count / 4)
        return SimpleNamespace(tokens=tokens, stats=stats)

    verifier = SimpleNamespace(dtype=jnp.float32)
    model = SimpleNamespace(
        generate=generate,
        encode=lambda text: jnp.arange(20),
        trio=SimpleNamespace(verifier=verifier),
    )
    out, seen = tmp_path / "acceptance.json", []

    def watch(path, result):
        store(path, result)
        seen.append(len(json.loads(out.read_text())["rows"]))

    monkeypatch.setattr(acceptance, "store", watch)
    monkeypatch.setattr(acceptance.tfm_jax, "load", lambda name, dtype: model)
    options = {"--domains": "code", "--count": 2, "--new-tokens": 12, "--budgets": 8}
    acceptance.main(
        ["--json", *(str(x) for pair in options.items() for x in pair), "--out", str(out)]
    )
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(out.read_text())
    # Plain decoding once at each temperature, the others in each of three samplings.
    assert seen == list(range(1, 12))
    first = {row["method"]: row for row in result["rows"][:4]}
    assert [row["mean_accepted_length"] for row in first.values()] == [1, 2, 3, 4]
    assert (first["tfm"]["rounds"], first["tfm"]["round_ms"]) == (6, 250)
    assert first["tfm"]["tokens_per_second"] == 16
    assert [row["differing_prompts"] for row in first.values()] == [0, 0, 0, 1]
    assert first["tfm"]["identical"] is False
    assert result["macro"][3]["mean_accepted_length"] == 4
