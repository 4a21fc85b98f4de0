"""TFM with the second training that PackNet has, to tell how much of PackNet's accuracy comes from that training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar

from zeroforget.data import Task
from zeroforget.methods.tfm import Tfm
from zeroforget.training import Fit, FitLog
from zeroforget.training.log import joined


class Again(Tfm):
    """Each task trains what is born with it twice: under the regime, then from the weights that were kept, at a tenth
    of the rate, as PackNet does after pruning. Use it as the method `zeroforget.experiments.again:Again`; it has TFM's
    options."""

    rate: ClassVar[float] = 0.1
    """The second training's learning rate, as a share of the regime's."""

    def learn(self, task: Task, fit: Fit, past: Sequence[Task] = ()) -> FitLog:
        """As TFM does, then once more; if that fails, the task was never learned."""
        before = copy.deepcopy(self.net) if not self.specs else self.net  # a first task cannot be dropped
        first = super().learn(task, fit, past)
        try:
            second = fit(self, task, len(self.specs) - 1, lr=fit.regime.lr * self.rate)
        except BaseException:
            if self.net is before:
                self.drop_task()
            else:
                self.net = before
                self.specs.pop()
            raise
        return joined(first, second)
