"""Checkpoints in a folder: tasks do not mix, another try goes on, files of earlier versions and of others are told."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.training.test_fit import task
from zeroforget.methods import Method, TaskSpec
from zeroforget.methods.registry import build
from zeroforget.training import Diverged, Fit, Progress, Regime
from zeroforget.training.checkpoint import Checkpoint, Later, Phases, optimizer_tensors, restore_optimizer
from zeroforget.training.seeding import seeded

REGIME = Regime(lr=0.05, epochs=3, batch_size=54)
METHODS: dict[str, dict[str, Any]] = {
    "finetuning": {},
    "packnet": {},
    "progress-compress": {},
    "tfm": {"search": [0.0, 0.1], "search_start": [0.5, 0.6]},
}


class Stop(Exception):
    pass


def at(index: int, phase: int, epoch: int) -> Callable[[Progress], None]:
    """Stops the first time that it is there."""
    come = []

    def stop(progress: Progress) -> None:
        if (progress.index, progress.phase, progress.epoch) == (index, phase, epoch) and not come:
            come.append(progress)
            raise Stop

    return stop


def method(name: str, width: int = 8) -> Method:
    with seeded("net"):
        net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 8), nn.ReLU())
        return build(name, net, torch.randn(2, 4), **METHODS[name])


def learn(learner: Method, index: int, fit: Fit) -> None:
    with seeded("learn", index):
        learner.learn(task(str(index), seed=index), fit)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@cache
def whole(name: str) -> dict[str, Tensor]:
    """Both tasks, never interrupted."""
    learner = method(name)
    for index in range(2):
        learn(learner, index, Fit(REGIME))
    return learner.state_dict()


@pytest.mark.parametrize("name", ["finetuning", "packnet", "tfm"])
def test_one_fit_and_folder_serve_several_tasks_and_runs(name: str, tmp_path: Path) -> None:
    expected = whole(name)
    for progress in (at(1, 0, 1), None):
        fit, learner = Fit(REGIME, folder=tmp_path, progress=progress), method(name)
        learn(learner, 0, fit)
        if progress is not None:
            with pytest.raises(Stop):
                learn(learner, 1, fit)
    epochs: list[Progress] = []
    fit.progress = epochs.append
    learn(learner, 1, fit)
    assert equal(learner.state_dict(), expected)
    assert 0 not in {p.epoch for p in epochs if p.phase == 0}


@pytest.mark.parametrize(
    ("name", "phase", "folder"),
    [
        ("finetuning", 0, True),
        ("finetuning", 0, False),
        ("packnet", 0, True),
        ("packnet", 1, True),
        ("packnet", 1, False),
        ("progress-compress", 1, True),
        ("tfm", 1, True),
    ],
)
def test_another_try_with_the_same_fit_goes_on(name: str, phase: int, folder: bool, tmp_path: Path) -> None:
    fit, learner = Fit(REGIME, folder=tmp_path if folder else None, progress=at(1, phase, 2)), method(name)
    learn(learner, 0, fit)
    with pytest.raises(Stop):
        learn(learner, 1, fit)
    steps: list[Progress] = []
    fit.progress = steps.append
    learn(learner, 1, fit)
    assert equal(learner.state_dict(), whole(name))
    assert (min(p.epoch for p in steps if p.phase == phase) > 0) == folder


@pytest.mark.parametrize(("name", "phase"), [("finetuning", 0), ("packnet", 1), ("progress-compress", 1), ("tfm", 1)])
def test_checkpoints_written_beside_training_are_gone_on_from(
    name: str, phase: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: some epochs leave none, and what is written is of the epoch that handed it over."""
    slow, written = Checkpoint.save, list[str]()

    def save(file: Checkpoint, *given: Any) -> None:
        time.sleep(0.02)
        slow(file, *given)
        written.append(threading.current_thread().name)

    monkeypatch.setattr(Checkpoint, "save", save)
    options = {"options": {"momentum": 0.9}, "keep": "last"}
    expected = method(name)
    for index in range(2):
        learn(expected, index, Fit(replace(REGIME, epochs=6, **options)))
    fit, learner = (
        Fit(replace(REGIME, epochs=6, **options), folder=tmp_path, progress=at(1, phase, 4), save_every=0.0),
        method(name),
    )
    learn(learner, 0, fit)
    with pytest.raises(Stop):
        learn(learner, 1, fit)
    assert any(thread.startswith("checkpoint") for thread in written)
    steps: list[Progress] = []
    again = Fit(fit.regime, folder=tmp_path, progress=steps.append)
    again_learner = method(name)
    learn(again_learner, 0, again)
    learn(again_learner, 1, again)
    assert equal(again_learner.state_dict(), expected.state_dict())
    assert min(p.epoch for p in steps if p.index == 1 and p.phase == phase) > 0


