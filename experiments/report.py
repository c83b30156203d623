"""Writes the measured tables of README.md and RESULTS.md from the files in `experiments/results/`.

python -m experiments.report
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DOCUMENTS = (Path(__file__).parents[1] / "README.md", Path(__file__).parent / "RESULTS.md")


def acceptance_table(result: dict[str, Any]) -> str:
    """Mean accepted length by domain, one line for each method and sampling setting."""
    rows = result["rows"]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    cells: dict[tuple, dict[str, float]] = {}
    for row in rows:
        key = (row["temperature"], row["shared_noise"], row["method"], row["budget"])
        cells.setdefault(key, {})[row["domain"]] = row["mean_accepted_length"]
    lines = [
        "Mean accepted length (tokens emitted / verification passes, bonus token included):",
        "",
        f"| T | method | drafted nodes | {' | '.join(domains)} | macro average |",
        f"| --- | --- | --- | {' | '.join('---' for _ in domains)} | --- |",
    ]
    for (temperature, shared, method, budget), by_domain in cells.items():
        if method == "ar":
            continue
        name = _method(method, temperature, shared)
        values = [by_domain[d] for d in domains]
        shown = " | ".join(f"{v:.2f}" for v in values)
        mean = sum(values) / len(values)
        lines.append(f"| {temperature:g} | {name} | {budget} | {shown} | **{mean:.2f}** |")
    lines += ["", *_gains(result["macro"]), "", _acceptance_setting(result)]
    return "\n".join(lines)


def budget_table(result: dict[str, Any]) -> str:
    """Mean accepted length by number of drafted nodes, macro average over domains."""
    trees = [row for row in result["macro"] if row["method"] in ("ddtree", "tfm")]
    budgets = sorted({row["budget"] for row in trees})
    found: dict[tuple, dict[int, float]] = {}
    for row in trees:
        key = (row["temperature"], row["shared_noise"], row["method"])
        found.setdefault(key, {})[row["budget"]] = row["mean_accepted_length"]
    lines = [
        "Mean accepted length by drafted nodes, macro average over domains:",
        "",
        f"| T | method | {' | '.join(f'B = {b}' for b in budgets)} |",
        f"| --- | --- |{' --- |' * len(budgets)}",
    ]
    lines += [
        f"| {temperature:g} | {_method(method, temperature, shared)} "
        f"| {' | '.join(f'{lengths[b]:.2f}' for b in budgets)} |"
        for (temperature, shared, method), lengths in found.items()
    ]
    return "\n".join([*lines, "", _acceptance_setting(result)])


def larger_table(result: dict[str, Any]) -> str:
    """Accepted length of the larger trio, what `tfm` gains there, and how it was trained."""
    setting = result["setting"]["larger"]
    networks = [row for row in result["networks"] if row["trio"] == "larger"]
    lines = [
        "| prompts | T | `dflash` | `ddtree` | `tfm` | to `dflash` | to `ddtree` |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (prompts, temperature, shared), own in _by_method(result["rows"], "larger").items():
        setting_cells = f"{prompts} | {temperature:g}{_noise(temperature, shared)}"
        lines.append(f"| {setting_cells} | {_gain_cells(own)} |")
    trained = {row["stage"]: row for row in networks if "share_of_matrix_rate" in row}
    sizes = [f"{row['parameters'] / 1e6:.1f}M ({stage})" for stage, row in trained.items()]
    rates = [
        f"{stage} {row['tokens_per_second'] / 1e3:.0f}k tokens/s, {row['tflops_per_second']:.0f} "
        f"TFLOP/s, {row['share_of_matrix_rate']:.0%} of the matrix rate measured in the same run"
        for stage, row in trained.items()
    ]
    minutes = sum(row["seconds"] for row in networks) / 60
    lines += [
        "",
        f"A trio of {', '.join(sizes)} parameters, trained from nothing in {minutes:.0f} minutes "
        f"on one {networks[0]['device']}; {setting['count']} prompts of each domain, "
        f"{setting['new_tokens']} new tokens, B = 64, macro average, 95% intervals paired by "
        f"prompt; {setting['rounds']} in {setting['dtype']}; jax {setting['jax']}, commit "
        f"{setting['commit']}. Held-back prompts are begun texts of the corpus that training left "
        f"out. Training speed: {'; '.join(rates)}. The trio is not in the package.",
    ]
    return "\n".join(lines)


def _by_method(rows: list[dict[str, Any]], trio: str) -> dict[tuple, dict[str, Any]]:
    """A trio's rows by setting, and then by method."""
    found: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        if row["trio"] == trio:
            key = (row["prompts"], row["temperature"], row["shared_noise"])
            found.setdefault(key, {})[row["method"]] = row
    return dict(sorted(found.items()))


