"""LwF's gradient against a distillation written by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.methods import helpers
from tests.methods.test_ewc import linear_net
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.distillation import Features, Lwf, distillation, standing
from zeroforget.progress import Progress
from zeroforget.training import Regime


def with_teacher(strength: float, temperature: float) -> Lwf:
    """Three heads of 5, 3 and 2 classes; the network has moved away from its teacher."""
    method = Lwf(linear_net(), helpers.EXAMPLE, strength=strength, temperature=temperature)
    for classes in (5, 3, 2):
        method.add_task(TaskSpec(str(classes), classes))
    method._teacher = (copy.deepcopy(method.net),)
    with torch.no_grad():
        method.net[1].weight += 0.1 * torch.randn(6, 64)
    return method


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gradient_equals_a_hand_written_distillation(temperature: float) -> None:
    """By a head's logits z it is λ (softmax(z/T) − softmax(z_old/T)) / (T · batch): one softmax a head."""
    method = with_teacher(3.0, temperature)
    x, y = torch.randn(9, 1, 8, 8), torch.randint(2, (9,))
    weight, old = method.net[1].weight, method._teacher[0][1].weight
    (found,) = torch.autograd.grad(method.loss(x, y, 2), weight)

    flat = x.flatten(1)
    features, before = flat @ weight.T, flat @ old.T
    head = method.heads[2]
    new = (features @ head.weight.T + head.bias).softmax(1) - nn.functional.one_hot(y, 2)
    by_features = new @ head.weight / 9
    for head in method.heads[:2]:
        now, then = ((f @ head.weight.T + head.bias) / temperature for f in (features, before))
        by_features += 3.0 * (now.softmax(1) - then.softmax(1)) @ head.weight / (9 * temperature)
    torch.testing.assert_close(found, by_features.T @ flat, rtol=1e-4, atol=1e-5)


def test_the_teacher_is_the_network_before_and_is_gone_afterwards() -> None:
    seen: list[tuple[bool, bool]] = []

    class Curious(Lwf):
        def before_step(self, done: float) -> None:
            if self._teacher:
                same = all(torch.equal(v, before[n]) for n, v in self._teacher[0].state_dict().items())
                seen.append((same, any(m.training for m in self._teacher[0].modules())))

    method = Curious(helpers.normed_net(), helpers.EXAMPLE)
    first, second, _ = helpers.tasks()
    helpers.learn(method, first)
    assert not seen
    before = helpers.copied(dict(method.net.state_dict()))
    helpers.learn(method, second)
    assert seen
    assert all(same and not training for same, training in seen)
    assert not method._teacher
    assert not any("teacher" in name for name in method.state_dict())
    assert method.overhead().training >= 32 * sum(p.numel() for p in method.net.parameters())


MIXED = Regime(lr=0.05, epochs=6, batch_size=16, precision="bf16")


def test_a_teacher_of_lower_precision_answers_the_same_bits() -> None:
    """Under mixed precision, where its layers would be brought into it in every step."""
    net = helpers.normed_net().eval()
    teacher, x = standing(net, helpers.EXAMPLE, MIXED), torch.randn(9, 1, 8, 8)
    assert {p.dtype for p in teacher.parameters()} == {torch.bfloat16, torch.float32}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(teacher(x), net(x))
    assert {p.dtype for p in standing(net, helpers.EXAMPLE, Regime()).parameters()} == {torch.float32}
    assert {p.dtype for p in net.parameters()} == {torch.float32}