def test_what_is_written_later_is_what_was_handed_over(tmp_path: Path) -> None:
    later, file, value = Later(), Checkpoint(tmp_path / "phase.safetensors"), torch.zeros(1000)
    for number in range(20):
        value.fill_(number)
        later.save(file, {"value": value}, {"number": number})
        value.fill_(-1)
        if number % 3 == 0:
            later.wait()
            assert not later.busy
            loaded = file.load()
            assert loaded is not None
            assert loaded[1] == {"number": number}
            assert (loaded[0]["value"] == number).all()


def test_who_is_interrupted_while_it_waits_may_wait_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later, file, go = Later(), Checkpoint(tmp_path / "phase.safetensors"), threading.Event()
    plain = Checkpoint.save
    monkeypatch.setattr(Checkpoint, "save", lambda *given: (go.wait(), plain(*given)))
    later.save(file, {"value": torch.ones(2)}, {})
    result = Future.result

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        later.wait()
    monkeypatch.setattr(Future, "result", result)
    assert later.busy
    go.set()
    later.wait()
    assert file.load() is not None


def test_what_could_not_be_written_later_is_raised_once_and_copies_write_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no folder")
    later = Later()
    later.save(Checkpoint(tmp_path / "taken" / "phase.safetensors"), {"value": torch.ones(2)}, {})
    with pytest.raises(OSError, match="taken"):
        later.wait()
    later.wait()
    for other in (copy.deepcopy(later), pickle.loads(pickle.dumps(later))):
        other.save(Checkpoint(tmp_path / "phase.safetensors"), {"value": torch.ones(2)}, {})
        other.wait()
    assert Checkpoint(tmp_path / "phase.safetensors").load() is not None


@pytest.mark.parametrize(("keep", "epochs"), [("best", 6), ("accurate", 7)])
def test_a_finished_phase_is_gone_on_from_at_its_best_weights(keep: str, epochs: int, tmp_path: Path) -> None:
    regime = Regime(lr=0.5, epochs=epochs, batch_size=18, keep=keep, options={"momentum": 0.9})
    expected, learner = method("finetuning"), method("finetuning")
    with seeded("learn", 0):
        log = expected.learn(task("0", seed=0), Fit(regime))
    assert log.best < len(log.epochs) - 1
    learn(method("finetuning"), 0, Fit(regime, folder=tmp_path))
    more: list[Progress] = []
    learn(learner, 0, Fit(regime, folder=tmp_path, progress=more.append))
    assert not more
    assert equal(learner.state_dict(), expected.state_dict())


def test_a_checkpoint_that_could_not_be_written_later_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "taken"
    folder.write_text("no folder")
    learner = method("finetuning")
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    with pytest.raises(OSError, match="taken"):
        learn(learner, 0, Fit(REGIME, folder=folder, save_every=0.0))
    assert equal(learner.state_dict(), before)


def test_what_diverged_is_not_gone_on_with(tmp_path: Path) -> None:
    fit = Fit(Regime(lr=1e30, epochs=3, batch_size=18), folder=tmp_path)
    learner, other = method("finetuning"), method("finetuning")
    with pytest.raises(Diverged):
        learn(learner, 0, fit)
    fit.regime, fit.progress = REGIME, at(0, 1, 1)
    with pytest.raises(Stop):
        learn(learner, 0, fit)
    learn(learner, 0, fit)
    learn(other, 0, Fit(REGIME, _phases=Phases({0: 1})))
    assert equal(learner.state_dict(), other.state_dict())


def test_a_phase_tried_again_by_itself_keeps_its_number() -> None:
    layer = Layers()
    phases = Phases()
    assert [phases.take([layer], 0) for _ in range(2)] == [range(1), range(1, 2)]
    phases.give_back(range(1, 2), 0)
    assert phases.take([layer], 0) == range(1, 2)
    phases.give_back(range(1, 2), 0)
    layer.head = nn.Linear(2, 2)
    assert phases.take([layer], 0) == range(1)
    assert phases.take([Layers(), Layers()], 0) == range(1, 3)
    assert phases.take([layer], 1) == range(1)


def test_a_phase_that_came_to_its_end_keeps_its_number_whatever_becomes_of_its_structure() -> None:
    layer, phases = Layers(), Phases()
    assert phases.take([layer], 0) == range(1)
    layer.head = nn.Linear(2, 2)
    assert phases.take([layer], 0) == range(1, 2)