def _gain_cells(own: dict[str, Any]) -> str:
    """Accepted lengths of the three methods, and what `tfm` gains over the others."""
    tfm = own["tfm"]
    means = [f"{own[method]['mean_accepted_length']:.2f}" for method in _BASES]
    gains = [f"{tfm[f'to_{x}']:.2f} ({_interval(tfm[f'to_{x}_ci95'])})" for x in _BASES]
    return " | ".join([*means, f"**{tfm['mean_accepted_length']:.2f}**", *gains])


def second_table(result: dict[str, Any]) -> str:
    """Both editions of the pocket trio's drafter and Weaver beside each other."""
    editions = {trio: _by_method(result["rows"], trio) for trio in ("first", "second")}
    lines = [
        "| prompts | T | edition | `dflash` | `ddtree` | `tfm` | to `dflash` | to `ddtree` |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {prompts} | {temperature:g}{_noise(temperature, shared)} | {trio} | "
        f"{_gain_cells(found[prompts, temperature, shared])} |"
        for prompts, temperature, shared in editions["first"]
        for trio, found in editions.items()
    ]
    stages = {row["stage"]: row for row in result["networks"] if row["trio"] == "second"}
    own = {row["stage"]: row for row in result["networks"] if row["trio"] == "first"}
    texts, trained = stages["continuations"], [stages[name] for name in ("dflash", "weaver")]
    rates = ", ".join(
        f"{row['stage']} {row['steps']:,} steps in {row['seconds']:.0f} s, "
        f"{row['tokens_per_second'] / 1e3:.0f}k tokens/s, {row['share_of_matrix_rate']:.0%} of the "
        "matrix rate"
        for row in trained
    )
    before, copied = own["continuations"], texts["options"].get("most_copied", 1.0)
    left_out = (
        f", without those of which more than {copied:.0%} repeats what the text said before"
        if copied < 1
        else ""
    )
    seen = " and ".join(
        f"{stages[name]['tokens'] / 1e6:.0f}M ({own[name]['tokens'] / 1e6:.0f}M)"
        for name in ("dflash", "weaver")
    )
    lines += [
        "",
        "One verifier, that of the package. The second edition learned from "
        f"{texts['texts']:,} texts of {texts['options']['total']} tokens (the first from "
        f"{before['texts']:,} of {before['tokens'] // before['texts']}), after prompts of a newer "
        f"build of the corpus{left_out}, written in {texts['seconds']:.0f} s: {rates}. Drafter and "
        f"Weaver saw {seen} tokens of them. Some held-back texts may not be new to the first "
        "edition, whose build of the corpus was cut elsewhere. "
        f"{_replayed(result['setting']['second'])}{_note(result)}",
    ]
    return "\n".join(lines)


_WAYS = {
    "own": "as it was",
    "variation": "Weaver alone, eta 3",
    "weaver": "Weaver alone",
    "together": "both together",
    "longer": "both together, longer",
}


def together_table(result: dict[str, Any]) -> str:
    """A pair before and after further training, of the Weaver alone or of both."""
    found = {name: _by_method(result["rows"], way) for way, name in _WAYS.items()}
    found = {name: rows for name, rows in found.items() if rows}
    lines = [
        "| prompts | T | pair | `dflash` | `ddtree` | `tfm` | to `dflash` | to `ddtree` |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {prompts} | {temperature:g}{_noise(temperature, shared)} | {name} | "
        f"{_gain_cells(rows[prompts, temperature, shared])} |"
        for prompts, temperature, shared in found["as it was"]
        for name, rows in found.items()
    ]
    runs = "; ".join(
        f"{_WAYS[run['trio']]} {run['steps']:,} steps in {run['seconds']:.0f} s along "
        f"{run['written']['texts']:,} texts, {run['tokens_per_second'] / 1e3:.0f}k tokens/s, "
        f"{run['share_of_matrix_rate']:.0%} of the matrix rate"
        for run in result["training"]
    )
    setting = _replayed(result["setting"]["own"])
    lines += ["", f"Pocket trio. Training: {runs}. {setting}{_note(result)}"]
    return "\n".join(lines)


def entropy_table(result: dict[str, Any]) -> str:
    """What `tfm` gains over DDTree by how predictable the verifier's texts are."""
    editions = [
        sorted(rows, key=lambda row: (row["temperature"], not row["shared_noise"], row["nats"]))
        for rows in (
            [row for row in result["by_entropy"] if row["trio"] == trio]
            for trio in ("first", "second")
        )
    ]
    lines = [
        "| T | verifier's entropy, nats a token | first: `ddtree`, `tfm`, to `ddtree` | second |",
        "| --- | --- | --- | --- |",
    ]
    for pair in zip(*editions, strict=True):
        row, cells = pair[0], []
        for found in pair:
            ratio = f"**{found['to_ddtree']:.2f}** ({_interval(found['to_ddtree_ci95'])})"
            cells.append(f"{found['ddtree']:.2f}, {found['tfm']:.2f}, {ratio}")
        lines.append(
            f"| {row['temperature']:g}{_noise(row['temperature'], row['shared_noise'])} | "
            f"{row['nats']:.2f} ({_interval(row['nats_range'])}) | {' | '.join(cells)} |"
        )
    rows = editions[0]
    lines += [
        "",
        "Both editions of the pocket trio, along the same texts: those after held-back and after "
        "evaluation prompts together, "
        f"ranked by the verifier's mean entropy along them, in groups of {rows[0]['texts']}; mean "
        f"over all rounds of a group. {_replayed(result['setting']['first'])}{_note(result)}",
    ]
    return "\n".join(lines)


