"""zeroforget in Avalanche: a strategy that grows a network for each experience and trains what is newborn.

Experiences are tasks: the benchmark needs task labels and classes that count from 0 in each. Run it with
`python -m examples.avalanche_strategy`, where `pip install avalanche-lib` was run.
"""

from __future__ import annotations

from typing import Any

import torch
from avalanche.benchmarks import tensors_benchmark
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

import zeroforget


class Growing(SupervisedTemplate):  # type: ignore[misc]
    """Adds a task for each new experience; `growth` is its share of the full network."""

    model: zeroforget.GrowingNetwork

    def __init__(
        self, *, net: zeroforget.GrowingNetwork, growth: float = 0.1, lr: float = 0.01, **options: Any
    ) -> None:
        self.growth, self.lr = growth, lr
        nothing = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)  # made anew for each experience, below
        super().__init__(model=net, optimizer=nothing, criterion=nn.CrossEntropyLoss(), **options)

    def model_adaptation(self, model: Any = None) -> Any:
        """Evaluation calls it too, and needs nothing."""
        return self.model.to(self.device)

    def check_model_and_optimizer(self, **options: Any) -> None:
        """Comes before an experience is trained: a new task, and an optimizer of what is newborn."""
        name = str(self.experience.task_label)
        if name not in self.model.tasks:
            classes = len(self.experience.classes_in_this_experience)
            self.model.add_task(name, classes, growth=self.growth if self.model.tasks else None)
        self.model = self.model_adaptation().train()
        self.optimizer = torch.optim.AdamW(self.model.newborn(), lr=self.lr)

    def forward(self) -> Tensor:
        """The logits of a batch, which is of one task."""
        (task,) = self.mb_task_id.unique().tolist()
        out: Tensor = self.model(self.mb_x, str(task))
        return out


def main() -> zeroforget.GrowingNetwork:
    """Two tasks of two classes each, on generated points."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    tasks = [(x, (x[:, 0] > 0).long()), (x, (x.sum(1) > 0).long())]
    benchmark = tensors_benchmark(train_tensors=tasks, test_tensors=tasks, task_labels=[0, 1])
    net = zeroforget.grow(nn.Sequential(nn.Linear(8, 64), nn.ReLU()), x[:4], start=0.5)
    told = EvaluationPlugin(accuracy_metrics(experience=True), loggers=[])
    strategy = Growing(net=net, growth=0.25, train_mb_size=32, train_epochs=5, evaluator=told)
    before: dict[str, str] = {}
    for experience in benchmark.train_stream:
        strategy.train(experience)
        assert all(net.fingerprint(task) == bits for task, bits in before.items()), "an earlier task changed"
        before = {task: net.fingerprint(task) for task in net.tasks}
    for name, value in strategy.eval(benchmark.test_stream).items():
        print(f"{name}: {100 * value:.0f} %")
    return net


if __name__ == "__main__":
    print(main())
