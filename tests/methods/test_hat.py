"""HAT's gates, gradient masks and compensation against the formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.methods.small_tasks import answers, example, learned, net, regime, replayed, right, tasks
from zeroforget import nets
from zeroforget.axes.labels import Concat, Named, Product
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.hat import Hat, compensation, gates_of, least
from zeroforget.training import Fit, Regime

IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([0, 1, 0, 1, 1, 0])


def two(**options: float) -> Hat:
    """Two tasks, the gates of the first partly open."""
    torch.manual_seed(1)
    method = Hat(net(), example(), **options)
    method.add_task(TaskSpec("a", 2))
    method.add_task(TaskSpec("b", 2))
    with torch.no_grad():
        method.embeddings[0] *= 0.003  # gates between 0.1 and 0.9
    return method


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_gates_in_the_weights_are_gates_on_the_features() -> None:
    method = two()
    gates = method.by_axis(method.attention(0).detach())
    assert {axis: len(g) for axis, g in gates.items()} == {"0": 8, "4": 16, "9": 32}
    layers = cast(nn.Sequential, method.net)
    h = layers[:4](IMAGES) * gates["0"].view(1, -1, 1, 1)
    h = layers[4:8](h) * gates["4"].view(1, -1, 1, 1)
    h = layers[8:](h) * gates["9"]
    expected = method.heads[0](h)
    torch.testing.assert_close(method.predictor(0)(IMAGES), expected)
    torch.testing.assert_close(method._gated(IMAGES, 0, method.attention(0)), expected)


def test_the_gradient_is_masked_by_the_least_of_the_two_features_a_weight_joins() -> None:
    method = two()
    method.hold()
    method.before_step(0.5)
    gates = method._used
    method.loss(IMAGES, LABELS, 1).backward()
    plain = {n: cast(Tensor, p.grad).clone() for n, p in method.net.named_parameters()}
    method.clip = math.inf
    method.after_backward()
    first, second, last = gates[:8], gates[8:24], gates[24:]
    for i, j in ((0, 0), (7, 0), (3, 0)):
        got = cast(Tensor, method.net.get_parameter("0.weight").grad)[i, j]
        torch.testing.assert_close(got, plain["0.weight"][i, j] * (1 - first[i]))  # images are always there
    for i, j in ((0, 0), (15, 7), (4, 2)):
        got = cast(Tensor, method.net.get_parameter("4.weight").grad)[i, j]
        torch.testing.assert_close(got, plain["4.weight"][i, j] * (1 - min(second[i], first[j])))
    for i, j in ((0, 0), (31, 63), (5, 22)):  # flattening: four places for each map
        got = cast(Tensor, method.net.get_parameter("9.weight").grad)[i, j]
        torch.testing.assert_close(got, plain["9.weight"][i, j] * (1 - min(last[i], second[j // 4])))
    torch.testing.assert_close(method.net.get_parameter("9.bias").grad, plain["9.bias"] * (1 - last))


def test_the_gates_learn_by_the_compensated_gradient() -> None:
    method = two()
    method.hold()
    method.before_step(0.01)
    method.loss(IMAGES, LABELS, 1).backward()
    e = method.embeddings[1]
    plain = cast(Tensor, e.grad).clone()
    method._bound = math.inf
    method.after_backward()
    factor = compensation(e.detach(), method.get_buffer("steepness"), method.smax)
    torch.testing.assert_close(e.grad, plain * factor)
    assert float(factor.min()) > 2


def test_the_first_task_is_not_held() -> None:
    method = Hat(net(), example())
    method.add_task(TaskSpec("a", 2))
    method.hold()
    method.before_step(0.9)
    method.loss(IMAGES, LABELS, 0).backward()
    plain = cast(Tensor, method.net.get_parameter("4.weight").grad).clone()
    method.clip = math.inf
    method.after_backward()
    assert torch.equal(cast(Tensor, method.net.get_parameter("4.weight").grad), plain)


class Noting(Hat):
    """Remembers how steep the gates were at each step."""

    seen: list[float]

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        self.seen = [*getattr(self, "seen", []), float(self.get_buffer("steepness"))]
        return super().loss(x, y, task)


@pytest.mark.parametrize(("spare", "steps"), [(-1, [1 / 400, 200.00125]), (0, [400.0]), (1, [400.0])])
def test_an_epoch_of_one_step_has_gates_as_steep_as_they_get(spare: int, steps: list[float]) -> None:
    """They would never become steep otherwise, and the task would be judged by gates that it never learned with."""
    task = tasks()[0]
    size = len(task.train) // 2 + 1 if spare < 0 else len(task.train) - spare
    method = Noting(net(), example())
    method.learn(task, Fit(Regime(epochs=2, batch_size=size)))
    assert method.seen == pytest.approx(steps * 2)


@pytest.mark.parametrize("steepness", [1 / 400, 1.0, 37.0, 400.0])
def test_compensation_is_the_formula_and_makes_a_steep_gate_learn_like_a_soft_one(steepness: float) -> None:
    for value in (-2.0, -0.05, 0.0, 0.01, 1.5):
        factor = float(compensation(torch.tensor(value), steepness, 400.0))
        bounded = max(-50.0, min(50.0, steepness * value))
        by_hand = 400.0 / steepness * (math.cosh(bounded) + 1) / (math.cosh(value) + 1)
        assert factor == pytest.approx(by_hand, rel=1e-4)
        if abs(steepness * value) < 30:
            e = torch.tensor(value, dtype=torch.float64, requires_grad=True)
            torch.sigmoid(steepness * e).backward()
            soft = sigmoid(value) * (1 - sigmoid(value))
            assert float(cast(Tensor, e.grad)) * factor == pytest.approx(400.0 * soft, rel=1e-3)


def test_gates_become_steeper_within_an_epoch() -> None:
    method = two(smax=100.0)
    for done, expected in ((0.0, 0.01), (0.5, 0.01 + 99.99 / 2), (1.0, 100.0)):
        method.before_step(done)
        assert float(method.get_buffer("steepness")) == pytest.approx(expected)


def test_the_price_is_for_features_that_were_free() -> None:
    method = two(strength=2.0)
    method.hold()
    method.before_step(0.01)
    old, new = method.attention(0).tolist(), method.attention(1, method.get_buffer("steepness")).tolist()
    price = sum(a * (1 - b) for a, b in zip(new, old, strict=True)) / sum(1 - b for b in old)
    plain = F.cross_entropy(method._gated(IMAGES, 1, method.attention(1, method.get_buffer("steepness"))), LABELS)
    torch.testing.assert_close(method.loss(IMAGES, LABELS, 1), plain + 2.0 * price)


def full(**options: float) -> Hat:
    """Two tasks, of which the first needs every feature."""
    method = two(**options)
    with torch.no_grad():
        method.embeddings[0].fill_(1.0)
    assert float(method.used().min()) == 1.0
    return method


def test_where_no_feature_is_free_there_is_no_price() -> None:
    method = full()
    method.hold()
    method.before_step(0.5)
    plain = F.cross_entropy(method._gated(IMAGES, 1, method.attention(1, method.get_buffer("steepness"))), LABELS)
    torch.testing.assert_close(method.loss(IMAGES, LABELS, 1), plain)


def test_gradients_are_clipped_and_embeddings_stay_in_reach() -> None:
    method = two(clip=0.5)
    method.hold()
    method.before_step(0.0)
    method.loss(IMAGES, LABELS, 1).backward()
    method.after_backward()
    norm = torch.stack([p.grad.norm() for p in method.trainable() if p.grad is not None]).norm()
    assert float(norm) <= 0.5 + 1e-4
    with torch.no_grad():
        method.embeddings[1].fill_(100.0)
    method.after_step()
    assert float(method.embeddings[1].detach().max()) == 6.0
    with torch.no_grad():
        method.embeddings[1].fill_(-100.0)
    method.after_step()
    assert float(method.embeddings[1].detach().min()) == -6.0


def test_it_hardly_forgets_where_finetuning_does_and_loads() -> None:
    method = learned("hat", norm=True, epochs=6)
    assert min(right(method, i) for i in range(3)) > 0.7
    twin = replayed(method, "hat", norm=True)
    assert all(torch.equal(answers(twin, i), answers(method, i)) for i in range(3))

    def drift(name: str) -> float:
        then = answers(learned(name, count=1, epochs=6), 0).softmax(1)
        return float((answers(learned(name, count=2, epochs=6), 0).softmax(1) - then).abs().mean())

    assert drift("hat") < drift("finetuning") / 5


def test_residual_networks_share_gates_where_they_add() -> None:
    torch.manual_seed(0)
    method = Hat(nets.build("resnet18", (1, 8, 8), width=0.07), example())
    fit = Fit(regime(1, lr=0.01))
    for each in tasks(2):
        method.learn(each, fit)
    assert method.predictor(0)(IMAGES).shape == (6, 2)
    assert (
        sum(method.sizes.values())
        == method.embeddings[0].numel()
        < sum(m.out_channels for m in method.net.modules() if isinstance(m, nn.Conv2d))
    )


def test_features_that_are_kept_get_no_gates_and_are_held_after_the_first_task() -> None:
    method = Hat(net(), example(), keep=["4"])
    assert method.sizes == {"0": 8, "9": 32}
    method.add_task(TaskSpec("a", 2))
    method.add_task(TaskSpec("b", 2))
    method.hold()
    method.before_step(0.5)
    held = method.held()
    torch.testing.assert_close(held["4.bias"], torch.ones(16))
    torch.testing.assert_close(held["9.weight"], method._used[8:, None].expand(32, 64))


def test_overhead_is_a_float_per_feature_and_task() -> None:
    method = two()
    assert method.overhead().inference == method.overhead().training == 2 * 32 * (8 + 16 + 32)
    method.drop_task()
    assert method.overhead().inference == 32 * (8 + 16 + 32)


def test_gates_that_never_become_steep_are_refused() -> None:
    with pytest.raises(ValueError, match="smax"):
        Hat(net(), example(), smax=0.5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weight_decay_pulls_neither_at_what_is_held_nor_at_the_gates(momentum: float) -> None:
    """A step with decay is the step without it on held weights; free ones decay by the share that is free."""
    method = two()
    method.hold()
    method._decay = 0.1
    method.clip = math.inf
    held = method.held()
    before = {name: p.detach().clone() for name, p in method.net.named_parameters()}
    gates = method.embeddings[-1].detach().clone()
    optimizer = torch.optim.SGD(method.trainable(), lr=0.5, momentum=momentum, weight_decay=0.1)
    method.before_step(0.5)
    for p in method.trainable():
        p.grad = torch.zeros_like(p)  # decay alone moves
    method.after_backward()
    optimizer.step()
    torch.testing.assert_close(method.embeddings[-1].detach(), gates)
    for name, p in method.net.named_parameters():
        if name in held:
            torch.testing.assert_close(p.detach(), before[name] * (1 - 0.5 * 0.1 * (1 - held[name])))


def test_a_bound_on_the_gradient_leaves_what_makes_up_for_decay_as_it_is() -> None:
    method = full(clip=1e-3)
    method.hold()
    method._decay = 0.1
    method.before_step(0.5)
    method.loss(IMAGES, LABELS, 1).backward()
    method.after_backward()
    for parameter in method.net.parameters():
        torch.testing.assert_close(parameter.grad, -0.1 * parameter.detach())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("bound", "decay"), [(1e9, 0.0), (0.5, 0.1)])
def test_a_held_step_is_the_formula_in_double_precision(
    layout: torch.memory_format, bound: float, decay: float
) -> None:
    """scale · (1 − held) · g − decay · held · θ, where the scale bounds the norm of all that is free to move."""
    method = two(clip=bound)
    method.to(memory_format=layout)  # type: ignore[call-overload]
    method.hold()
    method._decay = decay
    method.before_step(0.5)
    method.loss(IMAGES, LABELS, 1).backward()
    e, held = method.embeddings[1], {id(method.net.get_parameter(n)): h.double() for n, h in method.held().items()}
    free = {}
    for p in method.trainable():
        g = cast(Tensor, p.grad).double()
        factor = compensation(e.detach(), method.get_buffer("steepness"), method.smax).double() if p is e else 1.0
        free[p] = g * factor * (1 - held.get(id(p), torch.zeros(())))
    norm = torch.stack([g.norm() for g in free.values()]).norm()
    assert (float(norm) > bound) == (decay > 0)
    method.after_backward()
    for p, g in free.items():
        faded = decay * held.get(id(p), torch.tensor(float(p is e))) * p.detach().double()
        torch.testing.assert_close(p.grad, (g * min(1.0, bound / float(norm)) - faded).float())


def test_the_least_along_every_dimension() -> None:
    like, sizes = torch.zeros(0), (4, 5, 3, 2)
    along = [torch.rand(size) for size in sizes]
    found = least(along, like)
    assert found.shape == sizes
    assert all(found[at] == min(a[i] for a, i in zip(along, at, strict=True)) for at in [(0, 0, 0, 0), (3, 4, 2, 1)])
    assert torch.equal(least(along[:1], like), along[0])
    assert torch.equal(least([], like), torch.ones(()))


def test_what_old_tasks_need_of_all_features_does_not_fade_while_another_is_learned() -> None:
    method = full()
    method.drop_task()
    before = {name: p.detach().clone() for name, p in method.net.named_parameters()}
    method.learn(tasks()[1], Fit(regime(2, options={"momentum": 0.9, "weight_decay": 0.1})))
    for name, p in method.net.named_parameters():
        torch.testing.assert_close(p.detach(), before[name])


def test_it_hardly_forgets_under_momentum_and_weight_decay() -> None:
    torch.manual_seed(0)
    method = Hat(net(), example())
    first, second = tasks()[:2]
    recipe = replace(regime(), options={"momentum": 0.9, "weight_decay": 0.01}, lr=0.02)
    method.learn(first, Fit(recipe))
    was = right(method, 0)
    method.learn(second, Fit(recipe))
    assert was > 0.8
    assert right(method, 0) > was - 0.05


def test_weight_decay_that_goes_past_the_gradient_is_refused() -> None:
    method = Hat(net(), example())
    with pytest.raises(ValueError, match="adamw's weight decay goes past"):
        method.learn(tasks()[0], Fit(replace(regime(), optimizer="adamw")))
    assert not method.specs
    method.learn(tasks()[0], Fit(replace(regime(), optimizer="adamw", options={"weight_decay": 0.0}, lr=0.001)))


@pytest.mark.parametrize(
    ("optimizer", "options", "decay", "apart"),
    [
        ("sgd", {}, 0.0, False),
        ("SGD", {"weight_decay": 0.1}, 0.1, False),
        ("adamw", {}, 0.01, True),
        ("adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, 0.1, True),
        ("rprop", {}, 0.0, False),
    ],
)
def test_a_regime_knows_its_weight_decay(optimizer: str, options: dict[str, Any], decay: float, apart: bool) -> None:
    known = Regime(optimizer=optimizer, options=options)
    assert (known.weight_decay, known.decays_apart) == (decay, apart)


def test_what_is_used_is_what_any_task_before_needs() -> None:
    method = two()
    method.add_task(TaskSpec("c", 2))
    each = torch.stack([method.attention(k).detach() for k in range(2)])
    assert torch.equal(method.used(), torch.maximum(*each))
    assert not torch.equal(method.used(), each[0])
    assert not torch.equal(method.used(), each[1])


def test_the_regimes_bound_on_the_gradient_is_hats_to_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must come before decay is made up for, so the loop itself bounds nothing."""
    monkeypatch.setattr("zeroforget.training.epochs.clip", lambda *args: pytest.fail("the loop bounded the gradient"))
    for bound, expected in ((0.5, 0.5), (None, 7.0), (100.0, 7.0)):
        method = Hat(net(), example(), clip=7.0)
        method.learn(tasks()[0], Fit(regime(1, clip=bound)))
        assert method._bound == expected


