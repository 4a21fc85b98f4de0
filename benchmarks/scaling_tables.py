"""The tables of docs/scaling.md, made from what `benchmarks.tasks` and `benchmarks.hosts` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.step_tables import about

ACTIONS = {
    "learn": ("learn one more task (24 pictures, one epoch)", "s"),
    "open and predict": ("open and predict, torch's import included", "s"),
    "tasks DIR": ("`zeroforget tasks`", "s"),
    "verify": ("verify", "s"),
    "guess": ("guess among all tasks, memory for one", "ms"),
    "step": ("a training step", "ms"),
    "add_task": ("`add_task`", "ms"),
    "dense": ("`dense`", "ms"),
    "train": ("`train()`", "ms"),
    "verify, memory / (network + one dense)": ("memory of verify ÷ (growing network + one dense)", ""),
}


def tasks(files: list[Path]) -> str:
    """A row for each action, a column for each number of tasks; of further files the last line of their memory."""
    found = json.loads(files[0].read_text())
    counts = sorted({int(count) for took in found["took"].values() for count in took})
    lines = [
        "| tasks in the model | " + " | ".join(f"{count:,}" for count in counts) + " | grows as |",
        "|---|" + "--:|" * (len(counts) + 1),
    ]
    for action, (name, unit) in ACTIONS.items():
        if unit and action in found["took"]:
            cells = [_figure(found["took"][action][str(count)], unit) for count in counts]
            lines.append(f"| {name}, {unit} | {' | '.join(cells)} | T^{found['exponents'][action]:.1f} |")
    lines += ["", about(found)]
    for file in files[1:]:
        lines += _memory(json.loads(file.read_text()))
    return "\n".join(lines)


def _figure(seconds: float, unit: str) -> str:
    value = seconds * (1000 if unit == "ms" else 1)
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _memory(found: dict[str, Any]) -> list[str]:
    action = "verify, memory / (network + one dense)"
    ((count, times),) = found["took"][action].items()
    network = found["network"]["network"]
    said = (
        f"`verify` of {count} tasks of `{network}` took {times:.2f} times the memory of the network and one task's own."
    )
    return [said, "", about(found)]


def hosts(files: list[Path]) -> str:
    """Seconds for the same runs by one process and by nodes."""
    found = json.loads(files[0].read_text())
    runs, median = int(found["args"]["runs"]), found["median"]
    lines = ["| who trains | seconds | runs a minute | over one node |", "|---|--:|--:|--:|"]
    for name, seconds in median.items():
        who = (
            "one process, runs one after another"
            if name == "serial"
            else f"{name.removeprefix('nodes ')} of Ray's nodes"
        )
        lines.append(f"| {who} | {seconds:.0f} | {60 * runs / seconds:.1f} | {median['nodes 1'] / seconds:.2f} |")
    loads = found["load before"][0]
    note = (
        f"{runs} runs, medians of {found['args']['repeat']}; {found['cores']} cores, load {loads:.1f} before it began."
    )
    return "\n".join([*lines, "", note, "", about(found)])
