"""What decided the results of runs, their settings and a few figures of their data, and in what runs differ."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zeroforget.data import Scenario, Split, Task
from zeroforget.experiments.experiment import defaults
from zeroforget.experiments.results import Results
from zeroforget.files.hashes import short
from zeroforget.methods import registry

LOOKED_AT = 8
"""So many images of each part of a task are looked at."""
NEAR = 0.004
"""A grey level: decoders of different versions may differ by less in an image's mean."""
_PARTS = {"train": "training", "val": "validation", "test": "test"}


def describe_data(scenario: Scenario) -> dict[str, Any]:
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


def data_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
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


SETUP = ("method", "scenario", "search")
"""What a run's `setup` holds: parts of its configuration that runs of earlier versions did not write down."""
DRAWS = ("order", "split")
"""Of a scenario, what each seed may draw anew."""
PLACES = {"device", "capture"}
"""Of a regime, what says where and how a run computes, not what."""


def in_force(results: Results, name: str) -> Any:
    """A part of a run's configuration ("options", "regime", "tasks" or one of `SETUP`); what came with a later version
    had its default before. None: the run is of a version that did not write that part down."""
    own = _written(results, name)
    if name == "scenario" and own is not None:
        # A draw that goes by the run's seed is the same for all methods of that seed.
        return {key: value for key, value in own.items() if key not in DRAWS or value != results.seed}
    if name not in ("options", "regime", "search") or own is None:
        return own
    known = results.method if results.method in registry.names() else None
    return defaults(known)[name] | own


def _written(results: Results, name: str) -> Any:
    return results.setup.get(name) if name in SETUP else getattr(results, name)


def check_alike(method: str, runs: Sequence[Results]) -> None:
    """Refuse runs of one method that differ in more than the seed, or not in that."""
    check_seeds(method, runs)
    for other in runs[1:]:
        for name in (*SETUP, "options", "regime", "tasks"):
            then, now = (in_force(each, name) for each in (runs[0], other))
            if None not in (then, now) and then != now:
                raise ValueError(
                    f"the runs of '{method}' with seeds {runs[0].seed} and {other.seed} differ in their {name}: "
                    f"{_written(runs[0], name)} and {_written(other, name)}; they cannot share a row"
                )


def check_seeds(method: str, runs: Sequence[Results]) -> None:
    """Refuse runs of one method that have a seed in common: each would stand for the other."""
    seeds = [r.seed for r in runs]
    if twice := [seed for seed in sorted(set(seeds)) if seeds.count(seed) > 1]:
        home = f" of the experiment '{runs[0].experiment}'" if runs[0].experiment else ""
        raise ValueError(
            f"method '{method}'{home} is there twice on {runs[0].scenario} with seed {twice[0]}; give one run of each"
        )


def settings(runs: Sequence[Results]) -> list[dict[str, Any]]:
    """For each of several runs of one method, all that decided its results: `strength`, `regime.lr`, `search.drop`.

    What one of them does not tell counts for none.
    """
    told = [name for name in SETUP if all(in_force(run, name) is not None for run in runs)]
    return [
        dict(in_force(run, "options"))
        | {key: value for name in ("regime", *told) for key, value in _flat(name, in_force(run, name)).items()}
        for run in runs
    ]


def same_training(one: Results, other: Results) -> bool:
    """Whether two methods were trained under one regime, on images that were varied alike."""
    return not _otherwise(one, other)


def unlike(methods: Sequence[Sequence[Results]], titles: Sequence[str]) -> tuple[str, ...]:
    """A note on the methods of a table that were trained otherwise than most of them, and how."""
    firsts = [runs[0] for runs in methods]
    votes = Counter(
        i for i, j in itertools.product(range(len(firsts)), repeat=2) if same_training(firsts[i], firsts[j])
    )
    if not votes:
        return ()
    usual = firsts[votes.most_common(1)[0][0]]
    parts = [
        f"{title} ({', '.join(found)})"
        for title, each in zip(titles, firsts, strict=True)
        if (found := _otherwise(usual, each))
    ]
    return (f"Not trained as the others, so not to be compared with them: {'; '.join(parts)}.",) if parts else ()


def _otherwise(usual: Results, each: Results) -> list[str]:
    """'regime.lr 0.1 instead of 0.05' for each value in which one run's training differs from another's."""
    found = []
    for name in ("regime", "scenario"):
        theirs, own = (in_force(run, name) for run in (usual, each))
        if None in (theirs, own):
            continue
        theirs, own = _flat(name, theirs), _flat(name, own)
        keys = [key for key in theirs | own if key.rpartition(".")[2] not in PLACES]
        found += [f"{k} {own.get(k)} instead of {theirs.get(k)}" for k in keys if own.get(k) != theirs.get(k)]
    return found


def other_code(runs: Sequence[Results]) -> bool:
    """Whether the code of somebody's method is not the same for all of its runs."""
    return len({code for run in runs if (code := run.environment.get("code"))}) > 1


def _flat(name: str, values: Any) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {name: values}
