"""Several processes that train one network: as one would, with the same bits in each, never wrong without a word."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.ranks import together
from zeroforget.data import Preparation, Split, Task
from zeroforget.methods.baselines import Finetuning
from zeroforget.methods.tfm import Tfm
from zeroforget.processes import Processes, current, first_host, place
from zeroforget.training import Fit, FitLog, Progress, Regime
from zeroforget.training.feed import batch_sizes
from zeroforget.training.seeding import seeded

REGIME = Regime(lr=0.1, batch_size=12, epochs=3, clip=1.0, options={"momentum": 0.9})


class Raw(Preparation):
    """Images as they are, in float64."""

    def train(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return images

    test = train


@cache
def task(number: int, dtype: torch.dtype = torch.float64) -> Task:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(90) % 3
    x = torch.randn(90, 1, 4, 4, generator=draw).to(dtype) + y.view(-1, 1, 1, 1)
    parts = [Split(x, y[i], i) for i in torch.randperm(90, generator=draw).split([54, 18, 18])]
    train, val, test = parts
    return Task(
        f"t{number}", ("a", "b", "c"), train, val, test, Raw() if dtype is torch.float64 else Preparation(flip=True)
    )


def method(*, norm: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Tfm:
    with seeded("net", seed):
        middle = [nn.BatchNorm2d(6), nn.Dropout(0.2)] if norm else []
        net = nn.Sequential(nn.Conv2d(1, 6, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(24, 8), nn.ReLU())
        return Tfm(net.to(dtype), torch.randn(2, 1, 4, 4, dtype=dtype), **options)


def learned(learner: Tfm, tasks: int, *, folder: Path | None = None, regime: Regime = REGIME) -> list[FitLog]:
    with seeded("learn"):
        return [learner.learn(task(k), Fit(regime, seed=1, folder=folder)) for k in range(tasks)]


def state_and_losses() -> tuple[dict[str, Tensor], list[float]]:
    learner = method()
    logs = learned(learner, 2)
    return learner.state_dict(), [e.val_loss for log in logs for e in log.epochs] + [e.loss for e in logs[1].epochs]


@pytest.mark.parametrize("world", [2, 3])
def test_processes_that_share_batches_learn_what_one_learns(world: int) -> None:
    state, losses = state_and_losses()
    for theirs, their_losses in together(world, state_and_losses):
        assert theirs.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.allclose(theirs[name], tensor, rtol=1e-10, atol=1e-10), name
        assert their_losses == pytest.approx(losses, rel=1e-10)


def searched() -> list[tuple[str, ...]]:
    """With statistics of batches, noise and augmentation, which each process draws for itself."""
    learner, seen = method(norm=True, dtype=torch.float32, search=(0.1, 0.3)), []
    with seeded("learn"):
        for k in range(2):
            learner.learn(task(k, torch.float32), Fit(REGIME, seed=1))
            seen.append(tuple(learner.net.fingerprint(each) for each in range(k + 1)))
    noise = torch.rand(1, generator=torch.Generator().manual_seed(current().rank))
    return [*seen, (str(learner.net.history[1].growth),), (str(current().told(float(noise))),)]


@pytest.mark.parametrize("world", [2, 3])
def test_each_process_ends_with_the_same_bits_and_old_tasks_keep_theirs(world: int) -> None:
    found = together(world, searched)
    assert len(found[0]) == 4, found[0]
    assert all(each == found[0] for each in found)
    first, second, *_ = found[0]
    assert second[0] == first[0]
    assert second[1] != first[0]


class Drifting(Finetuning):
    """Draws its own numbers in every process."""

    def after_step(self) -> None:
        with torch.no_grad():
            self.heads[-1].bias += torch.rand(3, dtype=torch.float64)


def refused() -> list[str]:
    def why(work: Any) -> str:
        try:
            work()
        except ValueError as error:
            return str(error)
        return "nothing"

    rank = current().rank
    drifting = Drifting(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).double(), torch.zeros(2, 1, 4, 4).double())
    with torch.no_grad():
        for parameter in drifting.net.parameters():
            parameter.zero_()
    torch.manual_seed(5)
    return [
        why(lambda: learned(drifting, 1)),
        why(lambda: learned(method(seed=rank), 1)),
        why(lambda: learned(method(), 1, regime=Regime(batch_size=1))),
        why(lambda: learned(method(), 1, regime=Regime(epochs=1 + rank))),
        why(lambda: current().by_first(lambda: int("one"))),
    ]


def test_what_would_be_learned_wrong_is_refused_in_every_process() -> None:
    for said in together(2, refused):
        assert "differ in 1 of" in said[0]
        assert "heads.0.bias" in said[0]
        assert "was to be learned: processes 0 and 1 of 2 differ" in said[1]
        assert "2 processes share each batch, and the smallest has 1 images" in said[2]
        assert said[3].startswith("process 0 was to learn")
        assert said[4] == "invalid literal for int() with base 10: 'one'"


def interrupted(folder: Path, kill: bool) -> str:
    def die(progress: Progress) -> None:
        if kill and current().rank == 1 and (progress.index, progress.epoch) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    learner = method(norm=True, dtype=torch.float32)
    with seeded("learn"):
        for k in range(2):
            learner.learn(task(k, torch.float32), Fit(REGIME, seed=1, folder=folder, progress=die))
    return learner.net.fingerprint(1)


def test_a_killed_process_ends_the_others_with_a_message_and_all_go_on_together(tmp_path: Path) -> None:
    whole = together(2, interrupted, tmp_path / "whole", False)
    said = together(2, interrupted, tmp_path / "cut", True, lost=[1])
    assert said[0].startswith("PeerLost: process 0 of 2: another process of this training has ended")
    assert together(2, interrupted, tmp_path / "cut", False) == whole
    (alone,) = together(1, interrupted, tmp_path / "cut", False)
    assert "was begun by 2 processes and would go on with 1" in alone


def test_alone_nothing_is_different() -> None:
    alone = Processes()
    assert current() == alone
    assert (alone.alone, alone.first, alone.key, alone.sizes([5, 3])) == (True, True, (), [5, 3])
    assert alone.told("x") == ["x"]
    assert alone.by_first(lambda: 3) == 3
    assert torch.equal(alone.part(torch.arange(5)), torch.arange(5))


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("images", [10, 24, 25, 29, 33])
def test_a_batch_is_shared_and_nobody_is_left_with_one_image(images: int, world: int) -> None:
    sizes = batch_sizes(images, 12, world)
    shares = [Processes(rank, world).sizes(sizes) for rank in range(world)]
    assert sum(sizes) == images
    assert [sum(each) for each in zip(*shares, strict=True)] == sizes
    assert min(map(min, shares)) >= 2
    for rank, share in enumerate(shares):
        assert [len(Processes(rank, world).part(torch.arange(size))) for size in sizes] == share


def test_launchers_are_known_by_their_variables() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    found = place(torchrun)
    assert found is not None
    assert (found.rank, found.world, found.local, found.address, found.port) == (1, 4, 1, "a", 29500)
    assert place(torchrun | {"WORLD_SIZE": "1"}) is None
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "20007"}
    found = place(slurm | {"SLURM_STEP_NODELIST": "gpu[03-04]"})
    assert found is not None
    assert (found.rank, found.world, found.local, found.address, found.port) == (3, 4, 1, "gpu03", 20007)
    assert place({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None  # a batch script is one process
    assert place({}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("one", "one"), ("a1,a2", "a1"), ("gpu[01-04,07],big2", "gpu01"), ("n[3,5]-ib", "n3-ib"), ("h-2.org", "h-2.org")],
)
def test_the_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
