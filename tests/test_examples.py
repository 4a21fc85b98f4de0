"""The examples for Lightning and Avalanche run with these, or with small stand-ins where they are not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    """What a callback and a module can expect of Lightning's, in its order."""

    def __init__(self, *, max_epochs: int, callbacks: list[Any], **_: Any) -> None:
        self.max_epochs, self.callbacks = max_epochs, callbacks

    def fit(self, module: Any, data: Any) -> None:
        for callback in self.callbacks:
            callback.setup(self, module, "fit")
        optimizer = module.configure_optimizers()
        for _ in range(self.max_epochs):
            for number, batch in enumerate(data):
                optimizer.zero_grad()
                module.training_step(batch, number).backward()
                optimizer.step()
        for callback in self.callbacks:
            callback.on_fit_end(self, module)


class SupervisedTemplate:
    """What a strategy can expect of Avalanche's, in its order."""

    forward: Any
    check_model_and_optimizer: Any

    def __init__(self, *, model: Any, optimizer: Any, criterion: Any, train_epochs: int, **_: Any) -> None:
        self.model, self.optimizer, self.criterion, self.epochs = model, optimizer, criterion, train_epochs
        self.device = "cpu"

    def _batches(self, experience: Any) -> Any:
        self.experience = experience
        for self.mb_x, self.mb_y in DataLoader(TensorDataset(*experience.dataset), batch_size=32):
            self.mb_task_id = torch.full((len(self.mb_x),), experience.task_label)
            yield

    def train(self, experience: Any) -> None:
        self.model.train()
        self.experience = experience
        self.check_model_and_optimizer()
        for _ in range(self.epochs):
            for _ in self._batches(experience):
                self.optimizer.zero_grad()
                self.criterion(self.forward(), self.mb_y).backward()
                self.optimizer.step()

    @torch.no_grad()
    def eval(self, stream: Any) -> dict[str, float]:
        self.model.eval()
        found = {}
        for experience in stream:
            right = [(self.forward().argmax(1) == self.mb_y).float().mean().item() for _ in self._batches(experience)]
            found[f"Top1/{experience.task_label}"] = sum(right) / len(right)
        return found


def benchmark(train_tensors: Any, test_tensors: Any, task_labels: Any) -> Any:
    stream = [
        SimpleNamespace(dataset=data, task_label=label, classes_in_this_experience=data[1].unique().tolist())
        for data, label in zip(train_tensors, task_labels, strict=True)
    ]
    return SimpleNamespace(train_stream=stream, test_stream=stream)


STAND_INS: dict[str, dict[str, dict[str, Any]]] = {
    "lightning": {"lightning": {"Callback": object, "LightningModule": nn.Module, "Trainer": Trainer}},
    "avalanche": {
        "avalanche": {},
        "avalanche.benchmarks": {"tensors_benchmark": benchmark},
        "avalanche.evaluation": {},
        "avalanche.evaluation.metrics": {"accuracy_metrics": lambda **_: None},
        "avalanche.training": {},
        "avalanche.training.plugins": {"EvaluationPlugin": lambda *_, **__: None},
        "avalanche.training.templates": {"SupervisedTemplate": SupervisedTemplate},
    },
}


def example(library: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec(library) is None:
        for path, names in STAND_INS[library].items():
            module = ModuleType(path)
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, path, module)
    return importlib.import_module(f"examples.{name}")


@pytest.mark.filterwarnings("default")  # of the libraries
def test_a_lightning_callback_adds_tasks_and_proves_the_old_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = example("lightning", "lightning_callback", monkeypatch)
    net = shown.main()
    assert net.tasks == ("signs", "sums")
    assert all(int(line.split()[1]) >= 90 for line in capsys.readouterr().out.splitlines() if "% right" in line)
    task = shown.NextTask("third", classes=2, growth=0.25)
    task.setup(None, SimpleNamespace(net=net), "fit")
    task.before["signs"] = "other bits"
    with pytest.raises(RuntimeError, match="these tasks changed: signs"):
        task.on_fit_end(None, SimpleNamespace(net=net))


@pytest.mark.filterwarnings("default")
def test_an_avalanche_strategy_grows_for_each_experience(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = example("avalanche", "avalanche_strategy", monkeypatch).main()
    assert net.tasks == ("0", "1")
    told = [line for line in capsys.readouterr().out.splitlines() if line.endswith("%")]
    assert len(told) == 2
    assert all(int(line.split()[-2]) >= 85 for line in told)