def calibration_table(result: dict[str, Any]) -> str:
    """Accepted length with scores cooled and heated, as a share of that with a method's own."""
    setting, rows = result["setting"], result["rows"]
    heats = sorted({row["score_temperature"] for row in rows})
    found: dict[tuple, dict[float, dict[str, Any]]] = {}
    for row in rows:
        key = (row["temperature"], row["method"])
        found.setdefault(key, {})[row["score_temperature"]] = row
    titles = " | ".join("as it is" if heat == 1 else f"x {heat:g}" for heat in heats)
    lines = [f"| T | method | {titles} |", f"| --- | --- |{' --- |' * len(heats)}"]
    for (temperature, method), own in found.items():
        cells = [
            f"{own[heat]['mean_accepted_length']:.2f}"
            + (f", {own[heat]['to_base']:.1%}" if heat != 1 else "")
            for heat in heats
        ]
        lines.append(f"| {temperature:g} | `{method}` | {' | '.join(cells)} |")
    prompts = ", ".join(f"{count} {domain}" for domain, count in setting["prompts"].items())
    lines += [
        "",
        f"{_trio(setting)}, {setting['dtype']}, {setting['device']}, jax {setting['jax']}, commit "
        f"{setting['commit']}; {prompts} prompts, {setting['new_tokens']} new tokens, B = 64, "
        f"shared noise at T = 1; temperature of the scores, accepted length, and its share of that "
        f"with the method's own.{_note(result)}",
    ]
    return "\n".join(lines)


def _replayed(setting: dict[str, Any]) -> str:
    """How lengths were measured."""
    return (
        f"{setting['count']} prompts of each domain and kind, {setting['new_tokens']} new tokens, "
        f"B = 64, 95% intervals paired by prompt; {setting['rounds']} in {setting['dtype']}; one "
        f"{setting['device']}, jax {setting['jax']}, commit {setting['commit']}."
    )


def capacity_table(result: dict[str, Any]) -> str:
    """What the pocket trio's Weaver, the same trained on, and a larger one accept."""
    setting = result["setting"]["pocket"]
    rows = [row for row in result["rows"] if row["trio"] == "pocket" and row["method"] == "tfm"]
    arms = {row["run"]: row for row in result["training"]}
    weavers = list(dict.fromkeys(row["weaver"] for row in rows))
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = (row["prompts"], row["temperature"], row["shared_noise"])
        found.setdefault(key, {})[row["weaver"]] = row
    titles = [
        f"{name}, {arms[name]['parameters'] / 1e6:.1f}M" if name in arms else name
        for name in weavers
    ]
    lines = [
        f"| prompts | T | {' | '.join(f'{t}: `tfm`, to `ddtree`' for t in titles)} |",
        f"| --- | --- |{' --- |' * len(titles)}",
    ]
    for prompts, temperature, shared in sorted(found):
        own = found[prompts, temperature, shared]
        cells = [
            f"{own[w]['mean_accepted_length']:.2f}, {own[w]['to_ddtree']:.2f} "
            f"({_interval(own[w]['to_ddtree_ci95'])})"
            for w in weavers
        ]
        shown = f"{temperature:g}{_noise(temperature, shared)}"
        lines.append(f"| {prompts} | {shown} | {' | '.join(cells)} |")
    learned, first, second = setting["capacity"], arms["as it is"], arms["enlarged"]
    lines += [
        "",
        "Pocket trio: its own Weaver, and two that start from it and learn from "
        f"{learned['written']['texts']:,} new texts for {learned['optimiser']['steps']} steps "
        "each: one as it is, one enlarged without a change of what it computes at first "
        f"({second['blocks']} blocks, {second['inner']} inner units, against {first['blocks']} and "
        f"{first['inner']}). {setting['count']} prompts of each domain, {setting['new_tokens']} "
        "new tokens, B = 64, macro average, 95% intervals paired by prompt; "
        f"{setting['rounds']} in {setting['dtype']}; one {setting['device']}, jax "
        f"{setting['jax']}, commit {setting['commit']}.",
    ]
    return "\n".join(lines)