class Reads(nn.Module):
    """Computes with a layer's weight by itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(64, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = F.relu(self.first(x.flatten(1))), self.second.weight
        if self.how == "in full precision":
            with torch.autocast(x.device.type, enabled=False):
                return F.relu(self.second(x.float()))
        weight = (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)
        return F.relu(F.linear(x, weight, self.second.bias))


@pytest.mark.parametrize("how", ["in full precision", "standardized"])
def test_a_teacher_whose_weights_are_read_keeps_their_precision(how: str) -> None:
    torch.manual_seed(0)
    net = Reads(how).eval()
    teacher, x = standing(net, torch.zeros(2, 1, 8, 8), MIXED), torch.randn(9, 1, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(teacher(x), net(x))


@pytest.mark.parametrize("name", ["lwf", "lfl"])
def test_mixed_precision_learns_with_such_a_teacher(name: str) -> None:
    first, second, _ = helpers.tasks()
    method = helpers.make(name)
    for task in (first, second):
        helpers.learn(method, task, regime=MIXED)
    assert helpers.score(method, 1, second) > 0.6


def test_heads_of_as_many_classes_are_distilled_each_by_itself() -> None:
    method = Lwf(linear_net(), helpers.EXAMPLE, strength=3.0, temperature=2.0)
    for number, classes in enumerate((3, 2, 3, 3, 2)):
        method.add_task(TaskSpec(str(number), classes))
    now, before = torch.randn(7, 6), torch.randn(7, 6)
    found = method.departure(Features(now, now), before, 4, 7)
    each = [distillation(head(now), head(before), 2.0) for head in method.heads[:4]]
    torch.testing.assert_close(found, 3.0 * torch.stack(each).sum(0))


def test_forgets_less_than_fine_tuning() -> None:
    first = helpers.tasks()[0]
    kept = {name: helpers.score(helpers.run(name).method, 0, first) for name in ("finetuning", "lwf")}
    assert kept["lwf"] > kept["finetuning"] + 0.1


@pytest.mark.parametrize("strength", [0.1, 1e4])
def test_a_step_never_promises_more_than_the_whole_loss(strength: float) -> None:
    method = with_teacher(strength, 1.0)
    method._lr = 0.05
    loss = method.loss(torch.randn(9, 1, 8, 8), torch.randint(2, (9,)), 2)
    loss.backward()
    weight = method.net[1].weight
    before = weight.grad.clone()
    method.after_backward()
    promised = 0.05 * float(weight.grad.square().sum())
    if strength < 1:
        assert torch.equal(weight.grad, before)
    else:
        assert promised < float(loss.detach()) < 0.05 * float(before.square().sum())
        torch.testing.assert_close(weight.grad / weight.grad.norm(), before / before.norm())


@pytest.mark.parametrize(
    ("name", "strength", "more"), [("lwf", 200.0, {}), ("lwf", 2000.0, {"old_heads": True}), ("lfl", 5.0, {})]
)
def test_a_strong_teacher_keeps_the_old_answers(name: str, strength: float, more: dict[str, bool]) -> None:
    """Unbounded, steps this steep throw the network out of its answers: the loss became infinite, or all was lost."""
    first, second, _ = helpers.tasks()
    regime = Regime(lr=0.05, epochs=8, batch_size=16)
    method = helpers.make(name, helpers.plain_net, strength=strength, **more)
    helpers.learn(method, first, regime=regime)
    before = helpers.score(method, 0, first)
    helpers.learn(method, second, regime=regime)
    assert helpers.score(method, 0, first) > before - 0.05
    assert helpers.score(method, 1, second) > 0.7


def test_a_network_equal_to_its_teacher_pays_nothing() -> None:
    logits = torch.randn(5, 4)
    assert torch.equal(distillation(logits, logits, 2.0), torch.zeros(5))
    assert (distillation(logits, logits.flip(1), 2.0) > 0).all()


def test_heads_are_distilled_as_they_are_asked_dropout_included() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5))
    method = Lwf(net, helpers.EXAMPLE, strength=1.0)
    for classes in (3, 2):
        method.add_task(TaskSpec(str(classes), classes))
    method._teacher = (copy.deepcopy(net).eval(),)
    x, y = torch.randn(9, 1, 8, 8), torch.randint(2, (9,))
    torch.manual_seed(1)
    loss = method.train().loss(x, y, 1)
    torch.manual_seed(1)
    handed, before = net(x), method._teacher[0](x)
    old = distillation(method.heads[0](handed), method.heads[0](before), 1.0).mean()
    torch.testing.assert_close(loss, nn.functional.cross_entropy(method.heads[1](handed), y) + old)


def test_a_step_without_a_gradient_is_left_as_it_is() -> None:
    """Nothing is promised and nothing is to be lowered: nought by nought must not become the gradient."""
    method = with_teacher(1.0, 1.0)
    method._lr, method._loss = 0.05, torch.zeros(())
    weight = method.net[1].weight
    weight.grad = torch.zeros_like(weight)
    method.after_backward()
    assert not weight.grad.any()
    assert method._loss is None


@pytest.mark.parametrize(("momentum", "dampening", "reach"), [(0.0, 0.0, 0.02), (0.9, 0.0, 0.2), (0.9, 0.5, 0.1)])
def test_steps_are_as_long_as_momentum_makes_them(momentum: float, dampening: float, reach: float) -> None:
    method = Lwf(linear_net(), helpers.EXAMPLE)
    options = {"momentum": momentum, "dampening": dampening}
    helpers.learn(method, helpers.tasks()[2], regime=Regime(lr=0.02, epochs=1, options=options))
    assert method._lr == pytest.approx(reach)


@pytest.mark.parametrize("old_heads", [False, True])
def test_a_new_head_warms_up_alone_and_then_everything_learns(old_heads: bool) -> None:
    """With `old_heads` as published: those learn in the second phase, and are distilled from what they were."""
    moved: list[dict[str, bool]] = []
    method = helpers.make("lwf", warmup=2, old_heads=old_heads)
    assert isinstance(method, Lwf)
    first, second, _ = helpers.tasks()
    helpers.learn(method, first)
    start = helpers.copied(dict(method.state_dict()))

    def look(progress: Progress) -> None:
        if progress.step == progress.steps:
            now = {n: t for n, t in method.state_dict().items() if n in start}
            moved.append(
                {n.split(".")[0]: False for n in now}
                | {n.split(".")[0]: True for n, t in now.items() if not torch.equal(t, start[n])}
            )

    log = helpers.learn(method, second, progress=look)
    assert log.notes["phases"][0] == 2
    assert moved[1] == {"net": False, "heads": False}  # not even the statistics of batch normalization
    assert moved[-1] == {"net": True, "heads": old_heads}
    assert len(log.epochs) == sum(log.notes["phases"])
    assert helpers.score(method, 1, second) > 0.7


def test_heads_that_learn_are_distilled_from_what_they_were() -> None:
    method = Lwf(linear_net(), helpers.EXAMPLE, strength=3.0, old_heads=True)
    for classes in (3, 2):
        method.add_task(TaskSpec(str(classes), classes))
    assert all(p.requires_grad for p in method.heads.parameters())
    features = torch.randn(7, 6)
    method._heads_before = (copy.deepcopy(method.heads),)
    assert not method.departure(Features(features, features), features, 1, 7).any()
    with torch.no_grad():
        method.heads[0].weight += 0.5 * torch.randn(3, 6)
    found = method.departure(Features(features, features), features, 1, 7)
    expected = 3.0 * distillation(method.heads[0](features), method._heads_before[0][0](features), 1.0)
    torch.testing.assert_close(found, expected)
    (by_head,) = torch.autograd.grad(found.sum(), method.heads[0].weight)
    assert by_head.any()


def test_a_warmup_is_a_number_of_epochs() -> None:
    with pytest.raises(ValueError, match="warmup is a number of epochs"):
        Lwf(linear_net(), helpers.EXAMPLE, warmup=-1)
