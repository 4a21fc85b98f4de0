"""Trainings that were interrupted: which one goes on, which are given up, and where those of other tasks wait."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from zeroforget.files import atomic, paths
from zeroforget.files.json_fields import MOST_BYTES, read_bytes
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import TRAINING
from zeroforget.store.names import is_task_name
from zeroforget.store.options import GROWTH, Options
from zeroforget.store.writing import Watch

PLAN = "plan"
_ANY = ("finish", "strict", "unreadable", "epochs", "weights", "test")
"""Options that may be others when an interrupted training goes on."""
_OTHER = {
    "pictures": "the pictures are others",
    "weights": "the weights are others",
    "backbone": "the network is another",
}


def begin(path: Path, plan: dict[str, Any], *, finish: bool, watch: Watch) -> Path:
    """The folder for a training's checkpoints: that of the interrupted one that it goes on with, or an empty one. What
    was kept of another task's training waits in a folder beside it."""
    training = path / TRAINING
    if (other := planned(training).get("task", plan["task"])) != plan["task"] and _has_begun(training):
        training.replace(_fresh(_waiting(path, other)))
        watch.say(f"an interrupted training of '{other}' is kept: learning '{other}' again goes on with it")
    own = _waiting(path, plan["task"])
    if own.is_dir() and not own.is_symlink() and not _has_begun(training):
        own.replace(_fresh(training))
    before = planned(training)
    if before != plan:
        differs = _difference(before, plan)
        if finish:
            raise ModelError(
                "there is no interrupted training of this task with these pictures and options to finish"
                + (f": {differs}" if before else "")
            )
        if _has_begun(training):
            watch.say(f"an interrupted training is given up: {differs}")
        _fresh(training).mkdir()
        atomic.write_new(training / PLAN, json.dumps(plan).encode())
    elif _has_begun(training):
        watch.say("going on with the training that was interrupted")
    return training


def end(path: Path, task: str) -> None:
    """Remove what a task that is learned now has left; what other tasks left waits on."""
    for place in (path / TRAINING, _waiting(path, task)):
        if planned(place).get("task", task) == task:
            paths.remove(place)


def planned(training: Path) -> dict[str, Any]:
    """The plan of an interrupted training; empty if there is none that can be read."""
    try:
        plan = json.loads(read_bytes(training / PLAN, MOST_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(plan, dict) or not isinstance(plan.get("options"), dict):
        return {}
    if not isinstance(name := plan.get("task"), str) or not is_task_name(name):  # it names a folder here
        return {}
    return plan | {"options": shared(Options()) | plan["options"]}  # some came after it was written


def shared(options: Options, processes: int = 1) -> dict[str, str]:
    """The options that an interrupted training must share with the one that goes on, and how many processes learn."""
    chosen = {each.name: str(getattr(options, each.name)) for each in fields(options) if each.name not in _ANY}
    chosen = {name: "the default" if value == "None" else value for name, value in chosen.items()}
    growth = GROWTH if options.growth is None else options.growth
    return chosen | {"growth": str(growth), "processes": str(processes)}


def _waiting(path: Path, task: str) -> Path:
    """Where a task's training waits while another task is learned."""
    return path / f"{TRAINING}-{task.replace(' ', '_')}"


def _has_begun(training: Path) -> bool:
    return any(training.glob("phase-*"))


def _fresh(place: Path) -> Path:
    """The same path, with nothing there."""
    paths.remove(place)
    return place


def _difference(before: dict[str, Any], plan: dict[str, Any]) -> str:
    """In what an interrupted training differs from the one to begin, in words."""
    if before.keys() != plan.keys() or "None" in before["options"].values():  # so defaults were written once
        return "another version of zeroforget began it, or its plan is damaged"
    if before["task"] != plan["task"]:
        return f"it was of task '{before['task']}'"
    if before["model"] != plan["model"]:
        return "the model has other tasks now"
    was, now = before["options"], plan["options"]
    changed = [f"{key} was {was.get(key)} and is {value}" for key, value in now.items() if was.get(key) != value]
    return ", ".join(changed) or _OTHER[next(key for key in _OTHER if before[key] != plan[key])]
