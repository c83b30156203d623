"""Figures are drawn and tables written of whatever a report holds."""

from __future__ import annotations

import json

from experiments.figures import draw
from experiments.report import (
    DOCUMENTS,
    ablation_table,
    attention_table,
    budget_table,
    calibration_table,
    capacity_table,
    ceiling_table,
    context_table,
    entropy_table,
    filled,
    full_cost_table,
    headline,
    second_table,
    step_table,
    together_table,
    tree_solve_table,
)

KERNELS = {
    "device": "NVIDIA H200",
    "ops": {
        "gdn_tree": [
            {"nodes": n, "floor_us": 1.0, "pallas_us": n / 2, "xla_us": n, "per_branch_us": 2 * n}
            for n in (16, 65, 128)
        ]
    },
}
STEP = {
    "device": "NVIDIA H200",
    "preset": "qwen3.6-27b",
    "floor_ms": 12.0,
    "rounds": [
        {
            "method": method,
            "budget": budget,
            "context": 1024,
            "round_ms": 15.0,
            "phases_ms": {"verify": 13.0, "accept+commit": 0.2},
        }
        for method, budget in (("ar", 0), ("tfm", 64))
    ]
    + [{"method": "ar", "budget": 0, "context": 8192, "round_ms": 16.0}],
}

SETTING = {
    "model": "pocket",
    "dtype": "float32",
    "device": "NVIDIA H200",
    "jax": "0.11.2",
    "commit": "abc1234",
    "prompts": {"code": 20},
}
NAMES = ("marginal", "marginal_argmax", "oracle", "oracle_in_sample", "best", "best_in_sample")


def ceiling_row(depth: int, above: float) -> dict:
    values = dict.fromkeys((*NAMES, "weaver", "weaver_argmax"), 0.25)
    gain = {"mean": above, "ci95": [above - 0.01, above + 0.01]}
    return {
        "temperature": 1.0,
        "domain": "macro",
        "depth": depth,
        "acceptance": values,
        "ci95": {name: [0.2, 0.3] for name in values},
        "weaver_above": {"oracle_in_sample": gain, "best_in_sample": gain},
    }


CEILING = {
    "setting": {**SETTING, "samples": 128, "anchors": 4},
    # Above at depth 2, but not at 3: the claim starts after the last depth that fails.
    "samples": [
        {"temperature": 1.0, "samples": n}
        | {name: [x, x + 0.2] for name, x in zip(NAMES[2:], (0.1, 0.2, 0.3, 0.4), strict=True)}
        for n in (8, 16)
    ],
    "rows": [ceiling_row(d, above) for d, above in ((1, -0.2), (2, 0.1), (3, 0.005), (4, 0.1))],
}
ABLATION = {
    "setting": {**SETTING, "longest_prompt": 256, "new_tokens": 128},
    "rows": [
        {
            "temperature": temperature,
            "part": part,
            "name": name,
            "budget": 64,
            "pool": 512,
            "expand": 4,
            "children": 32,
            "depth": 15,
            "mean_accepted_length": length,
            "to_base": length / 4,
            "to_base_ci95": [length / 4 - 0.01, length / 4 + 0.01],
        }
        for temperature in (0.0, 1.0)
        for part, name, length in (("base", "base", 4.0), ("expand", "w = 8", 3.0))
    ],
}
FULL_COST = {
    "setting": {
        **SETTING,
        "trio": "pocket",
        "preset": "qwen3.6-27b",
        "commit": "abc",
        "longest_prompt": 256,
        "new_tokens": 128,
        "expand": "ceil(B / 16)",
        "children": 32,
        "pool": 512,
        "shared_noise": True,
        "checks": {},
    },
    "macro": [
        {
            "temperature": 0.0,
            "method": method,
            "budget": budget,
            "tokens_per_second": 80 * speedup,
            "mean_accepted_length": 1.1 * speedup,
            "round_ms": 13.0,
            "speedup": speedup,
        }
        for method, budget, speedup in (
            ("ar", 0, 1.0),
            ("dflash", 15, 2.5),
            ("tfm", 64, 4.0),
            ("tfm", 32, 3.0),
        )
    ],
    "differences": [],
}


def test_every_report_of_a_gpu_is_drawn(tmp_path):
    (tmp_path / "kernels_nvidia_h200.json").write_text(json.dumps(KERNELS))
    (tmp_path / "step_nvidia_h200.json").write_text(json.dumps(STEP))
    (tmp_path / "ceiling.json").write_text(json.dumps(CEILING))
    (tmp_path / "ablation.json").write_text(json.dumps(ABLATION))
    (tmp_path / "kernels_cpu.json").write_text("not read")
    drawn = {path.name: path.read_text() for path in draw(tmp_path)}
    names = ("kernels_nvidia_h200", "step_nvidia_h200", "ceiling", "ablation")
    assert set(drawn) == {f"{name}.svg" for name in names}
    assert all(text.lstrip().startswith("<?xml") for text in drawn.values())


