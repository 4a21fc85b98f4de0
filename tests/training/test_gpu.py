"""Training on a GPU: recorded steps, races, checkpoints beside it, images that are brought over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from zeroforget import nets
from zeroforget.data import Task, scenario
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.baselines import Finetuning
from zeroforget.methods.registry import build
from zeroforget.methods.tfm import Tfm
from zeroforget.training import Fit, Progress, Regime, feed
from zeroforget.training.checkpoint import Phases
from zeroforget.training.seeding import seeded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EXAMPLE = torch.zeros(2, 1, 8, 8)


def convolutions() -> nn.Module:
    """Nothing in it draws."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 32), nn.ReLU(),
    )  # fmt: skip


def learner(task: Task, width: int) -> Finetuning:
    with seeded("net", width):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 32))
        method = Finetuning(net, torch.zeros(2, 1, 8, 8)).to("cuda")
        method.add_task(TaskSpec(task.name, len(task.classes)))
    return method


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("capture", [True, False])
def test_those_who_race_become_what_they_would_alone(
    capture: bool, resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not resident:
        monkeypatch.setattr(feed, "budget", lambda device: -1)
    task = scenario("digits/5", seed=0).tasks[0]
    regime = Regime(epochs=4, device="cuda", capture=capture)
    widths = (48, 256, 2048)
    together = [learner(task, width) for width in widths]
    before = torch.cuda.get_rng_state()
    logs = Fit(regime).race(together, task, 0)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for phase, (width, found, log) in enumerate(zip(widths, together, logs, strict=True)):
        alone = learner(task, width)
        expected = Fit(regime, _phases=Phases({0: phase}))(alone, task, 0)
        assert [epoch.loss for epoch in log.epochs] == [epoch.loss for epoch in expected.epochs]
        state = alone.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize("name", ["finetuning", "tfm", "packnet", "lwf", "pnn"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_recorded_steps_learn_what_others_do(name: str, precision: str) -> None:
    """One epoch of two tasks, batches of two sizes: rounding apart."""
    found = []
    for capture in (True, False):
        regime = Regime(lr=0.01, epochs=1, batch_size=48, device="cuda", capture=capture, precision=precision)
        with seeded("net"):
            method = build(name, convolutions(), EXAMPLE)
        method.to("cuda")
        for task in scenario("digits/5", seed=0).tasks[:2]:
            with seeded("learn"):
                method.learn(task, Fit(regime))
        found.append({k: v.cpu() for k, v in method.state_dict().items() if v.is_floating_point()})
    for key, value in found[0].items():
        near = 1e-2 if precision == "float32" else 1e-1
        torch.testing.assert_close(value, found[1][key], rtol=near, atol=near, msg=lambda m, k=key: f"{k}: {m}")


def test_widths_are_multiples_of_8_and_replayed_as_such_elsewhere() -> None:
    made = [build("tfm", nets.build("small", (1, 8, 8)), EXAMPLE, start=0.45) for _ in range(2)]
    there, here = made[0].to("cuda"), made[1]
    for task in scenario("digits/5", seed=0).tasks[:2]:
        there.learn(task, Fit(Regime(epochs=1, device="cuda")))
    here.replay(there.structure())
    here.load_state_dict(there.state_dict())
    assert isinstance(here, Tfm)
    assert not any(width % 8 for width in here.net.widths().values())


class Stop(Exception):
    pass


@pytest.mark.parametrize("capture", [True, False])
def test_checkpoints_beside_training_change_nothing_and_are_gone_on_from(capture: bool, tmp_path: Path) -> None:
    task = scenario("digits/5", seed=0).tasks[0]
    regime = Regime(epochs=30, device="cuda", capture=capture, options={"momentum": 0.9})
    widths = (48, 4096)
    expected = [learner(task, width) for width in widths]
    Fit(regime).race(expected, task, 0)

    def stop(progress: Progress) -> None:
        if progress.epoch == 20 and progress.step == progress.steps:
            raise Stop

    with pytest.raises(Stop):
        Fit(regime, folder=tmp_path, progress=stop, save_every=0.0).race(
            [learner(task, width) for width in widths], task, 0
        )
    assert list(tmp_path.glob("*.safetensors"))
    found, epochs = [learner(task, width) for width in widths], set[tuple[int, int]]()
    Fit(regime, folder=tmp_path, progress=lambda p: epochs.add((p.phase, p.epoch))).race(found, task, 0)
    assert len(epochs) < 60
    for one, other in zip(found, expected, strict=True):
        state = other.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())


def test_algorithms_are_tried_for_the_usual_batch_only() -> None:
    task = scenario("digits/5", seed=0).tasks[0]
    method = learner(task, 48)
    seen: list[tuple[int, bool]] = []

    def loss(x: torch.Tensor, y: torch.Tensor, index: int) -> torch.Tensor:
        seen.append((len(x), torch.backends.cudnn.benchmark))
        return Finetuning.loss(method, x, y, index)

    method.loss = loss  # type: ignore[method-assign]
    Fit(Regime(epochs=2, batch_size=64, device="cuda", capture=False))(method, task, 0)
    assert {tried for size, tried in seen if size == 64} == {True}
    assert {tried for size, tried in seen if size != 64} == {False}
    assert not torch.backends.cudnn.benchmark
