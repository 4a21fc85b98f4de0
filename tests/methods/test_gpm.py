"""GPM: gradients and steps stay at right angles to the inputs that were kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.methods.small_tasks import example, learned, net, regime, right, tasks
from zeroforget.methods import Method
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.gpm import Gpm, inputs, leading, shortened
from zeroforget.training import Fit


def gpm(count: int = 1, **options: float) -> Gpm:
    method = learned("gpm", count, epochs=2, **options)
    assert isinstance(method, Gpm)
    return method


def test_projected_gradients_are_orthogonal_to_the_basis() -> None:
    method = gpm()
    method.add_task(TaskSpec("next", 2))
    method._basis = method.basis(1)
    method.loss(torch.randn(8, 1, 8, 8), torch.tensor([0, 1] * 4), 1).backward()
    plain = {name: method.net.get_parameter(name).grad.clone() for name in method.widths}  # type: ignore[union-attr]
    method.after_backward()
    for name, basis in method._basis.items():
        gradient = method.net.get_parameter(name).grad
        assert gradient is not None
        size = plain[name].norm()
        assert (plain[name].flatten(1) @ basis).norm() > 1e-3 * size
        assert (gradient.flatten(1) @ basis).norm() < 1e-5 * size
        assert gradient.any(), "nothing is left to learn with"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"options": {"momentum": 0.9}, "clip": 0.5},
        {"options": {"momentum": 0.9, "weight_decay": 0.01}},
        {"optimizer": "adam", "lr": 0.01},
    ],
)
def test_steps_of_any_optimizer_are_orthogonal_to_the_basis(changes: dict[str, object]) -> None:
    method = gpm()
    before = {name: method.net.get_parameter(name).detach().clone() for name in method.widths}
    basis = method.basis(1)
    method.learn(tasks()[1], Fit(regime(2, **changes)))
    for name, m in basis.items():
        moved = (method.net.get_parameter(name).detach() - before[name]).flatten(1)
        assert moved.norm() > 0
        assert (moved @ m).norm() < 1e-4 * moved.norm(), name


def test_bases_are_orthonormal_and_grow() -> None:
    method = gpm(3)
    for name, width in method.widths.items():
        m = method.basis(3)[name]
        torch.testing.assert_close(m.T @ m, torch.eye(m.shape[1]), atol=1e-5, rtol=0)
        assert 0 < method.basis(1)[name].shape[1] <= m.shape[1] <= width


def test_the_directions_carry_the_share_of_energy_and_no_fewer_would() -> None:
    draws = torch.Generator().manual_seed(0)
    scale = torch.tensor([9.0, 5.0, 3.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    rows = torch.randn(200, 6, generator=draws, dtype=torch.float64) * scale
    found = leading(rows, None, 0.95).double()
    share = [float((rows @ found[:, :n]).square().sum() / rows.square().sum()) for n in range(found.shape[1] + 1)]
    assert share[-1] >= 0.95 > share[-2]
    assert leading(rows, found.float(), 0.95).shape[1] == 0
    more = leading(rows, found.float(), 0.999).double()
    both = torch.cat([found, more], 1)
    assert float((rows @ both).square().sum() / rows.square().sum()) >= 0.999
    torch.testing.assert_close(both.T @ both, torch.eye(both.shape[1]).double(), atol=1e-6, rtol=0)


def test_what_a_layer_reads_is_what_it_multiplies() -> None:
    for layer in (nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.Linear(5, 4, bias=False)):
        x = torch.randn(2, 3, 7, 7) if isinstance(layer, nn.Conv2d) else torch.randn(2, 5)
        rows = inputs(layer, x).float() @ layer.weight.flatten(1).T
        torch.testing.assert_close(rows, layer(x).movedim(1, -1).reshape(-1, 4))
    grouped = nn.Conv2d(4, 4, 3, groups=2)
    assert inputs(grouped, torch.randn(2, 4, 5, 5)).shape == (2 * 2 * 9, 18)
    rows = torch.randn(50, 6).double()
    assert shortened(rows).shape == (6, 6)
    torch.testing.assert_close(shortened(rows).T @ shortened(rows), rows.T @ rows)


def test_answers_to_old_inputs_hardly_change() -> None:
    """At all of the energy a layer's answers to the images that were kept stay what they were; fine-tuning's do not."""
    first, second, _ = tasks()
    x = first.prepare.test(first.train.batch(torch.arange(120))[0])
    moved = {}
    for name, options in (("gpm", {"energy": 1.0, "samples": 200}), ("finetuning", {})):
        method: Method = learned(name, 1, epochs=2, **options)
        weight = method.net.get_parameter("0.weight")
        before = F.conv2d(x, weight, padding=1).detach()
        method.learn(second, Fit(regime(2)))
        moved[name] = float((F.conv2d(x, weight.detach(), padding=1) - before).norm() / before.norm())
    assert moved["gpm"] < 1e-4 < 0.01 < moved["finetuning"]


def test_it_forgets_less_than_fine_tuning() -> None:
    kept = {name: right(learned(name, 2, epochs=6), 0) for name in ("gpm", "finetuning")}
    assert kept["gpm"] > kept["finetuning"]


def test_how_many_directions_is_part_of_the_structure() -> None:
    method = gpm(2)
    twin = Gpm(net(seed=3), example())
    twin.replay(method.structure())
    twin.load_state_dict(method.state_dict())
    for name, m in method.basis(2).items():
        assert torch.equal(twin.basis(2)[name], m)
    assert method.overhead().training == sum(32 * m.numel() for m in method.basis(2).values())


def test_padding_that_it_cannot_follow_is_named() -> None:
    with pytest.raises(ValueError, match="pads otherwise"):
        inputs(nn.Conv2d(1, 1, 3, padding="same"), torch.zeros(1, 1, 5, 5))
    with pytest.raises(ValueError, match="shares from 0 to 1"):
        Gpm(net(), example(), energy=1.2)