def test_old_tasks_have_their_own_normalization() -> None:
    method = learned("hat", count=2, norm=True, epochs=1)
    before = answers(method, 0)
    with torch.no_grad():
        method.net.get_buffer("1.running_mean").add_(5.0)
    assert torch.equal(answers(method, 0), before)


def test_a_finished_task_is_served_with_the_normalization_it_ended_with() -> None:
    """Also where it is asked while the next one is learned."""
    method = learned("hat", count=1, norm=True, epochs=1)
    then = answers(method, 0)
    method.add_task(TaskSpec("b", 2))
    assert torch.equal(answers(method, 0), then)
    with torch.no_grad():
        method.net.get_buffer("1.running_mean").add_(5.0)
    x = tasks()[0].prepare.test(tasks()[0].test.batch(torch.arange(len(tasks()[0].test)))[0])
    assert torch.equal(method.eval()(x, 0), then)


@pytest.mark.parametrize("start", [-1.0, 0.0, 2.5])
def test_embeddings_start_around_where_they_are_told(start: float) -> None:
    plain, moved = Hat(net(), example(), start=0.0), Hat(net(), example(), start=start)
    for method in (plain, moved):
        torch.manual_seed(5)
        method.add_task(TaskSpec("a", 2))
    torch.testing.assert_close(moved.embeddings[0].detach(), plain.embeddings[0].detach() + start)


