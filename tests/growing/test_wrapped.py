"""A user's own DistributedDataParallel around a growing network: right, or refused with a sentence."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.training.ranks import together
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.training_checks import frozen_buffers
from zeroforget.processes import current
from zeroforget.proving.grow import grow

STEPS, BATCH = 4, 12


def network(*, norm: bool = False, seed: int = 0) -> GrowingNetwork:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 10), *([nn.BatchNorm1d(10)] if norm else []), nn.ReLU(), nn.Linear(10, 8), nn.ReLU()]
    return grow(nn.Sequential(*layers).double(), torch.randn(4, 6).double(), start=0.5)


def data(task: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(task)
    return torch.randn(BATCH, 6, generator=draw).double(), torch.arange(BATCH) % 3


def train(net: GrowingNetwork, model: nn.Module, task: int) -> None:
    optimizer = torch.optim.SGD(net.newborn(), lr=0.1, momentum=0.9)
    x, y = (part.tensor_split(current().world)[current().rank] for part in data(task))
    for _ in range(STEPS):
        model.train()
        loss = F.cross_entropy(model(x, task), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def learned(norm: bool = False, statistics: bool = True) -> list[Any]:
    """Three tasks by the loop that the documentation shows; what each process ends with."""
    net, sent = network(norm=norm), 0
    for task in range(3):
        torch.manual_seed(task)
        net.add_task(f"task{task}", 3, growth=0.2 if task else 0.5)
        model = net if current().alone else DistributedDataParallel(net)
        if isinstance(model, DistributedDataParallel):
            sent = len(model.modules_buffers)
        train(net, model, task)
        if not current().alone and statistics:
            for tensor in net.moving().values():
                distributed.broadcast(tensor, 0)
        del model
        gc.collect()
    net.eval()
    return [net.fingerprint(task) for task in range(3)] + [net(data(2)[0], 2).tolist(), sent]


@pytest.mark.parametrize("world", [2, 3])
def test_wrapped_anew_for_each_task_it_learns_what_one_process_learns(world: int) -> None:
    *_, alone, _ = learned()
    found = together(world, learned)
    assert all(each == found[0] for each in found), found
    assert torch.allclose(torch.tensor(found[0][3]), torch.tensor(alone), rtol=1e-10, atol=1e-10)
    assert found[0][-1] == 0, "frozen buffers are not sent before each step"


def test_statistics_are_the_same_or_it_says_that_they_are_not() -> None:
    first, second = together(2, learned, True)
    assert first == second
    assert isinstance(first, list)
    for said in together(2, learned, True, False):
        assert said.startswith("ValueError: what earlier tasks left is not the same: processes 0 and 1 of 2 differ in")
        assert "net.moving().values(): torch.distributed.broadcast(tensor, 0)" in said


def kept() -> str:
    net = network()
    net.add_task("one", 3)
    model = DistributedDataParallel(net)
    train(net, model, 0)
    net.add_task("two", 3, growth=0.2)
    try:
        train(net, model, 1)
    except ValueError as error:
        return str(error)
    finally:
        del model, net
        gc.collect()
    return "nothing"


def test_one_that_is_kept_over_add_task_is_refused() -> None:
    for said in together(2, kept):
        assert said.startswith("this DistributedDataParallel was made before `add_task`: it would not add up")
        assert "Make a new one" in said


def sharded() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = network()
    net.add_task("one", 3)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    try:
        train(net, net, 0)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_fsdp_is_refused_with_the_reason() -> None:
    for said in together(2, sharded):
        assert said.startswith("FSDP cannot shard a growing network: what is newborn is written into frozen weights")


def test_what_is_frozen_is_told_by_name() -> None:
    net = network()
    net.add_task("one", 3)
    names = {name for name, _ in frozen_buffers(net)}
    assert names == {name for name, _ in net.named_buffers()}
    assert set(net._ddp_params_and_buffers_to_ignore) == names


def test_a_synchronized_norm_stays_one_for_every_task() -> None:
    """On GPUs it then has the statistics of all processes' images; on a CPU torch lets it work in one process alone."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(body).double()
    net = grow(synchronized, torch.randn(4, 6).double(), start=0.5)
    for task in range(2):
        net.add_task(f"task{task}", 3, growth=0.25)
        assert [type(module) for module in net.modules() if "BatchNorm" in type(module).__name__] == [nn.SyncBatchNorm]
        train(net, net, task)
    assert isinstance(net.dense(0).get_submodule("features")[1], nn.SyncBatchNorm)
