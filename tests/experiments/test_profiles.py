"""What a profile says, from events whose times are known."""

import argparse

import pytest

from experiments import profiles, step
from experiments.report import step_table

# Nanoseconds. Two kernels overlap, one runs within another, and 500 pass before the last one.
EVENTS = [
    (1000.0, 3000.0, "multiply"),
    (2000.0, 4000.0, "copy"),
    (2500.0, 2600.0, "copy"),
    (4500.0, 5000.0, "multiply"),
]


def test_time_is_counted_once_where_kernels_overlap(tmp_path):
    assert profiles.busy(EVENTS) == (3500.0, 4)
    with pytest.raises(ValueError, match="holds no device events"):
        profiles.kernels(tmp_path)


def test_kinds_know_how_long_they_run_and_what_was_waited_for():
    multiply, copy = sorted(profiles.by_name(EVENTS), key=lambda kind: kind.name, reverse=True)
    assert (multiply.us, multiply.idle_us, multiply.count) == (2.5, 0.5, 2)
    assert (copy.us, copy.idle_us, copy.count) == (2.1, 0.0, 2)
    assert [kind.name for kind in profiles.by_name(EVENTS)] == ["multiply", "copy"]


def test_idle_shares_are_told_where_rounds_were_profiled():
    rows = [
        {"method": "ar", "budget": 0, "context": 8, "round_ms": 2.0, "ratio_to_ar": 1.0},
        {"method": "tfm", "budget": 4, "context": 8, "round_ms": 3.0, "ratio_to_ar": 1.5},
    ]
    names = ("preset", "dtype", "device", "jax", "commit")
    result = dict.fromkeys(names, "some") | {"rounds": rows, "prefill": []}
    result |= {"ar_ms": 2.0, "floor_ms": 1.6, "read_bandwidth_gbs": 4000.0}
    assert "No kernel runs" not in step_table(result)
    rows[1]["idle_share"] = 0.055
    assert "No kernel runs in 5.5% of `tfm`" in step_table(result)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("contexts", 0, "contexts must be at least 1, got 0"),
        ("budgets", -5, "budgets must be at least 1, got -5"),
        ("budgets", 2000, "budget must be at most 1024, got 2000"),
        ("prefill", 0, "prefill must be at least 1"),
        ("accepted", float("nan"), "accepted must be positive and finite, got nan"),
        ("accepted", 0.0, "accepted must be positive and finite, got 0"),
    ],
)
def test_numbers_that_no_measurement_could_have_are_refused(name, value, message):
    given = {"preset": "pocket", "contexts": [8], "budgets": [4], "prefill": [9], "accepted": [2.0]}
    options = argparse.Namespace(**{**given, name: [value]})
    with pytest.raises(ValueError, match=message):
        step.check_options(options)
