"""Figures are drawn of whatever a report holds."""

from __future__ import annotations

import json

from experiments.figures import draw

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


def test_every_report_of_a_gpu_is_drawn(tmp_path):
    (tmp_path / "kernels_nvidia_h200.json").write_text(json.dumps(KERNELS))
    (tmp_path / "step_nvidia_h200.json").write_text(json.dumps(STEP))
    (tmp_path / "kernels_cpu.json").write_text("not read")
    drawn = {path.name: path.read_text() for path in draw(tmp_path)}
    assert set(drawn) == {"kernels_nvidia_h200.svg", "step_nvidia_h200.svg"}
    assert all(text.lstrip().startswith("<?xml") for text in drawn.values())
