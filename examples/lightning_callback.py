"""zeroforget in Lightning: a callback that adds a task before training and proves afterwards that no older one moved.

Run it with `python -m examples.lightning_callback`, where `pip install lightning` was run.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zeroforget


class NextTask(Callback):  # type: ignore[misc]
    """Adds a task when training begins; raises an error when it ends if an earlier task changed by a bit."""

    def __init__(self, name: str, classes: int, growth: float | None = None) -> None:
        self.name, self.classes, self.growth = name, classes, growth
        self.before: dict[str, str] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Comes before `configure_optimizers`, so the optimizer knows what is newborn."""
        net = pl_module.net
        if stage == "fit" and self.name not in net.tasks:
            self.before = {task: net.fingerprint(task) for task in net.tasks}
            net.add_task(self.name, self.classes, growth=self.growth)
        net.train()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The proof."""
        moved = [task for task, bits in self.before.items() if pl_module.net.fingerprint(task) != bits]
        if moved:
            raise RuntimeError(f"these tasks changed: {', '.join(moved)}")


class Growing(LightningModule):  # type: ignore[misc]
    """Trains the newest task of a growing network."""

    def __init__(self, net: zeroforget.GrowingNetwork, lr: float = 0.01) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        return nn.functional.cross_entropy(self.net(x, self.net.tasks[-1]), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of what is newborn."""
        return torch.optim.AdamW(self.net.newborn(), lr=self.lr)


def main() -> zeroforget.GrowingNetwork:
    """Two tasks on generated data."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    net = zeroforget.grow(nn.Sequential(nn.Linear(8, 64), nn.ReLU()), x[:4], start=0.5)
    for task, labels, growth in (("signs", x[:, 0] > 0, None), ("sums", x.sum(1) > 0, 0.25)):
        data = DataLoader(TensorDataset(x, labels.long()), batch_size=32)
        callbacks = [NextTask(task, classes=2, growth=growth)]
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        Trainer(max_epochs=5, accelerator="cpu", callbacks=callbacks, enable_model_summary=False, **quiet).fit(
            Growing(net), data
        )
        right = (net.eval()(x, task).argmax(1) == labels).float().mean()
        print(f"{task}: {100 * right:.0f} % right")
    return net


if __name__ == "__main__":
    print(main())
