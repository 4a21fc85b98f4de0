"""The table of the language model, made from its results and put between two marks of a page."""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(<!-- language -->\n).*?(<!-- end -->)", re.DOTALL)


def write(page: Path, results: Path) -> None:
    """Fill the page's block from the results."""
    text = page.read_text()
    if not BLOCK.search(text):
        raise ValueError(f"{page} has no lines <!-- language --> and <!-- end --> to put the table between")
    body = table(json.loads(results.read_text()))
    page.write_text(BLOCK.sub(lambda match: f"{match[1]}{body}\n{match[2]}", text))


def table(found: dict[str, Any]) -> str:
    """How it was measured, and a line for every contestant."""
    service = found["service"]
    equal = "bit-equal to its own" if found["adopted"]["equal"] else "NOT equal to its own"
    about = (
        f"One CPU thread, torch {found['torch']}, commit {found['commit']}, {found['date']}, one seed. The network in "
        f"service ({service['bytes'] / 1e6:.2f} MB) has {100 * service['accuracy']:.1f} % of English bytes right, at "
        f"{service['bits']:.2f} bits a byte; adopted, its scores are {equal}. Each further task learns for "
        f"{found['size']['steps']} steps of {found['size']['batch']} windows."
    )
    lines = [
        textwrap.fill(about, 119),
        "",
        "| | German, bits a byte | language, % | topic, % | kB a task | of the network | rate | task 1 bit-equal |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    return "\n".join(lines + [_line(each, service["bytes"]) for each in found["contestants"]])


def _line(each: dict[str, Any], whole: int) -> str:
    german, language, topic = each["tasks"]
    size = statistics.mean(task["bytes"] for task in each["tasks"])
    cells = [
        each["name"],
        f"{german['bits']:.3f}",
        f"{100 * language['accuracy']:.1f}",
        f"{100 * topic['accuracy']:.1f}",
        f"{size / 1e3:.0f}",
        f"{100 * size / whole:.0f} %",
        f"{each['rate']:g}",
        "yes" if all(task["first_equal"] for task in each["tasks"]) else "NO",
    ]
    return f"| {' | '.join(cells)} |"
