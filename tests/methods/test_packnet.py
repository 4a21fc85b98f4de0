"""PackNet owns exactly the weights it should, and they never move again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.methods import helpers
from tests.methods.small_tasks import answers, example, learned, net, regime, replayed, right, tasks
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.packnet import PackNet
from zeroforget.methods.per_task import BitMasks, pack, unpack
from zeroforget.training import Diverged, Fit


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63])
def test_bits_come_back_as_they_were(count: int) -> None:
    mask = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    packed = pack(mask)
    assert packed.numel() == -(-count // 8)
    assert torch.equal(unpack(packed, count), mask)


def test_union_is_where_any_task_has_a_one() -> None:
    masks = BitMasks({"a": torch.Size([2, 2]), "b": torch.Size([3])})
    one = {"a": torch.tensor([[1, 0], [0, 0]]).bool(), "b": torch.tensor([0, 0, 1]).bool()}
    two = {"a": torch.tensor([[0, 0], [0, 1]]).bool(), "b": torch.tensor([0, 0, 1]).bool()}
    for task, mask in enumerate((one, two)):
        masks.add(torch.device("cpu"))
        masks.write(task, mask)
    assert torch.equal(masks.union(2)["a"], one["a"] | two["a"])
    assert torch.equal(masks.union(1)["a"], one["a"])
    assert torch.equal(masks.read(1)["b"], two["b"])
    assert masks.bits() == 2 * 8


@pytest.mark.parametrize(("tasks_expected", "shares"), [(3, (1 / 3, 1 / 3, 1 / 3)), (None, (1 / 2, 1 / 4, 1 / 8))])
def test_each_task_owns_its_share_of_every_layer(tasks_expected: int | None, shares: tuple[float, ...]) -> None:
    method = learned("packnet", tasks=tasks_expected, epochs=1)
    assert isinstance(method, PackNet)
    seen = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in method.owned.shapes.items()}
    for index, share in enumerate(shares):
        for name, mask in method.owned.read(index).items():
            assert not (mask & seen[name]).any(), "a weight has two owners"
            assert abs(int(mask.sum()) - share * mask.numel()) <= 2
            seen[name] |= mask


def test_a_tenth_of_forty_weights_is_four() -> None:
    """Though 40 · (1 − (1 − 1/10)) is a little less in binary."""
    method = PackNet(nn.Linear(10, 4), torch.zeros(2, 10), tasks=10)
    method._hold({"weight": torch.ones(4, 10, dtype=torch.bool)})
    assert int(method.prune_weights(0)["weight"].sum()) == 4


def test_the_smallest_of_this_tasks_weights_are_given_back() -> None:
    method = PackNet(net(), example(), prune=0.75)
    fit = Fit(regime(1))
    method.learn(tasks()[0], fit)
    weight = method.net.get_parameter("9.weight").detach().clone()
    owned = method.owned.read(0)["9.weight"]
    method._frozen.free = {"9.weight": ~owned}
    with torch.no_grad():
        method.net.get_parameter("9.weight").copy_(torch.where(owned, weight, torch.randn_like(weight)))
    before = method.net.get_parameter("9.weight").detach().clone()
    kept = method.prune_weights(1)["9.weight"]
    assert not (kept & owned).any()
    assert before[kept].abs().min() >= before[~owned & ~kept].abs().max()
    after = method.net.get_parameter("9.weight")
    assert torch.equal(after[owned], before[owned])
    assert torch.equal(after[kept], before[kept])
    assert not after[~owned & ~kept].any()


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(
    "rule",
    [{"optimizer": "sgd", "options": {"momentum": 0.9, "weight_decay": 0.1}}, {"optimizer": "adamw", "lr": 0.01}],
)
def test_old_tasks_do_not_move_by_a_bit_under_momentum_and_decay(rule: dict[str, object], freeze: bool) -> None:
    method = PackNet(net(norm=True), example(), freeze_norms=freeze)
    fit = Fit(regime(2, **rule))
    then = []
    for index, each in enumerate(tasks()):
        method.learn(each, fit)
        then.append(answers(method, index))
    for index, logits in enumerate(then):
        assert torch.equal(answers(method, index), logits)
    first, last = method.norms.read(0), method.norms.read(2)
    assert {torch.equal(first[name], last[name]) for name in first} == {freeze}
    assert first["1.running_mean"].any()


def test_it_learns_and_loads_and_later_tasks_use_earlier_weights() -> None:
    method = learned("packnet", norm=True, tasks=3, epochs=6)
    assert min(right(method, i) for i in range(3)) > 0.7
    twin = replayed(method, "packnet", norm=True, tasks=3)
    assert all(torch.equal(answers(twin, i), answers(method, i)) for i in range(3))
    assert isinstance(method, PackNet)
    weights = method.task_net(1).get_parameter("9.weight")
    owned = method.owned.read(0)["9.weight"]
    assert torch.equal(weights[owned], method.net.get_parameter("9.weight")[owned])
    assert not weights[method.owned.read(2)["9.weight"]].any()


def test_more_tasks_than_expected_still_learn_their_heads() -> None:
    method = learned("packnet", count=2, tasks=1, epochs=8)
    assert isinstance(method, PackNet)
    assert not any(mask.any() for mask in method.owned.read(1).values())
    assert right(method, 1) > 0.5


def test_a_failure_in_the_second_phase_leaves_everything_as_it_was() -> None:
    method = learned("packnet", count=1, epochs=1)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    fit = Fit(regime(1))

    def stop(progress: object) -> None:
        if progress.phase == 1:  # type: ignore[attr-defined]
            raise Diverged("enough")

    fit.progress = stop
    with pytest.raises(Diverged):
        method.learn(tasks()[1], fit)
    after = method.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_overhead_is_a_bit_per_weight_and_task() -> None:
    method = learned("packnet", epochs=1)
    weights = sum(p.numel() for p in method.net.parameters() if p.dim() > 1)
    assert method.overhead().inference == 3 * -(-weights // 8) * 8
    assert method.overhead().training == method.overhead().inference + 32 * weights  # what to put back


def test_buffers_beside_normalization_are_kept_and_counted_for_each_task() -> None:
    plain, moving = PackNet(helpers.plain_net(), example()), PackNet(helpers.centred_net(), example())
    for method in (plain, moving):
        for name in "abc":
            method.add_task(TaskSpec(name, 2))
    assert not any(name.startswith("norms.") for name in plain.state_dict())
    assert moving.overhead().inference - plain.overhead().inference == 2 * (16 * 32 + 64 + 32)


@pytest.mark.parametrize(
    "options",
    [{"prune": 1.0}, {"prune": -0.1}, {"tasks": 0}, {"retrain": 0.0}, {"retrain_epochs": 0}, {"retrain_epochs": -1}],
)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PackNet(net(), example(), **options)  # type: ignore[arg-type]


def test_a_warmup_as_long_as_retraining_is_refused_before_training() -> None:
    method, seen = PackNet(net(), example(), retrain_epochs=2), []
    fit = Fit(regime(5, schedule="cosine", warmup=2.0), progress=seen.append)
    with pytest.raises(ValueError, match=r"2 epochs.*warmup of 2.*retrain_epochs"):
        method.learn(tasks()[0], fit)
    assert not seen
    assert not method.specs


@pytest.mark.parametrize(
    ("options", "epochs", "rate"), [({}, 3, 0.01), ({"retrain": 0.4, "retrain_epochs": 2}, 2, 0.04)]
)
def test_retraining_is_as_long_and_as_gentle_as_it_is_told(options: dict[str, float], epochs: int, rate: float) -> None:
    log = PackNet(net(), example(), **options).learn(tasks()[0], Fit(regime(3, lr=0.1)))  # type: ignore[arg-type]
    assert [epoch.lr for epoch in log.epochs] == pytest.approx([0.1] * 3 + [rate] * epochs)


def test_what_is_held_has_no_say_in_the_gradient_and_nothing_is_held_afterwards() -> None:
    method = PackNet(net(), example())
    method.learn(tasks()[0], Fit(regime(1)))
    assert method._frozen.free == method._frozen.still == {}
    owned = method.owned.read(0)["9.weight"]
    method.add_task(TaskSpec("b", 2))
    method.coupled = True  # as by a bound on the gradient's norm
    method._hold({"9.weight": ~owned})
    method.loss(torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 0, 1, 1, 0]), 1).backward()
    gradient = method.net.get_parameter("9.weight").grad
    assert gradient is not None
    assert gradient[owned].any()
    method.after_backward()
    assert not gradient[owned].any()
    assert gradient[~owned].any()


@pytest.mark.parametrize("clip", [None, 5.0])
def test_a_bound_on_the_gradient_couples_weights(clip: float | None) -> None:
    method = PackNet(net(), example())
    method.learn(tasks()[0], Fit(regime(1, clip=clip)))
    assert method.coupled == (clip is not None)


class Told(PackNet):
    """Clears gradients although it need not, if asked."""

    name = ""
    clears = False
    cleared = 0

    def after_backward(self) -> None:
        assert not self.coupled
        self.coupled = self.clears
        before = [p.grad.clone() for p in self.net.parameters() if p.grad is not None]
        super().after_backward()
        after = [p.grad for p in self.net.parameters() if p.grad is not None]
        self.cleared += any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        self.coupled = False


@pytest.mark.parametrize("options", [{"momentum": 0.9, "weight_decay": 0.01}, {}])
def test_where_weights_move_one_by_one_gradients_need_not_be_cleared(options: dict[str, float]) -> None:
    became = []
    for clears in (False, True):
        method = Told(net(), example())
        method.clears = clears
        for task in tasks()[:2]:
            method.learn(task, Fit(regime(2, options=options)))
        assert bool(method.cleared) == clears
        became.append(method.state_dict())
    assert all(torch.equal(tensor, became[1][name]) for name, tensor in became[0].items())
