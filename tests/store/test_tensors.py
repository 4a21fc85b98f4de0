"""What was born with a task, cut out and put back: not one bit differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from zeroforget.growing.dense import fingerprint
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import grow
from zeroforget.store.backbone import Backbone
from zeroforget.store.network import empty_network, example, fresh_values, plain_network
from zeroforget.store.schema import ModelFacts
from zeroforget.store.tensors import born, expected, fill

CASES = {
    "small": Backbone("small", {"width": 1.0}, (1, 8, 8)),
    "batch norm and shortcuts": Backbone("resnet18", {"width": 0.1}, (3, 16, 16)),
    "dropout, start below the full width": Backbone("lenet", {}, (1, 28, 28), start=0.5, limit=1.0),
    "weights as the unit": Backbone("small", {"width": 0.5}, (3, 8, 8), start=0.4, limit=1.0, unit="weights"),
}


def grown(backbone: Backbone) -> tuple[ModelFacts, GrowingNetwork]:
    plain = plain_network(backbone, 3)
    net = grow(plain, example(backbone), start=backbone.start, limit=backbone.limit, unit=backbone.unit)
    facts = ModelFacts(backbone, 3, "2026-01-01T00:00:00Z", "test", None, fresh_values(net))
    for task, growth in enumerate((None, 0.2, 0.0, 0.1)):
        net.add_task(f"task {task}", 2 + task, growth)
        net.train()(torch.randn(8, *backbone.shape), task)  # moves running statistics
        for parameter in net.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return facts, net.eval()


@pytest.mark.parametrize("case", CASES)
def test_a_network_filled_from_its_parts_is_the_same_bit_for_bit(case: str) -> None:
    torch.manual_seed(1)
    facts, net = grown(CASES[case])
    parts = [born(net, task) for task in range(4)]
    again = empty_network(facts, None)  # type: ignore[arg-type]
    for record in net.history:
        again.add_task(record.name, record.classes, record.growth)
    for task in (2, 0, 3, 1):  # the order does not matter
        fill(again, task, parts[task])
    x = torch.randn(3, *CASES[case].shape)
    for task in range(4):
        assert again.fingerprint(task) == net.fingerprint(task)
        assert torch.equal(again.dense(task)(x), net.dense(task)(x))
        assert {name: (t.dtype, tuple(t.shape)) for name, t in parts[task].items()} == expected(again, task)
        for name, tensor in born(again, task).items():
            assert torch.equal(tensor, parts[task][name])


def test_every_number_is_stored_once() -> None:
    """The parts of all tasks hold as many shared numbers as the full network has."""
    _, net = grown(CASES["small"])
    stored = sum(t.numel() for task in range(4) for name, t in born(net, task).items() if name.startswith("born/"))
    whole = sum(p.numel() for p in net.dense(3).get_submodule("features").parameters())
    assert stored == whole


def test_a_filled_network_learns_on_with_the_same_spread_of_new_values() -> None:
    facts, net = grown(CASES["small"])
    again = empty_network(facts, None)  # type: ignore[arg-type]
    assert fresh_values(again) == fresh_values(net)


def test_what_does_not_fit_is_named() -> None:
    facts, net = grown(CASES["small"])
    again = empty_network(facts, None)  # type: ignore[arg-type]
    again.add_task("task 0", 2)
    part = born(net, 0)
    with pytest.raises(ValueError, match="'head/bias' is missing"):
        fill(again, 0, {name: t for name, t in part.items() if name != "head/bias"})
    with pytest.raises(ValueError, match="'more' has no place"):
        fill(again, 0, part | {"more": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'head/bias' is \(3,\)"):
        fill(again, 0, part | {"head/bias": torch.zeros(3)})
    with pytest.raises(ValueError, match="float64"):
        fill(again, 0, part | {"head/bias": torch.zeros(2, dtype=torch.float64)})


def test_an_enormous_network_is_refused_before_it_is_built() -> None:
    with pytest.raises(ValueError, match="weights"):
        plain_network(Backbone("vgg16", {"width": 16.0}, (3, 224, 224)), 0)


def test_every_number_name_type_and_shape_is_in_the_fingerprint() -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).requires_grad_(False)

    first, found = made(), []
    for place, name in enumerate(first.state_dict()):
        other = made()
        other.load_state_dict(first.state_dict())
        assert fingerprint(other) == fingerprint(first)
        other.state_dict()[name].view(-1)[place % 2 if first.state_dict()[name].dim() else 0] += 1
        found.append(fingerprint(other))
    renamed, turned, wide = nn.Module(), nn.Module(), nn.Module()
    renamed.register_buffer("a", torch.zeros(2, 3))
    turned.register_buffer("b", torch.zeros(3, 2))
    wide.register_buffer("b", torch.zeros(1, 3, dtype=torch.float64))
    plain = nn.Module()
    plain.register_buffer("b", torch.zeros(2, 3))
    found += [fingerprint(module) for module in (first, renamed, turned, wide, plain)]
    assert len(set(found)) == len(found) == len(first.state_dict()) + 5


def test_new_values_are_drawn_as_the_model_wrote_down() -> None:
    """Not as this program's own start of weights would have them: a model may have started from other weights."""
    backbone = CASES["small"]
    net = grow(plain_network(backbone, 0), example(backbone), **backbone.growing())
    other = {name: (spread * 2, mean + 1, inputs) for name, (spread, mean, inputs) in fresh_values(net).items()}
    facts = ModelFacts(backbone, 0, "2026-01-01T00:00:00Z", "zeroforget", None, other)
    assert fresh_values(empty_network(facts, Path("model.json"))) == other
