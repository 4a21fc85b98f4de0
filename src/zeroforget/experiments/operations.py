"""How many operations learning and answering take: torch counts the products of one step, or of one answer, as they
run (a multiplication and an addition are two), and a step's are multiplied by the images that training saw."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from zeroforget.data import Task
from zeroforget.training import Fit, FitLog
from zeroforget.training.evaluate import Predictor
from zeroforget.training.feed import LoadedTask
from zeroforget.training.fit import Turns
from zeroforget.training.learner import Learner

LOOKED_AT = 4
"""So many images make the step that is counted; each image of a batch costs the same."""


@dataclass
class CountingFit(Fit):
    """A fit that adds up the operations of all that it trains, the candidates of a growth search included."""

    operations: int = field(default=0, init=False, compare=False)

    def race(
        self,
        learners: Sequence[Learner],
        task: Task | LoadedTask,
        index: int,
        turns: Turns | None = None,
        **changes: Any,
    ) -> list[FitLog]:
        """Count a step of each before they train."""
        assert isinstance(task, Task), "experiments learn from splits"
        device = replace(self.regime, **changes).device
        each = [of_a_step(learner, task, index, device) for learner in learners]
        logs = super().race(learners, task, index, turns, **changes)
        images = len(task.train)
        self.operations += sum(count * images * len(log.epochs) for count, log in zip(each, logs, strict=True))
        return logs


def of_a_step(learner: Learner, task: Task, index: int, device: str) -> int:
    """What a step costs for each image, forward and back, on a copy: nothing of the learner moves, nor a random number.

    A step that cannot be copied or run by itself counts nothing; its training will say why.
    """
    rows = torch.arange(min(LOOKED_AT, len(task.train)), device=task.train.labels.device)
    images, y = task.train.batch(rows)
    cuda = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(cuda):
        try:
            twin = copy.deepcopy(learner)
            twin.train()
            twin.before_step(0.0)
            x = task.prepare.test(images.to(device))
            with FlopCounterMode(display=False) as counter:
                loss = twin.loss(x, y.to(device), index)
                if loss.requires_grad:
                    loss.backward()
        except (ValueError, RuntimeError, TypeError, AttributeError, NotImplementedError):
            return 0
    total: int = counter.get_total_flops()
    return round(total / len(rows))


@torch.no_grad()
def of_an_answer(predictor: Predictor, x: Tensor) -> int:
    """What one image's logits cost."""
    with FlopCounterMode(display=False) as counter:
        predictor(x[:1])
    total: int = counter.get_total_flops()
    return total
