"""Nothing ships broken: every method of every file in `experiments/` takes real steps on small data in the official
layouts, with the file's own network and regime, and its loss falls."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data import helpers
from zeroforget.data import Scenario, Task
from zeroforget.data.scenarios import semantic_groups, superclasses
from zeroforget.experiments.experiment import Choice, Experiment
from zeroforget.experiments.resolve import NamedPart, make_network, make_scenario
from zeroforget.methods import Method, registry
from zeroforget.training import Fit
from zeroforget.training.seeding import seeded

FILES = {path.stem: path for path in sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))}
STEPS = {"narrow": 9, "whole": 16}
"""A whole network's loss may rise for some steps before it falls."""
SHARE = ["digits", "multi", "tiny-imagenet-40", "tiny-imagenet-random"]
"""Of the files, those that `make test` looks at, a network each; `make soak` takes all of them, whole."""
load = cache(Experiment.load)


def tiny_imagenet(folder: Path) -> None:
    helpers.tiny_imagenet(folder, tuple(sorted(chain.from_iterable(semantic_groups().values()))), train=3, val=1)


def cifar100(folder: Path) -> None:
    helpers.cifar100(folder, names=sorted(chain.from_iterable(superclasses().values())))


CODES: tuple[str, ...] = ("n01440764", "n02012849", "n03126707", *(f"n9{number:07d}" for number in range(17)))
MADE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "fashion-mnist": ("fashion-mnist", helpers.mnist),
    "cifar100": ("cifar-100-python", cifar100),
    "tiny-imagenet": ("tiny-imagenet-200", tiny_imagenet),
    "imagenet": ("imagenet", lambda folder: helpers.imagenet(folder, False, CODES, train=2)),
    "flowers": ("flowers-102", lambda folder: helpers.flowers(folder, 8)),
    "birds": ("CUB_200_2011", lambda folder: helpers.birds(folder, 8)),
    "actions": ("Stanford40", lambda folder: helpers.actions(folder, 8)),
    "scenes": ("indoorCVPR_09", helpers.scenes),
    "cars": ("stanford_cars", helpers.cars),
    "aircraft": ("fgvc-aircraft-2013b", helpers.aircraft),
}
"""Data set → its folder, and what writes a small one in its official layout."""


@pytest.mark.parametrize("name", FILES)
def test_reading_a_file_builds_no_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("a parameter was made")

    monkeypatch.setattr(torch.nn.Parameter, "__new__", refuse)
    assert Experiment.load(FILES[name]).runs()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def own_places(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("ZEROFORGET_CACHE", str(root / "cache"))
    monkeypatch.setenv("ZEROFORGET_DATA", str(root))


def scenario(part: NamedPart, root: Path) -> Scenario:
    """The scenario of a file, of data that are written when they are first wanted."""
    from zeroforget.data import plan

    names = () if ":" in part.name else plan(part.name).data
    for name in names:
        if name in MADE and not (root / MADE[name][0]).exists():
            folder, write = MADE[name]
            write(root / folder)
    return make_scenario(part, root)


def losses(experiment: Experiment, choice: Choice, made: Scenario, width: float) -> list[list[float]]:
    """The training losses of a method's first two tasks, a step an epoch or a few."""
    options = dict(choice.options) | ({"begin": 2} if "begin" in choice.options else {})
    network = replace(experiment.network, options=experiment.network.options | {"width": width})
    with seeded("init", 0):
        net = make_network(network, made.shape)
    with seeded("method", 0):
        method = registry.build(choice.method, net, made.example(), **options)
    regime = replace(experiment.regime, epochs=STEPS["whole" if width == 1 else "narrow"])
    found = []
    for index, task in enumerate(made.tasks[:2]):
        past = made.tasks[:index] if method.uses_past_data else ()
        with seeded("learn", 0, index):
            log = method.learn(task, Fit(regime), past)
        assert log.stopped or not log.epochs
        found.append([epoch.loss for epoch in log.epochs])
        if log.epochs:  # dropout hides what a few steps do: the last figure is without
            found[-1].append(loss_without_dropout(method, task, index))
    return found


@torch.no_grad()
def loss_without_dropout(method: Method, task: Task, index: int) -> float:
    """The mean loss on the training images, as the method answers."""
    images, labels = task.train.batch(torch.arange(len(task.train)))
    answers = method.eval()(task.prepare.test(images), index)
    return float(torch.nn.functional.cross_entropy(answers, labels))


def check(name: str, labels: list[str], root: Path, width: float, scenarios: int | None = None) -> None:
    experiment = load(FILES[name])
    for part in experiment.scenarios[:scenarios]:
        made = scenario(part, root)
        for choice in experiment.methods:
            if choice.label not in labels:
                continue
            for task, found in zip(made.tasks, losses(experiment, choice, made, width), strict=False):
                where = f"{part.name}, {choice.label}: {found}"
                assert torch.tensor(found).isfinite().all(), where
                # Few images may be right by chance at the start: then it comes to guessing, or halves what it rose to.
                enough = max([*found[:1], math.log(len(task.classes)), *(loss / 2 for loss in found)])
                assert not found or min(found[-3:]) < enough, where


@pytest.mark.parametrize("name", SHARE)
def test_a_method_of_some_files_learns(name: str, root: Path) -> None:
    """One that the file's name draws, narrow."""
    labels = [choice.label for choice in load(FILES[name]).methods]
    check(name, [random.Random(name).choice(labels)], root, 0.05, scenarios=1)


@pytest.mark.soak
@pytest.mark.parametrize("name", FILES)
def test_every_method_of_each_file_learns(name: str, root: Path) -> None:
    check(name, [choice.label for choice in load(FILES[name]).methods], root, 1.0)
