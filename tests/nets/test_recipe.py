"""The recipe of `tiny-imagenet-random-best.toml` at toy size: its parts work together and nothing forgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zeroforget import nets
from zeroforget.data import Preparation, Split, Task
from zeroforget.experiments.experiment import Experiment
from zeroforget.growing.layers import GrowingNorm
from zeroforget.methods import registry
from zeroforget.training import Fit, logits
from zeroforget.training.seeding import seeded

FILE = Path(__file__).parents[2] / "experiments" / "tiny-imagenet-random-best.toml"


def task(number: int) -> Task:
    """Two classes of coloured noise."""
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(48) % 2
    shade = (60 + 90 * y).view(-1, 1, 1, 1)
    images = (shade + torch.randint(0, 80, (48, 3, 16, 16), generator=draw)).to(torch.uint8)
    parts = [Split(images, y[rows], rows) for rows in torch.arange(48).split([32, 8, 8])]
    options = Experiment.load(FILE).scenarios[0].options
    prepare = Preparation((0.5,) * 3, (0.25,) * 3, flip=True, pad=2, zoom=options.get("zoom", 1.0))
    return Task(f"t{number}", ("dark", "light"), parts[0], parts[1], parts[2], prepare)


@pytest.mark.parametrize(("dropout", "precision"), [(0.0, "bf16"), (0.5, "float32")])
def test_it_grows_with_a_normalization_for_each_task_and_keeps_every_bit(dropout: float, precision: str) -> None:
    experiment = Experiment.load(FILE)
    options = experiment.network.options | {"width": 0.06, "dropout": dropout}
    regime = replace(experiment.regime, epochs=3, batch_size=16, device="cpu", precision=precision)
    choice = next(choice for choice in experiment.methods if choice.label == "tfm")
    with seeded("init"):
        net = nets.build(experiment.network.name, (3, 16, 16), **options)
        method = registry.build("tfm", net, torch.randn(2, 3, 16, 16), **choice.options)
    tasks = [task(k) for k in range(3)]
    learned: list[torch.Tensor] = []
    for each in tasks:
        with seeded("learn", each.name):
            log = method.learn(each, Fit(regime))
        assert len(log.epochs) == 3
        learned.append(logits(method.predictor(len(learned)), each.test, each.prepare))
    for k, each in enumerate(tasks):
        assert torch.equal(logits(method.predictor(k), each.test, each.prepare), learned[k])
    norms = [module for module in method.modules() if isinstance(module, GrowingNorm)]
    assert len(norms) == 10  # one behind every convolution
    assert all(len(norm.tasks) == 3 for norm in norms)
