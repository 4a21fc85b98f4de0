"""The table of the transfer check, made from its results and put between two marks of a page."""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(<!-- transfer -->\n).*?(<!-- end -->)", re.DOTALL)


def write(page: Path, results: Path) -> None:
    """Fill the page's block from the results."""
    text = page.read_text()
    if not BLOCK.search(text):
        raise ValueError(f"{page} has no lines <!-- transfer --> and <!-- end --> to put the table between")
    body = table(json.loads(results.read_text()))
    page.write_text(BLOCK.sub(lambda match: f"{match[1]}{body}\n{match[2]}", text))


def table(found: dict[str, Any]) -> str:
    """How it was measured, and a line for every contestant that finished all its tasks."""
    runs = [run for run in found["runs"] if "adopted" in run]
    count = max(len(each["tasks"]) for run in runs for each in run["contestants"])
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for each in run["contestants"]:
            if len(each["tasks"]) == count:
                rows.setdefault(each["name"], []).append(each)
    whole = statistics.mean(run["service"]["bytes"] for run in runs)
    lines = [
        _about(found, runs),
        "",
        "| | accuracy | " + " | ".join(f"task {n + 2}" for n in range(count)) + " | MB a task | of the network | "
        "s a task | ms a step | rate | task 1 bit-equal |",
        "|---|--:|" + "--:|" * count + "--:|--:|--:|--:|--:|---|",
    ]
    return "\n".join(lines + [_line(name, each, whole) for name, each in rows.items()])


def _about(found: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    size = found["size"]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    right = statistics.mean(run["service"]["accuracy"] for run in runs)
    whole = statistics.mean(run["service"]["bytes"] for run in runs)
    equal = "bit-equal to its own" if all(run["adopted"]["equal"] for run in runs) else "NOT equal to its own"
    kind = "A trial of the script only, too small to mean anything. " if found["quick"] else ""
    text = (
        f"{kind}{found['device']}, torch {found['torch']}, commit {found['commit']}, {found['date']}; "
        f"seed{'s' * (len(runs) > 1)} {seeds}. The network in service ({whole / 1e6:.1f} MB) has {100 * right:.1f} % "
        f"of its {size['first']} classes right; adopted, its logits are {equal}. Each task: {size['classes']} classes, "
        f"{size['epochs']} epochs, batches of {size['batch']}."
    )
    return textwrap.fill(text, 119)


def _line(name: str, runs: list[dict[str, Any]], whole: float) -> str:
    tasks = list(zip(*(run["tasks"] for run in runs), strict=True))
    each = [statistics.mean(t["accuracy"] for t in across) for across in tasks]
    means = [statistics.mean(t["accuracy"] for t in run["tasks"]) for run in runs]
    flat = [t for run in runs for t in run["tasks"]]
    size, seconds, ms = (statistics.mean(t[key] for t in flat) for key in ("bytes", "seconds", "ms_per_step"))
    ranks = sorted({run["rank"] for run in runs if "rank" in run})
    spread = f" ± {50 * (max(means) - min(means)):.1f}" if len(runs) > 1 else ""
    cells = [
        name + (f" (rank {', '.join(map(str, ranks))})" if ranks else ""),
        f"**{100 * statistics.mean(means):.1f}**{spread}",
        *(f"{100 * value:.1f}" for value in each),
        f"{size / 1e6:.2f}",
        f"{100 * size / whole:.1f} %",
        f"{seconds:.1f}",
        f"{ms:.2f}",
        ", ".join(f"{rate:g}" for rate in sorted({run["rate"] for run in runs})),
        "yes" if all(t["first_equal"] for t in flat) else "NO",
    ]
    return f"| {' | '.join(cells)} |"
