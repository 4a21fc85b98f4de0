"""The tables of docs/speed.md, made from what `benchmarks.steps`, `benchmarks.epoch` and `benchmarks.search` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAMES = {
    "finetuning": "fine-tuning, plain PyTorch",
    "first task": "the same by our operators (a first task: everything is newborn)",
    "floor": "floor: forward and the gradient of the inputs alone",
    "naive": "naive masks: whole gradient, then masked",
    "tfm-nofn": "learning a task, without feature normalization",
    "tfm": "learning a task",
    "tfm-nofn/8": "… without it, widths at multiples of 8",
    "tfm/8": "… with it, widths at multiples of 8",
    "finetuning, quick": "fine-tuning as our loop records it",
    "tfm, quick": "learning a task as our loop records it",
    "tfm/8, quick": "… widths at multiples of 8",
}


def steps(files: list[Path]) -> str:
    """One column for each network and frozen share; each figure a step's time over that of fine-tuning."""
    found = [json.loads(file.read_text()) for file in files]
    columns: list[tuple[str, dict[str, dict[str, Any]]]] = []
    for each in found:
        shape = "×".join(map(str, json.loads(each["args"]["shape"])[1:]))
        for frozen in sorted({row["frozen"] for row in each["rows"]}, reverse=True):
            rows = {row["step"]: row for row in each["rows"] if row["frozen"] == frozen}
            columns.append((f"{each['args']['network']} {shape}, {frozen:.0%}", rows))
    lines = [
        "| a step's time over fine-tuning's | " + " | ".join(title for title, _ in columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    measured = {step for _, rows in columns for step in rows}
    for step, name in [(step, name) for step, name in NAMES.items() if step in measured]:
        cells = [_cell(step, rows) for _, rows in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(about(each) for each in found)])


def _cell(step: str, rows: dict[str, dict[str, Any]]) -> str:
    if step not in rows:
        return "–"
    ratio = f"{rows[step]['ratio']:.2f}"
    return f"{ratio} ({rows[step]['ms']:.2f} ms)" if step == "finetuning" else ratio


def about(found: dict[str, Any]) -> str:
    """How something was measured, in a line."""
    where = filter(None, [found["device"], found["args"].get("precision"), f"torch {found['torch']}"])
    return f"`{found['command']}`: {', '.join(where)}, commit {found['commit']}, {found['date']}.\n"


def epochs(files: list[Path]) -> str:
    """One row for each loop."""
    found = json.loads(files[0].read_text())
    measured = any("memory" in row for row in found["rows"])
    lines = [
        "| loop | seconds an epoch | over the plainest | GPU busy |" + " memory |" * measured,
        "|---|--:|--:|--:|" + "--:|" * measured,
    ]
    for row in found["rows"]:
        busy = f"{row['busy']:.0%}" if "busy" in row else "–"
        memory = f" {row['memory'] / 2**30:.2f} GiB |" if "memory" in row else " – |" * measured
        lines.append(f"| {row['loop']} | {row['seconds']:.3f} | {row['ratio']:.2f} | {busy} |{memory}")
    note = [found["note"], ""] if "note" in found else []
    return "\n".join([*lines, "", *note, about(found)])


RATIOS = {
    "a first task, where everything is newborn, ÷ fine-tuning": "95% frozen: first task / finetuning",
    "growing ÷ fine-tuning, 95 % frozen": "95% frozen: tfm/8 / finetuning",
    "the same without feature normalization": "95% frozen: tfm-nofn/8 / finetuning",
    "growing ÷ fine-tuning, 50 % frozen": "50% frozen: tfm/8 / finetuning",
    "naive masks, 95 % frozen": "95% frozen: naive / finetuning",
    "floor": "95% frozen: floor / finetuning",
}


def ratios(files: list[Path]) -> str:
    """What `make bench` wrote: steps as a table, the rest as a list."""
    found = json.loads(files[0].read_text())
    values: dict[str, float] = found["ratios"]
    networks = list(dict.fromkeys(name.split("; ")[0] for name in values if "; " in name))
    lines = [f"| | {' | '.join(networks)} |", "|---|" + "---:|" * len(networks)]
    for title, name in RATIOS.items():
        cells = [f"{values[f'{network}; {name}']:.2f}" for network in networks]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    rest = [f"- {name}: {value:.2f}" for name, value in values.items() if "frozen" not in name]
    where = f"{found['device']}, {found['threads']} threads, torch {found['torch']}"
    made = f"{where}, commit {found['commit']}, {found['date']}"
    return "\n".join([*lines, "", *rest, "", f"`{found['command']}`: {made}."])


def searches(files: list[Path]) -> str:
    """One row for each search, a sum for each file: its time and epochs over those of the growth that it chose."""
    lines = [
        "| | tried | chosen | search ÷ chosen alone | all to their ends ÷ chosen alone | epochs ÷ the chosen one's |",
        "|---|---|--:|--:|--:|--:|",
    ]
    found = [json.loads(file.read_text()) for file in files]
    for each in found:
        sums = dict.fromkeys(("pruned", "full", "one", "epochs", "chosen"), 0.0)
        for row in each["rows"]:
            chosen = next(candidate for candidate in row["search"][0] if candidate["chosen"])
            facts = row["seconds"] | {"epochs": row["epochs"][0], "chosen": chosen["epochs"]}
            growths = ", ".join(f"{100 * candidate['growth']:g}" for candidate in row["search"][0])
            lines.append(
                f"| {row['task']}, seed {row['seed']} | {growths} % | {100 * chosen['growth']:g} % | {_ratios(facts)} |"
            )
            sums = {name: total + facts[name] for name, total in sums.items() if name in facts}
        lines.append(f"| **all {len(each['rows'])}**, commit {each['commit']} | | | {_ratios(sums)} |")
    return "\n".join([*lines, "", *(about(each) for each in found)])


def _ratios(facts: dict[str, float]) -> str:
    pairs = ("pruned", "one"), ("full", "one"), ("epochs", "chosen")
    return " | ".join(f"{facts[over] / facts[under]:.2f}" if over in facts else "–" for over, under in pairs)


def shards(paths: list[Path]) -> str:
    """What `python -m benchmarks.shards` measured: two tables, and a line that says how."""
    parts = []
    for found in (json.loads(path.read_text()) for path in paths):
        settings = found["reading"]
        rows = [["images a second a core", *settings], ["---", *("--:" for _ in settings)]]
        rows += [
            [way, *(f"{each[way]['a second a core']:,.0f}" for each in settings.values())]
            for way in next(iter(settings.values()))
        ]
        listed = [["listed images", "MB held", "bytes an image", "MB at the peak", "seconds"], ["--:"] * 5]
        for count, held in found["listing"].items():
            sizes = f"{held['bytes'] / 1e6:,.1f} | {held['bytes'] / int(count):,.0f} | {held['peak'] / 1e6:,.0f}"
            listed.append([f"{int(count):,}", sizes, f"{held['seconds']:.1f}"])
        going = found["resumed"]
        parts += ["\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, listed)]
        parts.append(
            f"An epoch of {going['steps']} steps was stopped at step {going['stopped at']} and went on at step "
            f"{going['went on at']}: {'bit-equal' if going['bit-equal'] else 'not bit-equal'} to one that was not."
        )
        parts.append(f"`{found['command']}`, {found['device']}, {found['date']}, commit {found['commit']}.")
    return "\n\n".join(parts)