def test_what_diverged_is_not_begun_with_again_either() -> None:
    """Not even when the next try is interrupted and its structure dropped."""
    layer, phases = Layers(), Phases()
    assert phases.take([layer], 0) == range(1)
    phases.forget(0)
    assert phases.take([layer], 0) == range(1, 2)
    phases.give_back(range(1, 2), 0)
    layer.head = nn.Linear(2, 2)
    assert phases.take([layer], 0) == range(1, 2)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def trainable(self) -> list[nn.Parameter]:
        return list(self.parameters())


@pytest.mark.parametrize("name", ["finetuning", "packnet"])
def test_an_interrupted_run_of_an_earlier_version_goes_on(name: str, tmp_path: Path) -> None:
    learner = method(name)
    learn(learner, 0, Fit(REGIME))
    last = 1 if name == "packnet" else 0
    with pytest.raises(Stop):
        learn(learner, 1, Fit(REGIME, folder=tmp_path, progress=at(1, last, 2)))
    for phase in range(last + 1):
        as_before(tmp_path / f"phase-{phase:03d}-task-001.safetensors", tmp_path / f"phase-{phase:03d}.safetensors")
    steps: list[Progress] = []
    learn(learner, 1, Fit(REGIME, folder=tmp_path, progress=steps.append))
    assert equal(learner.state_dict(), whole(name))
    assert {(p.phase, p.epoch) for p in steps} == {(last, 2)}


def as_before(path: Path, name: Path) -> None:
    """The file as it was when it neither named its task nor knew it."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        del facts["sha256"]
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    del facts["task"]
    path.unlink()
    save_file(tensors, name, metadata={"facts": json.dumps(facts)})


def test_a_checkpoint_holds_tied_tensors_and_all_that_an_optimizer_remembers(tmp_path: Path) -> None:
    tied, file = torch.rand(3), Checkpoint(tmp_path / "new" / "phase.safetensors")
    assert file.load() is None
    file.save({"a": tied, "b": tied}, {"epoch": 3})
    loaded = file.load()
    assert loaded is not None
    assert torch.equal(loaded[0]["b"], tied)
    assert loaded[1] == {"epoch": 3}
    weight = torch.nn.Parameter(torch.zeros(2))
    first, second = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)
    first.state[weight].update(step=7, average=torch.ones(2))  # a number beside a tensor
    restore_optimizer(second, *optimizer_tensors(first))
    assert second.state[weight]["step"] == 7
    assert torch.equal(second.state[weight]["average"], torch.ones(2))


def test_a_checkpoint_of_other_shapes_or_types_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    learn(method("finetuning", 1), 0, Fit(REGIME, folder=tmp_path))
    for learner in (method("finetuning", 8), method("finetuning", 1).double()):
        state = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
        data = task("0", seed=0)
        with pytest.raises(ValueError, match=r"belongs to another network: .*net\.0\.weight.* do not match"):
            learner.learn(data, Fit(REGIME, folder=tmp_path))
        assert equal(learner.state_dict(), state)


def test_a_resumed_training_that_is_stopped_again_leaves_the_weights_of_before(tmp_path: Path) -> None:
    """Not those of the checkpoint."""
    learner = method("finetuning")
    learner.add_task(TaskSpec("0", 3))
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    for epoch in (1, 2):
        with pytest.raises(Stop):
            Fit(REGIME, folder=tmp_path, progress=at(0, 0, epoch))(learner, task("0"), 0)
        assert equal(learner.state_dict(), before)


def test_what_lies_otherwise_in_memory_is_saved_and_comes_back_so(tmp_path: Path) -> None:
    """A fused optimizer wants what it remembers to lie as its parameter does."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 2, 4, 5).contiguous(memory_format=torch.channels_last))
    assert not weight.is_contiguous()
    first, second = (torch.optim.SGD([weight], lr=0.1, momentum=0.9) for _ in range(2))
    weight.grad = torch.randn_like(weight)
    first.step()
    tensors, numbers = optimizer_tensors(first)
    file = Checkpoint(tmp_path / "phase.safetensors")
    file.save(tensors | {"weight": weight}, {})
    loaded, _ = file.load() or ({}, {})
    assert torch.equal(loaded.pop("weight"), weight)
    restore_optimizer(second, loaded, numbers)
    assert torch.equal(second.state[weight]["momentum_buffer"], first.state[weight]["momentum_buffer"])
    assert second.state[weight]["momentum_buffer"].stride() == weight.stride()