def test_gates_of_features_side_by_side_and_of_every_pair() -> None:
    gates = {"a": torch.tensor([0.1, 0.2]), "b": torch.tensor([0.3, 0.4, 0.5])}
    a, b = Named("a"), Named("b")
    like = torch.zeros(0)
    assert torch.equal(gates_of(Concat((a, 2, b)), gates, like), torch.tensor([0.1, 0.2, 1, 1, 0.3, 0.4, 0.5]))
    pairs = torch.stack([x * y for x in gates["a"] for y in gates["b"]])
    assert torch.equal(gates_of(Product((a, b)), gates, like), pairs)
    assert torch.equal(gates_of(Product((2, a)), gates, like), torch.tensor([0.1, 0.2, 0.1, 0.2]))


class Placed(nn.Module):
    """Reads pictures line by line, and adds to each line what is learned for its place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 5)
        self.table = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5)"""
        out: Tensor = self.second(torch.relu(self.first(x.squeeze(1)) + self.table).mean(1))
        return out


def test_a_table_that_is_added_has_the_features_axes_and_no_gates_of_its_own() -> None:
    method = Hat(Placed(), example())
    method.add_task(TaskSpec("a", 2))
    with torch.no_grad():
        method.embeddings[0] *= 0.003
    inner, last = method.by_axis(method.attention(0).detach()).values()
    body = cast(Placed, method.net)
    h = torch.relu(body.first(IMAGES.squeeze(1)) + body.table).mean(1) * inner
    torch.testing.assert_close(method.predictor(0)(IMAGES), method.heads[0](body.second(h) * last))


