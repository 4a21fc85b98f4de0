"""Many runs in one small JSON file, for keeping with the source: everything but the epochs' curves, of which the
validation accuracy of the weights that were kept and that of the last epoch stay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zeroforget.experiments.disk import damaged, read_json, write_json
from zeroforget.experiments.results import Results, load_runs

FORMAT = "zeroforget results 1"


def pack(results: Sequence[Results]) -> dict[str, Any]:
    """The archive of these runs; what all of them share stands once."""
    rows = [_row(each) for each in results]
    shared = {key: rows[0][key] for key in rows[0] if all(row[key] == rows[0][key] for row in rows)} if rows else {}
    own = [{key: value for key, value in row.items() if key not in shared} for row in rows]
    return {"format": FORMAT, "shared": shared, "runs": own}


def _row(results: Results) -> dict[str, Any]:
    """A run as an archive keeps it: how many epochs each task took, not their curves."""
    values = results.to_dict()
    values["logs"] = [
        {"epochs": len(log["epochs"]), "best": log["best"], "stopped": log["stopped"], "notes": log["notes"]}
        | _validation(log)
        for log in values["logs"]
    ]
    values["seconds"] = [round(s, 1) for s in values["seconds"]]
    return values


def _validation(log: dict[str, Any]) -> dict[str, Any]:
    """Two points of a task's curve: enough to see whether the weights that were kept are the best that it had. Archives
    of earlier versions have none."""
    if "validation" in log:
        return {"validation": log["validation"]}
    known = {place: epoch["val_accuracy"] for place, epoch in enumerate(log["epochs"]) if "val_accuracy" in epoch}
    if not known:
        return {}
    kept, last = (known.get(place) for place in (log["best"], len(log["epochs"]) - 1))
    return {"validation": {"kept": kept and round(kept, 4), "last": last and round(last, 4)}}


def unpack(values: dict[str, Any]) -> list[Results]:
    """The runs of an archive. Their logs have as many epochs as were trained, each empty."""
    found = []
    for own in values["runs"]:
        row = values["shared"] | own
        logs = [log | {"epochs": [{}] * log["epochs"], "seconds": 0.0} for log in row["logs"]]
        found.append(Results.from_dict(row | {"logs": logs}))
    return found


def save(results: Iterable[Results], path: Path) -> None:
    """Write an archive, runs in a fixed order."""
    write_json(path, pack(sorted(results, key=lambda r: (r.experiment, r.scenario, r.method, r.seed))))


def is_archive(path: Path) -> bool:
    """Whether a file says that it is one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return FORMAT.encode() in file.read(200)


def load(path: Path) -> list[Results]:
    """Read an archive. One without runs is refused: nothing can be made of it."""
    remedy = "get it again, or make it anew from the runs"
    values = read_json(path, remedy)
    try:
        found = unpack(values)
    except KeyError as error:
        raise damaged(path, f"it lacks {error}", remedy) from error
    except (ValueError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise damaged(path, str(error), remedy) from error
    if not found:
        raise ValueError(f"{path} holds no runs; {remedy}")
    return found


def load_all(paths: Iterable[Path]) -> list[Results]:
    """The runs of archives, and every finished run in or below folders."""
    return [each for path in paths for each in (load(path) if is_archive(path) else load_runs([path]))]


def distinct(results: Iterable[Results]) -> tuple[list[Results], int]:
    """Equal runs once, and how many were there more than once. A run equals its own archive; it is kept for its
    curves."""
    found: dict[str, list[Results]] = {}
    for each in results:
        row = _row(each)
        for log in row["logs"]:
            log.pop("validation", None)
        found.setdefault(json.dumps(row, sort_keys=True), []).append(each)
    several = sum(len(equal) > 1 for equal in found.values())
    return [next((each for each in equal if _has_curves(each)), equal[0]) for equal in found.values()], several


def _has_curves(results: Results) -> bool:
    return all(epoch for log in results.logs for epoch in log["epochs"])