def test_the_ceiling_is_claimed_from_where_it_holds_throughout():
    table = ceiling_table(CEILING)
    assert "| 1 | 0.25 | 0.25 | 0.25 to 0.25 | 0.25 to 0.25 | 0.25 | 0.25 |" in table
    assert "At T = 1 Weaver is above the marginal oracle from depth 4 on" in table
    assert "8: 0.200 to 0.300, 0.400 to 0.500; 16: 0.200" in table
    never = {**CEILING, "rows": [ceiling_row(d, -0.1) for d in (1, 2)]}
    assert "Weaver is above" not in ceiling_table(never)


def test_a_setting_has_a_line_with_all_temperatures():
    table = ablation_table(ABLATION)
    assert "| base | **4.00** | **4.00** |" in table
    change = "**3.00**, 75.0% (74.0% to 76.0%)"
    assert f"| w = 8 | {change} | {change} |" in table


def test_real_text_is_told_in_order_of_nodes_and_by_its_best_setting():
    table = full_cost_table(FULL_COST)
    nodes = [line.split("|")[3].strip() for line in table.splitlines() if line.startswith("| 0 ")]
    assert nodes == ["-", "15", "32", "64"]
    assert "4.00 times as fast as plain decoding and 60.0% faster than the chain" in table
    line = headline(FULL_COST)
    assert "B = 64) the pocket trio writes 320 tokens a second by `tfm`: 4.00 times plain" in line
    assert "1.60 times the chain" in line


def test_lines_of_a_second_run_are_marked_and_compared_with_its_own_run_alone():
    second = {**FULL_COST["macro"][2], "budget": 63, "speedup": 5.0, "run": 2}
    result = {**FULL_COST, "macro": [*FULL_COST["macro"], second]}
    assert "| **5.00** (2) |" in full_cost_table(result)
    line = headline(result)
    assert "B = 63)" in line
    assert "5.00 times plain decoding and, with B = 64 and in one run with it, 1.60 times" in line


def test_larger_weavers_stand_beside_the_trios_own():
    names = {"trio": "pocket", "prompts": "held back", "temperature": 0.0, "shared_noise": False}
    lengths = {"own": 6.0, "as it is": 6.25, "enlarged": 6.5}
    rows = [
        {**names, "method": "tfm", "weaver": weaver, "mean_accepted_length": length}
        | {"to_ddtree": length / 5, "to_ddtree_ci95": [1.0, 1.5]}
        for weaver, length in lengths.items()
    ]
    rows.append({**names, "method": "ddtree", "weaver": "own", "mean_accepted_length": 5.0})
    training = [
        {"run": "as it is", "parameters": 1264256, "blocks": 1, "inner": 384},
        {"run": "enlarged", "parameters": 3923072, "blocks": 2, "inner": 1536},
    ]
    learned = {"written": {"texts": 1234}, "optimiser": {"steps": 10}}
    setting = {**SETTING, "count": 4, "new_tokens": 8, "rounds": "replayed", "capacity": learned}
    result = {"setting": {"pocket": setting}, "training": training, "rows": rows}
    table = capacity_table(result)
    assert "| own: `tfm`, to `ddtree` | as it is, 1.3M: `tfm`, to" in table
    line = "| held back | 0 | 6.00, 1.20 (1.00 to 1.50) | 6.25, 1.25 (1.00 to 1.50) | 6.50, 1.30"
    assert line in table
    assert "2 blocks, 1536 inner units, against 1 and 384" in table


def test_ways_of_training_stand_below_the_pair_that_they_start_from():
    names = {"prompts": "evaluation", "temperature": 0.0, "shared_noise": False}
    ratios = {"to_dflash": 2.0, "to_ddtree": 1.25}
    ratios |= {f"{n}_ci95": [1.0, 3.0] for n in tuple(ratios)}
    rows = [
        {**names, **ratios, "trio": trio, "method": method, "mean_accepted_length": length + more}
        for trio, more in (("together", 1.0), ("own", 0.0))
        for method, length in (("dflash", 2), ("ddtree", 3), ("tfm", 5))
    ]
    run = {"trio": "together", "steps": 1234, "seconds": 9.4, "written": {"texts": 5678}}
    run |= {"tokens_per_second": 9e3, "share_of_matrix_rate": 0.14}
    setting = {"own": {**SETTING, "count": 4, "new_tokens": 8, "rounds": "replayed"}}
    table = together_table({"setting": setting, "training": [run], "rows": rows, "note": "Noted."})
    gains = "2.00 (1.00 to 3.00) | 1.25 (1.00 to 3.00) |"
    found = [row for row in table.splitlines() if row.startswith("| evaluation")]
    assert found == [
        f"| evaluation | 0 | as it was | 2.00 | 3.00 | **5.00** | {gains}",
        f"| evaluation | 0 | both together | 3.00 | 4.00 | **6.00** | {gains}",
    ]
    assert "both together 1,234 steps in 9 s along 5,678 texts, 9k tokens/s, 14% of the" in table
    assert table.endswith("Noted.")