class Reads(nn.Module):
    """A linear layer called by name, one whose weight another shares, one that attention code reads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.named = nn.Linear(12, 12)
        self.one = nn.Linear(12, 12)
        self.two = nn.Linear(12, 12)
        self.two.weight = self.one.weight
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.last = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.named(input=F.relu(self.first(x.flatten(1))))
        h = F.relu(self.two(F.relu(self.one(h))))
        tokens = torch.stack([h, F.relu(h - 0.1)], 1)
        tokens = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        out: Tensor = self.last(tokens.mean(1))
        return out


def test_gates_before_linear_layers_are_gates_in_their_weights() -> None:
    torch.manual_seed(4)
    method = Hat(Reads(), example())
    method.add_task(TaskSpec("a", 2))
    with torch.no_grad():
        method.embeddings[0] *= 0.003
    assert set(method.linear) == {"named.weight", "first.weight", "last.weight"}
    assert {"one.weight", "attention.out_proj.weight"} < set(method.readers)
    method.hold()
    method.before_step(0.5)
    method.loss(IMAGES, LABELS, 0).backward()
    by_hooks = {name: cast(Tensor, p.grad).clone() for name, p in method.named_parameters()}
    torch.testing.assert_close(method(IMAGES, 0), method.predictor(0)(IMAGES))
    method.zero_grad()
    method.linear = {}
    method.loss(IMAGES, LABELS, 0).backward()
    for name, parameter in method.named_parameters():
        torch.testing.assert_close(by_hooks[name], parameter.grad)
    assert not any(module._forward_pre_hooks for module in method.modules())
