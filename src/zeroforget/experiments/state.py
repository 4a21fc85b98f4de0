"""A method on disk after a task: structure and figures as JSON, tensors as safetensors. No pickle."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zeroforget.experiments.checking import conform
from zeroforget.experiments.disk import damaged, read_json, write_json
from zeroforget.files.atomic import place
from zeroforget.methods import Method
from zeroforget.training.checkpoint import Checkpoint, DamagedCheckpoint

RECORD = "task.json"
TENSORS = "state.safetensors"
FIGURES: dict[str, Any] = {
    "name": str,
    "classes": int,
    "accuracy": list[float],
    "log": dict[str, Any],
    "logits": str,
    "seconds": float,
    "parameters": int,
    "overhead": dict[str, int],
    "growth": dict[str, int],
    "unchanged": list[bool],
}
"""What a run notes of a finished task."""
_REMEDY = "delete the run's folder and start it again"
_OTHER = f"It was begun with another version of the method or the network: {_REMEDY}"


def save_task(folder: Path, method: Method, record: dict[str, Any]) -> None:
    """Write a finished task's folder aside and rename it into place; `record` goes into task.json."""
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    Checkpoint(aside / TENSORS).save(dict(method.state_dict()), {})
    write_json(aside / RECORD, record | {"structure": method.structure()}, seal=True)
    place(aside, folder)


def load_record(folder: Path, needed: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """A finished task's task.json, or None. It must have the structure and what else is `needed`."""
    file = folder / RECORD
    if not file.exists():
        return None
    record = read_json(file, _REMEDY)
    for name, kind in ({"structure": Any} | dict(needed or {})).items():
        if name not in record:
            raise damaged(file, f"it lacks '{name}'", _REMEDY)
        try:
            conform(record[name], kind, f"'{name}'")
        except ValueError as error:
            raise damaged(file, str(error), _REMEDY) from error
    return record


def load_method(folder: Path, method: Method) -> None:
    """Bring a method that was just built to where it stood when the task was finished."""
    record = load_record(folder)
    try:
        saved = Checkpoint(folder / TENSORS).load()
    except DamagedCheckpoint as error:
        raise ValueError(f"{error}; {_REMEDY}") from error
    if record is None or saved is None:
        raise ValueError(f"{folder} lacks {RECORD} or {TENSORS}; {_REMEDY}")
    method.replay(record["structure"])
    load_tensors(method, saved[0], str(folder))


@torch.no_grad()
def load_tensors(method: Method, saved: dict[str, torch.Tensor], where: str, advice: str = _OTHER) -> None:
    """Copy tensors by name; the first that does not fit is named."""
    own = method.state_dict()
    for name in sorted(own.keys() | saved.keys()):
        if name not in saved:
            raise ValueError(f"{where}: tensor '{name}' is missing from what was saved. {advice}")
        if name not in own:
            raise ValueError(f"{where}: tensor '{name}' was saved, but the method has none of that name. {advice}")
        if own[name].shape != saved[name].shape or own[name].dtype != saved[name].dtype:
            raise ValueError(
                f"{where}: tensor '{name}' was saved as {tuple(saved[name].shape)} {saved[name].dtype}, "
                f"but the method has {tuple(own[name].shape)} {own[name].dtype}. {advice}"
            )
    for name, tensor in own.items():
        tensor.copy_(saved[name])