def test_both_editions_stand_beside_each_other_and_gains_by_entropy():
    names = {"prompts": "held back", "temperature": 1.0, "shared_noise": True}

    def ratios(more: float) -> dict:
        found = {"to_dflash": 2.0 + more, "to_ddtree": 1.25 + more}
        return found | {f"{n}_ci95": [value - 0.5, value + 0.5] for n, value in found.items()}

    rows = [
        {**names, "trio": trio, "method": method, "mean_accepted_length": length} | ratios(more)
        for trio, more in (("first", 0.0), ("second", 1.0))
        for method, length in (("dflash", 2 + more), ("ddtree", 3 + more), ("tfm", 5 + more))
    ]
    texts = {"texts": 1234, "seconds": 99.0, "options": {"total": 256, "most_copied": 0.3}}
    rates = {"steps": 5, "seconds": 8, "tokens_per_second": 9e3, "share_of_matrix_rate": 0.07}
    networks = [
        {"trio": "second", "stage": "continuations", **texts},
        {"trio": "first", "stage": "continuations", "texts": 10, "tokens": 5120},
    ]
    networks += [
        {"trio": trio, "stage": stage, "tokens": millions * 10**6, **rates}
        for trio, millions in (("first", 70), ("second", 90))
        for stage in ("dflash", "weaver")
    ]
    own = {**SETTING, "count": 4, "new_tokens": 8, "rounds": "replayed"}
    groups = [
        {"trio": trio, "temperature": 1.0, "shared_noise": True, "texts": 7, "nats": nats}
        | {"nats_range": [nats, 0.75], "ddtree": 3.0, "tfm": length, "to_ddtree": length / 3}
        | {"to_ddtree_ci95": [1.0, 2.0]}
        for trio, length in (("first", 4.5), ("second", 6.0))
        for nats in (0.5, 0.25)
    ]
    result = {
        "setting": {"first": {**own, "count": 5}, "second": own},
        "note": "Noted.",
        "networks": networks,
        "rows": rows,
        "by_entropy": groups,
    }
    table = second_table(result)
    gains = "2.00 (1.50 to 2.50) | 1.25 (0.75 to 1.75) |"
    assert f"| held back | 1, shared noise | first | 2.00 | 3.00 | **5.00** | {gains}" in table
    gains = "3.00 (2.50 to 3.50) | 2.25 (1.75 to 2.75) |"
    assert f"| held back | 1, shared noise | second | 3.00 | 4.00 | **6.00** | {gains}" in table
    assert "1,234 texts of 256 tokens (the first from 10 of 512)" in table
    assert "Drafter and Weaver saw 90M (70M) and 90M (70M) tokens" in table
    assert "4 prompts of each domain and kind" in table
    table = entropy_table(result)
    own = "3.00, 4.50, **1.50** (1.00 to 2.00) | 3.00, 6.00, **2.00** (1.00 to 2.00) |"
    found = [row for row in table.splitlines() if row.startswith("| 1")]
    assert found == [
        f"| 1, shared noise | {nats:.2f} ({nats:.2f} to 0.75) | {own}" for nats in (0.25, 0.5)
    ]
    assert "5 prompts of each domain and kind" in table
    assert table.endswith("Noted.")


def test_heated_scores_stand_beside_a_methods_own():
    rows = [
        {"temperature": 1.0, "method": method, "score_temperature": heat}
        | {"mean_accepted_length": length * share, "to_base": share}
        for method, length in (("ddtree", 2.0), ("tfm", 4.0))
        for heat, share in ((1.0, 1.0), (1.5, 0.75), (0.5, 0.5))
    ]
    setting = {**SETTING, "prompts": {"code": 3}, "new_tokens": 8}
    table = calibration_table({"setting": setting, "rows": rows})
    assert "| T | method | x 0.5 | as it is | x 1.5 |" in table
    assert "| 1 | `tfm` | 2.00, 50.0% | 4.00 | 3.00, 75.0% |" in table
    assert "3 code prompts, 8 new tokens" in table