_BASES = ("dflash", "ddtree")  # what `tfm` is compared with


def _interval(ends: list[float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def _method(method: str, temperature: float, shared: bool) -> str:
    """A method's name, and what its trees grow under."""
    return f"`{method}`{_noise(temperature, shared)}"


def _noise(temperature: float, shared: bool) -> str:
    """Above temperature 0, whether trees grow under the noise of the target."""
    return "" if temperature == 0 else f", {'' if shared else 'no '}shared noise"


def _note(entries: dict[str, Any]) -> str:
    """What a result says of itself beside its numbers."""
    return f" {entries['note']}" if "note" in entries else ""


def _acceptance_setting(result: dict[str, Any]) -> str:
    setting, rows = result["setting"], result["rows"]
    same = all(row["identical"] for row in rows)
    prompts = setting["prompts"]
    note = f" ({setting['note']})" if "note" in setting else ""
    return (
        f"{_trio(setting)}, {setting['dtype']}, {setting['device']}, jax {setting['jax']}; "
        f"{', '.join(f'{n} {d}' for d, n in prompts.items())} prompts cut to "
        f"{setting['longest_prompt']} tokens{note}, {setting['new_tokens']} new tokens each; "
        f"w = {setting['expand']}, {setting['children']} children, pool {setting['pool']}; "
        f"{setting['prompt_form']}. "
        + (
            "Every text equals that of plain decoding, token for token."
            if same
            else "Texts that differ from plain decoding: "
            f"{sum(row['differing_prompts'] for row in rows)}."
        )
    )


def _gains(macro: list[dict[str, Any]]) -> list[str]:
    """What `tfm` accepts over the others, at every setting that has all three."""
    found: dict[tuple, dict[str, float]] = {}
    for row in macro:
        key = (row["temperature"], row["shared_noise"])
        found.setdefault(key, {})[f"{row['method']}{row['budget']}"] = row["mean_accepted_length"]
    return [
        f"At T = {temperature:g} and B = 64 `tfm` accepts {_more(m, 'dflash15')} more than the "
        f"chain and {_more(m, 'ddtree64')} more than DDTree; the paper reports 77% and 32% for "
        "Qwen3.6-27B."
        for (temperature, _), m in found.items()
        if {"tfm64", "dflash15", "ddtree64"} <= m.keys()
    ]


def _more(means: dict[str, float], than: str) -> str:
    return f"{means['tfm64'] / means[than] - 1:.0%}"


def _trio(setting: dict[str, Any]) -> str:
    """Which networks were measured."""
    return "Pocket trio" if setting["model"] == "pocket" else f"The trio in `{setting['model']}`"


def speed_table(result: dict[str, Any]) -> str:
    """Time of a round for each method."""
    setting = result["setting"]
    lines = [
        "| method | ms a round (lowest to highest) | tokens/s | compile, s |",
        "| --- | --- | --- | --- |",
    ]
    for method, row in result["methods"].items():
        low, high = row["round_ms_spread"]
        lines.append(
            f"| `{method}` | {row['round_ms']:.2f} ({low:.2f} to {high:.2f}) "
            f"| {row['tokens_per_second']:.0f} | {row['compile_seconds']:.1f} |"
        )
    lines += [
        "",
        f"{_trio(setting)}, {setting['dtype']}, one {setting['device']}, jax {setting['jax']}, "
        f"single stream, device loop, B = {setting['budget']}, w = {setting['expand']}, "
        f"T = {setting['temperature']}, {setting['new_tokens']} tokens after each of "
        f"{setting['prompts']} prompts. The weights of this trio fit into the cache, so a round is "
        "launches, not memory: the figures show that the loop works, not what a 27B model gains. "
        f"Commit {setting['commit']}.{_note(setting)}",
    ]
    return "\n".join(lines)


def tree_solve_table(result: dict[str, Any]) -> str:
    """The tree solve against its XLA form and the recurrence, by tree size."""
    lines = [
        "| one layer, tree nodes | Pallas, us | XLA, us | per-branch recurrence, us | error |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `gdn_tree`, {row['nodes']} | {row['pallas_us']:.1f} | {_rival(row, 'xla')} "
        f"| {_rival(row, 'per_branch')} | {row['error']:.0e} |"
        for row in result["ops"]["gdn_tree"]
    ]
    return "\n".join([*lines, "", _kernel_setting(result)])


def kernel_table(result: dict[str, Any]) -> str:
    """Every other operation against its XLA form."""
    lines = [
        "| operation | case | Pallas, us | XLA, us | floor, us |",
        "| --- | --- | --- | --- | --- |",
    ]
    for op, rows in result["ops"].items():
        if op == "gdn_tree":
            continue
        for row in rows:
            if not _typical(row):
                continue
            rival = "dense" if "dense_us" in row else "xla"
            lines.append(
                f"| `{op}` | {_case(row)} | {row['pallas_us']:.1f} | {_rival(row, rival)} "
                f"| {row['floor_us']:.1f} |"
            )
    return "\n".join([*lines, "", _kernel_setting(result)])


def _kernel_setting(result: dict[str, Any]) -> str:
    rows = [row for rows in result["ops"].values() for row in rows if row.get("pallas_us", 0) > 0]
    under = max(0.0, *(1 - row["pallas_us"] / row["floor_us"] for row in rows))
    exact = f" Some kernels read faster, by up to {under:.0%}." if under else ""
    return (
        "Qwen3.6-27B shapes (16 key heads, 48 value heads, 128 x 128; 24 query heads over 4 of "
        "256; vocabulary 248,320), bfloat16 unless said, batch 1, trees of depth 15, one "
        f"{result['device']}, jax {result['jax']}, commit {result['commit']}; median inside one "
        "jitted chain over inputs rotated past the cache, less what the chain takes without the "
        "call, so that times below 5 us are known to about 1 us. Floor: least traffic at "
        f"{result['read_bandwidth_gbs'] / 1e3:.2f} TB/s or least arithmetic at "
        f"{result['matrix_tflops']:.0f} TFLOP/s, whichever is longer, both measured in the same "
        f"run, by a large sum and a large product.{exact} Error: Frobenius norm of `out` against "
        f"float64.{_note(result)}"
    )


def _typical(row: dict[str, Any]) -> bool:
    """Whether a case is shown: a tree of 64 nodes and its root, the drafter, the commit."""
    of_default = 65 in (row.get("nodes"), row.get("rows")) or row.get("rows") == 15
    return of_default or row.get("part") == "growth" or "kv_layers" in row or "count" in row


def _rival(row: dict[str, Any], kind: str) -> str:
    us = row.get(f"{kind}_us")
    if us is None:
        return "; ".join(row.get(f"{kind}_failed", ["-"]))
    return f"{us:.1f} ({us / row['pallas_us']:.1f}x)"


def _case(row: dict[str, Any]) -> str:
    names = list(row)
    label = names[: next(i for i, name in enumerate(names) if name.endswith("_us"))]
    return ", ".join(f"{name} {row[name]}" for name in label)


def step_table(result: dict[str, Any]) -> str:
    """Whole rounds at full size."""
    # The method with the most phases has all of them, in order.
    shortest = min(row["context"] for row in result["rounds"])  # the others are in `context_table`
    rows = [row for row in result["rounds"] if row["context"] == shortest]
    parts = max((list(row.get("phases_ms", {})) for row in rows), key=len)
    titles = ["method", "drafted nodes", "context", "round, ms", "x plain"]
    titles += [f"{part}, ms" for part in parts]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for row in rows:
        ms = row.get("phases_ms", {})
        cells = [
            f"`{row['method']}`",
            str(row["budget"] or "-"),
            str(row["context"]),
            f"{row['round_ms']:.2f}",
            f"{row['ratio_to_ar']:.2f}",
            *(f"{ms[part]:.2f}" if part in ms else "-" for part in parts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    share = result["ar_ms"] / result["floor_ms"]
    prefill = "; ".join(
        f"prefill of {row['tokens']} tokens: {row['tokens_per_second']} tokens/s, "
        f"{row['share_of_matrix_rate']:.0%} of the matrix rate"
        for row in result["prefill"]
    )
    lines += [
        "",
        f"{_round_setting(result)}. Plain decoding takes {share:.2f} times the floor of "
        f"{result['floor_ms']:.2f} ms (weights, state, keys and "
        f"values at the {result['read_bandwidth_gbs'] / 1e3:.2f} TB/s measured in the same run); "
        f"{prefill}. A speed-up is the accepted length over the fifth column."
        f"{_idle(result)}{_note(result)}",
    ]
    return "\n".join(lines)


def context_table(result: dict[str, Any]) -> str:
    """Whole rounds of plain decoding and of `tfm` by length of the text."""
    rounds = {
        (row["context"], row["budget"]): row
        for row in result["rounds"]
        if row["method"] in ("ar", "tfm")
    }
    budgets = sorted({budget for _, budget in rounds if budget})
    lines = [
        f"| context | plain, ms | floor, ms |{''.join(f' `tfm` {b}, ms |' for b in budgets)}",
        "| --- " * (3 + len(budgets)) + "|",
    ]
    for context in sorted({context for context, _ in rounds}):
        cells = [str(context), f"{rounds[context, 0]['round_ms']:.2f}"]
        cells.append(f"{result['floors_ms'][str(context)]:.2f}")
        drafting = (rounds[context, budget] for budget in budgets)
        cells += [f"{row['round_ms']:.2f} ({row['ratio_to_ar']:.2f}x)" for row in drafting]
        lines.append(f"| {' | '.join(cells)} |")
    peak = result["peak_memory_bytes"] / 1e9
    lines += [
        "",
        f"{_round_setting(result)}; drafted nodes, and times plain decoding at the same context. "
        "Floor of plain decoding: weights, state, keys "
        f"and values at the {result['read_bandwidth_gbs'] / 1e3:.2f} TB/s measured in the same "
        f"run. Memory at the longest context: {peak:.0f} GB.{_note(result)}",
    ]
    return "\n".join(lines)


def attention_table(result: dict[str, Any]) -> str:
    """The kernel for long caches against what bounds it."""
    lines = [
        "| context | time, us | the other kernel, us | least arithmetic, us | reading the cache "
        "once, us |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["ops"]["tree_attention"]:
        if row.get("pallas_note") != "mosaic":
            continue
        us = row["pallas_us"]
        bounds = (row["arithmetic_floor_us"], row["memory_floor_us"])
        cells = " | ".join(f"{bound:.1f} ({us / bound:.1f}x)" for bound in bounds)
        room = f", room for {row['capacity']}" if "capacity" in row else ""
        other = _rival(row, "triton")
        lines.append(f"| {row['context']}{room} | {us:.1f} | {other} | {cells} |")
    rows = result["ops"]["tree_attention"][0]["rows"]
    return "\n".join(
        [
            *lines,
            "",
            f"{rows} tree rows, 24 query heads over 4 of 256, bfloat16, one {result['device']}, "
            f"jax {result['jax']}, commit {result['commit']}; median inside one jitted chain over "
            f"inputs rotated past the cache, at {result['read_bandwidth_gbs'] / 1e3:.2f} TB/s and "
            f"{result['matrix_tflops']:.0f} TFLOP/s measured in the same run.{_note(result)}",
        ]
    )


def _round_setting(result: dict[str, Any]) -> str:
    return (
        f"{result['preset']} shapes with random weights, {result['dtype']}, T = 0, batch 1, one "
        f"{result['device']}, jax {result['jax']}, commit {result['commit']}"
    )


def _idle(result: dict[str, Any]) -> str:
    """The shares of profiled rounds in which no kernel runs."""
    rows = [row for row in result["rounds"] if "idle_share" in row]
    if not rows:
        return ""
    shares = ", ".join(f"{row['idle_share']:.1%} of `{row['method']}`" for row in rows)
    return f" No kernel runs in {shares} (of a round at the first context, gaps between launches)."


SHOWN_DEPTHS = (1, 2, 3, 4, 6, 8, 11, 15)
CEILING_COLUMNS = {
    "drafter's marginal": ("marginal",),
    "its argmax": ("marginal_argmax",),
    "marginal oracle": ("oracle", "oracle_in_sample"),
    "best independent draft": ("best", "best_in_sample"),
    "Weaver": ("weaver",),
    "its argmax ": ("weaver_argmax",),
}


def ceiling_table(result: dict[str, Any]) -> str:
    """Acceptance probability by depth, macro average over domains, for every temperature."""
    setting = result["setting"]
    macro = [row for row in result["rows"] if row["domain"] == "macro"]
    lines = ["![Acceptance probability by depth](results/ceiling.svg)"]
    for temperature in dict.fromkeys(row["temperature"] for row in macro):
        rows = [row for row in macro if row["temperature"] == temperature]
        columns = {
            title: names
            for title, names in CEILING_COLUMNS.items()
            if names[0] in rows[0]["acceptance"]
        }
        lines += [
            "",
            f"Acceptance probability of one drafted token at T = {temperature:g}, along the "
            "verifier's own texts:",
            "",
            f"| depth | {' | '.join(title.strip() for title in columns)} |",
            f"| --- |{' --- |' * len(columns)}",
        ]
        lines += [
            f"| {row['depth']} | "
            + " | ".join(_span(row["acceptance"], names) for names in columns.values())
            + " |"
            for row in rows
            if row["depth"] in SHOWN_DEPTHS
        ]
        said = [*_passes(rows), *_by_samples(result["samples"], temperature)]
        lines += ["", *said] if said else []
    prompts = setting["prompts"]
    lines += [
        "",
        "A draft that is drawn is accepted with probability 1 - TV, a point mass (argmax) with the "
        "target's probability of it. No draft that ignores the realised tokens can beat the best "
        "independent draft on average; the oracles are brackets, from judging them on other "
        "samples than "
        f"they were made from to the same ones, {setting['samples']} continuations a context. "
        f"{_trio(setting)}, {setting['dtype']}, {setting['device']}, jax {setting['jax']}, commit "
        f"{setting['commit']}; {', '.join(f'{n} {d}' for d, n in prompts.items())} prompts, "
        f"{setting['anchors']} contexts each, mean over prompts and then over domains.",
    ]
    return "\n".join(lines)


def _span(values: dict[str, float], names: tuple[str, ...]) -> str:
    return " to ".join(f"{values[name]:.2f}" for name in names)


def _passes(rows: list[dict[str, Any]]) -> list[str]:
    """From which depth on Weaver is above the ceilings, the whole interval of the difference."""
    found = []
    for name, title in (
        ("oracle_in_sample", "the marginal oracle"),
        ("best_in_sample", "the best independent draft"),
    ):
        if "weaver_above" not in rows[0]:
            continue
        below = [row["depth"] for row in rows if row["weaver_above"][name]["ci95"][0] <= 0]
        first = max(below, default=0) + 1
        if first <= rows[-1]["depth"]:
            found.append(
                f"At T = {rows[0]['temperature']:g} Weaver is above {title} from depth {first} on, "
                "by its higher estimate and with the whole 95% interval of the difference."
            )
    return found


def _by_samples(rows: list[dict[str, Any]], temperature: float) -> list[str]:
    """How far the oracles' brackets depend on the number of continuations."""
    found = []
    for row in rows:
        if row["temperature"] != temperature:
            continue
        low, high, best_low, best_high = (
            sum(row[name]) / len(row[name])
            for name in ("oracle", "oracle_in_sample", "best", "best_in_sample")
        )
        found.append(
            f"{row['samples']}: {low:.3f} to {high:.3f}, {best_low:.3f} to {best_high:.3f}"
        )
    if not found:
        return []
    return [
        f"The two oracles, averaged over depths, by continuations a context: {'; '.join(found)}."
    ]


def ablation_table(result: dict[str, Any]) -> str:
    """Mean accepted length of every setting, one line each, and its share of the base's."""
    setting, rows = result["setting"], result["rows"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    cells: dict[str, dict[float, str]] = {}
    for row in rows:
        low, high = row["to_base_ci95"]
        share = f"{row['to_base']:.1%} ({low:.1%} to {high:.1%})"
        text = f"**{row['mean_accepted_length']:.2f}**"
        text += "" if row["part"] == "base" else f", {share}"
        cells.setdefault(row["name"], {})[row["temperature"]] = text
    base = rows[0]
    titles = " | ".join(f"T = {t:g}" for t in temperatures)
    lines = [
        f"Mean accepted length of `tfm` (B = {base['budget']}, w = {base['expand']}, K = "
        f"{base['pool']}, {base['children']} children, depth {base['depth']}) as one part at a "
        "time is changed, and its share of the base's (95% interval, paired by prompt):",
        "",
        f"| changed | {titles} |",
        f"| --- |{' --- |' * len(temperatures)}",
    ]
    lines += [
        f"| {name} | {' | '.join(by_t[t] for t in temperatures)} |" for name, by_t in cells.items()
    ]
    prompts = setting["prompts"]
    lines += [
        "",
        "A state that Weaver is left without is replaced by its mean over contexts; nothing is "
        f"trained again. {_trio(setting)}, {setting['dtype']}, {setting['device']}, jax "
        f"{setting['jax']}, commit {setting['commit']}; "
        f"{', '.join(f'{n} {d}' for d, n in prompts.items())} prompts cut to "
        f"{setting['longest_prompt']} tokens, {setting['new_tokens']} new tokens each, macro "
        "average over domains, shared noise at T = 1. "
        "[As a figure](results/ablation.svg).",
    ]
    return "\n".join(lines)


def full_cost_table(result: dict[str, Any]) -> str:
    """Real text at full cost: means over domains, and what `tfm` gains."""
    setting, macro = result["setting"], result["macro"]
    lines = [
        "| T | method | drafted nodes | tokens/s | accepted length | round, ms | x plain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['temperature']:g} | `{row['method']}` | {row['budget'] or '-'} "
        f"| {row['tokens_per_second']:.1f} | {row['mean_accepted_length']:.2f} "
        f"| {row['round_ms']:.2f} | **{row['speedup']:.2f}**{_mark(row)} |"
        for row in sorted(macro, key=lambda row: (row["temperature"], row["budget"]))
    ]
    lines.append("")
    for temperature in dict.fromkeys(row["temperature"] for row in macro):
        rows = [row for row in macro if row["temperature"] == temperature]
        speed = {(row["method"], row["budget"]): row["speedup"] for row in rows}
        chain = next((x for (method, _), x in speed.items() if method == "dflash"), None)
        tree = speed.get(("tfm", 64))
        if tree is not None and chain is not None:
            lines.append(
                f"At T = {temperature:g} and B = 64 `tfm` is {tree:.2f} times as fast as plain "
                f"decoding and {tree / chain - 1:.1%} faster than the chain; the paper reports "
                "4.37 times and 24.7% for Qwen3.6-27B."
            )
    apart = result["differences"]
    greedy = [row for row in macro if not row["temperature"]]
    texts = max(len(greedy) - 1, 0) * sum(setting["prompts"].values())
    parted = ""
    if apart:
        parted = (
            f"{len(apart)} of {texts} greedy texts part from plain decoding, at logits no further "
            f"apart than {max(one['gap'] for one in apart):.2g}."
        )
    elif texts:
        parted = f"All {texts} greedy texts are those of plain decoding."
    logits = setting["checks"].get("logits")
    kept = (
        ""
        if logits is None
        else " Logits after a prompt differ from those of the small trio in float32 by at most "
        f"{logits['largest_difference']:.2g}, the small trio's own in {setting['dtype']} by "
        f"{logits['largest_difference_small_trio']:.2g}."
    )
    lines += [
        "",
        f"The {setting['trio']} trio embedded into {setting['preset']} shapes, {setting['dtype']}, "
        f"one {setting['device']}, jax {setting['jax']}, commit {setting['commit']}; single "
        f"stream, device loop without prefill; "
        f"{', '.join(f'{n} {d}' for d, n in setting['prompts'].items())} prompts cut to "
        f"{setting['longest_prompt']} tokens, {setting['new_tokens']} new tokens each; w = "
        f"{setting['expand']}, {setting['children']} children, pool {setting['pool']}, shared "
        f"noise {'on' if setting['shared_noise'] else 'off'}; means over domains. "
        f"{parted}{kept}{_further_runs(setting)}{_note(result)}",
    ]
    return "\n".join(lines)


def _further_runs(setting: dict[str, Any]) -> str:
    """Where marked lines are from."""
    return "".join(
        f" Lines marked {run['run']} are from a further run of the same prompts, commit "
        f"{run['commit']}, in which plain decoding took {max(run['plain_round_ms'].values()):.2f} "
        "ms a round: their speed-ups are over that."
        for run in setting.get("runs", [])
    )


def _mark(row: dict[str, Any]) -> str:
    """Which run a line is from, if not from the first."""
    return f" ({row['run']})" if "run" in row else ""


def headline(result: dict[str, Any]) -> str:
    """The best setting of `tfm` in one sentence, and the best beside the chain in one run."""
    setting, macro = result["setting"], result["macro"]
    tfm = [row for row in macro if row["method"] == "tfm"]
    best = max(tfm, key=lambda row: row["speedup"])
    beside = max((row for row in tfm if "run" not in row), key=lambda row: row["speedup"])
    chain = next(
        row
        for row in macro
        if row["method"] == "dflash" and row["temperature"] == beside["temperature"]
    )
    prompts = sum(setting["prompts"].values())
    also = "" if best is beside else f", with B = {beside['budget']} and in one run with it,"
    return (
        f"At the cost of {setting['preset']} on one {setting['device']} ({setting['dtype']}, "
        f"single stream, jax {setting['jax']}, {prompts} prompts, T = {best['temperature']:g}, B = "
        f"{best['budget']}) the pocket trio writes {best['tokens_per_second']:.0f} tokens a second "
        f"by `tfm`: {best['speedup']:.2f} times plain decoding and{also} "
        f"{beside['speedup'] / chain['speedup']:.2f} times the chain of DFlash "
        "([the whole table](#real-text-at-full-size))."
    )


SECTIONS = {
    "headline": ("full_cost_nvidia*.json", headline),
    "acceptance": ("acceptance.json", acceptance_table),
    "full_cost": ("full_cost_nvidia*.json", full_cost_table),
    "full_cost_pair": ("full_cost_pair_nvidia*.json", full_cost_table),
    "tree_solve": ("kernels_nvidia*.json", tree_solve_table),
    "budgets": ("budgets.json", budget_table),
    "larger": ("larger.json", larger_table),
    "capacity": ("larger.json", capacity_table),
    "second": ("second.json", second_table),
    "entropy": ("second.json", entropy_table),
    "together": ("together.json", together_table),
    "calibration": ("calibration.json", calibration_table),
    "ceiling": ("ceiling.json", ceiling_table),
    "ablation": ("ablation.json", ablation_table),
    "speed": ("pocket_speed_nvidia*.json", speed_table),
    "step": ("step_nvidia*.json", step_table),
    "contexts": ("contexts_nvidia*.json", context_table),
    "attention": ("kernels_nvidia*.json", attention_table),
    "kernels": ("kernels_nvidia*.json", kernel_table),
}


def main() -> None:
    """Rewrites every section of the documents that has a result."""
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text("utf-8")), "utf-8")


def filled(text: str) -> str:
    """A document with the tables of its sections, `<!-- name:begin -->` to `<!-- name:end -->`."""
    for name, (pattern, table) in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        files = sorted(RESULTS.glob(pattern))
        if not files or begin not in text:
            continue
        body = "\n\n".join(table(json.loads(file.read_text("utf-8"))) for file in files)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{body}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    main()
