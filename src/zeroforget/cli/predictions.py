"""What `zeroforget predict` reads and prints: for people, and as JSON and CSV for programs."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroforget.cli.app import errors, put_json, show, shown, table_of
from zeroforget.files.text import safe_cell

if TYPE_CHECKING:
    from zeroforget.store import Prediction

_NONE = "there are no pictures to classify in what was given"


def listed(given: list[Path]) -> list[tuple[Path, bool]]:
    """All files, and of each whether it was found in a folder, not named itself."""
    from zeroforget.data.readers.folders import files_below

    out: list[tuple[Path, bool]] = []
    for path in given:
        out += [(file, True) for file in files_below(path)] if path.is_dir() else [(path, False)]
    if not out:
        raise ValueError(_NONE)
    return out


def of_pictures(answers: list[Prediction], below: list[bool]) -> list[Prediction]:
    """All answers but for files that never were pictures and only happened to lie in a folder."""
    from zeroforget.data.decode import ENDINGS
    from zeroforget.store.pictures import left_out

    strange = [
        found and one.error is not None and Path(one.source).suffix.lower() not in ENDINGS
        for one, found in zip(answers, below, strict=True)
    ]
    if all(strange):
        raise ValueError(_NONE)
    if count := sum(strange):
        errors().print(left_out(count), highlight=False)
    return [one for one, is_strange in zip(answers, strange, strict=True) if not is_strange]


def print_json(predictions: list[Prediction]) -> None:
    """A list with an object for each picture."""
    put_json(json.dumps([_plain(one) for one in predictions], indent=1, ensure_ascii=False))


def _plain(one: Prediction) -> dict[str, Any]:
    if one.error is not None:
        return {"picture": one.source, "error": one.error}
    out: dict[str, Any] = {"picture": one.source, "task": one.task}
    if one.tasks:
        out["sure"] = one.sure
        out["tasks"] = [{"task": name, "probability": p} for name, p in one.tasks]
    return out | {"classes": [{"class": name, "probability": p} for name, p in one.classes]}


def print_csv(predictions: list[Prediction]) -> None:
    """A row for each class of each picture. No cell begins a formula."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["picture", "task", "rank", "class", "probability", "error"])
    for one in predictions:
        if one.error is not None:
            writer.writerow([safe_cell(one.source), "", "", "", "", safe_cell(one.error)])
        for place, (name, p) in enumerate(one.classes, 1):
            writer.writerow([safe_cell(one.source), safe_cell(one.task), place, safe_cell(name), f"{p:.6f}", ""])


def print_table(predictions: list[Prediction], *, guessed: bool) -> None:
    """A line for each picture."""
    table = table_of("picture", *(["task", ">sure"] if guessed else []), "class", ">", "next")
    for one in predictions:
        if one.error is not None:
            table.add_row(shown(one.source), *([""] * 2 if guessed else []), "[red]—[/]", "", shown(one.error))
            continue
        (name, p), rest = one.classes[0], one.classes[1:]
        task = one.task if one.sure else f"not sure: {one.task}?"
        guess = [shown(task), f"{100 * one.tasks[0][1]:.0f} %"] if one.tasks else []
        others = ", ".join(f"{other} {100 * q:.1f} %" for other, q in rest)
        table.add_row(shown(one.source), *guess, shown(name), f"{100 * p:.1f} %", shown(others))
    show(table)