def test_no_kernel_is_said_to_beat_its_floor_by_what_a_chain_hides():
    case = {"nodes": 65, "xla_us": 9.0, "per_branch_us": 9.0, "error": 1e-7, "floor_us": 2.0}
    rates = {"read_bandwidth_gbs": 4000.0, "matrix_tflops": 700.0}
    ops = {"gdn_tree": [{**case, "pallas_us": 1.5}], "weaver_step": [{**case, "pallas_us": -0.5}]}
    assert "faster, by up to 25%." in tree_solve_table({**RUN, **rates, "ops": ops})


def test_documents_show_what_the_results_hold():
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        assert filled(text) == text, f"{document.name}: run `python -m experiments.report`"


RUN = {"device": "NVIDIA H200", "jax": "0.11.2", "commit": "abc1234", "read_bandwidth_gbs": 4100.0}


def test_rounds_stand_side_by_side_by_context():
    rounds = [
        {
            "method": "tfm" if budget else "ar",
            "budget": budget,
            "context": context,
            "round_ms": 10.0 + budget + context / 1024,
            "ratio_to_ar": 1.25,
        }
        for context in (8192, 1024)
        for budget in (0, 4, 2)
    ]
    rounds.append({**rounds[-1], "method": "dflash", "budget": 15})
    result = {
        **RUN,
        "preset": "pocket",
        "dtype": "bfloat16",
        "ar_ms": 11.0,
        "floor_ms": 10.0,
        "floors_ms": {"1024": 10.0, "8192": 12.5},
        "rounds": rounds,
        "prefill": [],
        "peak_memory_bytes": 83e9,
    }
    table = context_table(result)
    assert "| context | plain, ms | floor, ms | `tfm` 2, ms | `tfm` 4, ms |" in table
    assert "| 1024 | 11.00 | 10.00 | 13.00 (1.25x) | 15.00 (1.25x) |" in table
    assert "| 8192 | 18.00 | 12.50 | 20.00 (1.25x) | 22.00 (1.25x) |" in table
    assert "longest context: 83 GB" in table
    # The table by phase leaves them to this one.
    assert "| `tfm` | 2 | 1024 |" in step_table(result)
    assert "8192" not in step_table(result)


def test_the_kernel_for_long_caches_stands_beside_what_bounds_it():
    row = {
        "rows": 65,
        "memory_floor_us": 10.0,
        "arithmetic_floor_us": 20.0,
        "triton_us": 80.0,
        "pallas_note": "mosaic",
    }
    rows = [
        row | {"context": 1024, "pallas_us": 5.0, "pallas_note": "q 128"},
        row | {"context": 8192, "pallas_us": 40.0},
        row | {"context": 8192, "pallas_us": 50.0, "capacity": 65536},
    ]
    table = attention_table({**RUN, "matrix_tflops": 673.0, "ops": {"tree_attention": rows}})
    assert "| 8192 | 40.0 | 80.0 (2.0x) | 20.0 (2.0x) | 10.0 (4.0x) |" in table
    assert "| 8192, room for 65536 | 50.0 | 80.0 (1.6x) |" in table
    assert "1024" not in table
    del rows[1]["triton_us"]
    rows[1]["triton_failed"] = ["not compiled after 9 s"]
    failed = attention_table({**RUN, "matrix_tflops": 673.0, "ops": {"tree_attention": rows}})
    assert "| 8192 | 40.0 | not compiled after 9 s |" in failed


def test_accepted_lengths_stand_side_by_side_by_nodes():
    rows = [
        {
            "temperature": temperature,
            "shared_noise": shared,
            "method": method,
            "budget": budget,
            "mean_accepted_length": budget / 16 + temperature,
        }
        for temperature, shared in ((0.0, False), (1.0, True), (1.0, False))
        for method, budget in (("ar", 1), ("dflash", 15), ("tfm", 32), ("tfm", 16))
    ]
    names = ("expand", "longest_prompt", "new_tokens", "children", "pool", "prompt_form")
    setting = {**SETTING, **dict.fromkeys(names, 1)}
    table = budget_table({"setting": setting, "macro": rows, "rows": [{"identical": True}]})
    assert "| T | method | B = 16 | B = 32 |" in table
    assert "| 0 | `tfm` | 1.00 | 2.00 |" in table
    assert "| 1 | `tfm`, shared noise | 2.00 | 3.00 |" in table
    assert "| 1 | `tfm`, no shared noise | 2.00 | 3.00 |" in table
    assert "dflash" not in table
