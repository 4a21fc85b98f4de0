"""What a run's data are, in a few figures: enough to notice that they have changed, on any machine and at no cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zeroforget.data import Scenario, Split, Task
from zeroforget.files.hashes import short

LOOKED_AT = 8
"""So many images of each part of a task are looked at."""
NEAR = 0.004
"""A grey level: decoders of different versions may differ by less in an image's mean."""
_PARTS = {"train": "training", "val": "validation", "test": "test"}


def describe(scenario: Scenario) -> dict[str, Any]:
    """The facts as plain JSON values: shape, and each task's classes, number of images, labels and some means."""
    return {"shape": list(scenario.shape), "tasks": [_task(task) for task in scenario.tasks]}


def _task(task: Task) -> dict[str, Any]:
    parts = {part: _part(getattr(task, part)) for part in _PARTS}
    return {"name": task.name, "classes": list(task.classes), **parts}


def _part(split: Split) -> dict[str, Any]:
    labels = split.labels.cpu().long().contiguous().numpy().tobytes()
    return {
        "images": len(split),
        "labels": short(labels).hex(),
        "means": _means(split) if len(split) else [],
    }


def _means(split: Split) -> list[float]:
    """The mean of some images, evenly spread, where bytes count as [0, 1]."""
    places = sorted({place * (len(split) - 1) // max(1, LOOKED_AT - 1) for place in range(LOOKED_AT)})
    images, _ = split.batch(torch.tensor(places, device=split.labels.device))
    means = images.double().flatten(1).mean(1) / (255 if images.dtype == torch.uint8 else 1)
    return [round(value, 6) for value in means.tolist()]


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between the facts of two scenarios, in words."""
    if old["shape"] != new["shape"]:
        return [f"images were {_by(old['shape'])}, now {_by(new['shape'])}"]
    found = [change for pair in zip(old["tasks"], new["tasks"], strict=False) for change in _task_changes(*pair)]
    if len(old["tasks"]) != len(new["tasks"]):
        found.insert(0, f"{len(old['tasks'])} tasks, now {len(new['tasks'])}")
    return found


def _task_changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    where = f"task '{old['name']}'"
    if old["name"] != new["name"]:
        yield f"{where} is now '{new['name']}'"
    if old["classes"] != new["classes"]:
        yield f"{where} had the classes {_some(old['classes'])}, now {_some(new['classes'])}"
        return
    for part, said in _PARTS.items():
        if old[part]["images"] != new[part]["images"]:
            yield f"{where} had {old[part]['images']} {said} images, now {new[part]['images']}"
        elif old[part]["labels"] != new[part]["labels"]:
            yield f"the {said} labels of {where} differ"
        elif not _alike(old[part]["means"], new[part]["means"]):
            yield f"the {said} images of {where} differ"


def _alike(old: Sequence[float], new: Sequence[float]) -> bool:
    return len(old) == len(new) and all(
        math.isclose(a, b, rel_tol=NEAR, abs_tol=NEAR) for a, b in zip(old, new, strict=True)
    )


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
