"""WSN: what a task uses never moves again, and its masks are of exactly the size that was asked for."""

from __future__ import annotations

import math

import pytest
import torch

from tests.methods.small_tasks import answers, example, net, regime, tasks
from zeroforget.methods.per_task import LENGTH, BitMasks, code_lengths, coded_bits
from zeroforget.methods.scored import Wsn
from zeroforget.training import Fit


def test_used_weights_never_move_and_free_ones_do() -> None:
    method, fit = Wsn(net(norm=True), example(), capacity=0.3), Fit(regime(2, clip=1.0))
    then: list[torch.Tensor] = []
    for index, task in enumerate(tasks()):
        before = {name: method.net.get_parameter(name).detach().clone() for name in method.masks.shapes}
        used = method.masks.union(index) if index else {}
        method.learn(task, fit)
        then.append(answers(method, index))
        for name, mask in used.items():
            now = method.net.get_parameter(name)
            assert torch.equal(now[mask], before[name][mask]), name
        if used:
            chosen = method.masks.read(index)["9.weight"] & ~used["9.weight"]
            now = method.net.get_parameter("9.weight")
            assert not torch.equal(now[chosen], before["9.weight"][chosen])
    assert all(torch.equal(answers(method, index), was) for index, was in enumerate(then))


@pytest.mark.parametrize("capacity", [0.03, 0.5, 1.0])
def test_masks_are_of_exactly_that_share_and_of_the_highest_scores(capacity: float) -> None:
    method = Wsn(net(), example(), capacity=capacity)
    method.learn(tasks()[0], Fit(regime(1)))
    for (name, mask), score in zip(method.masks.read(0).items(), method.scores, strict=True):
        assert int(mask.sum()) == max(1, round(capacity * mask.numel())), name
        size = score.detach().abs()
        assert mask.all() or size[mask].min() >= size[~mask].max()


def test_scores_go_on_from_task_to_task_and_tasks_share_weights() -> None:
    method = Wsn(net(), example(), capacity=0.5)
    for task in tasks()[:2]:
        method.learn(task, Fit(regime(1)))
    one, two = (method.masks.read(index)["9.weight"] for index in (0, 1))
    assert float((one & two).float().mean()) > 0.4  # by chance it would be a quarter
    assert not torch.equal(one, two)


def test_the_gradient_goes_straight_through_to_the_scores() -> None:
    """∂L/∂s = ∂L/∂(w ⊙ m) · w · sign(s), whether the weight is on or not."""
    method = Wsn(net(), example(), capacity=0.5)
    method.learn(tasks()[0], Fit(regime(1)))
    x, y = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 0, 1, 1, 0])
    method.zero_grad()
    method.eval().loss(x, y, 0).backward()
    place = list(method.masks.shapes).index("9.weight")
    score, weight = method.scores[place], method.net.get_parameter("9.weight")
    on = method.masks.read(0)["9.weight"]
    assert score.grad is not None
    assert weight.grad is not None
    assert not weight.grad[~on].any()
    torch.testing.assert_close(score.grad[on], (weight.grad * weight * score.sign())[on])
    assert score.grad[~on].any()


def test_code_words_of_a_known_source() -> None:
    """Powers of two have code words of exactly their information; the lengths fill Kraft's sum."""
    assert code_lengths([8, 4, 2, 1, 1, 0]) == [1, 2, 3, 4, 4, 0]
    assert code_lengths([0, 5]) == [0, 1]
    lengths = code_lengths([13, 1, 7, 7, 2, 40, 3])
    assert sum(2.0**-length for length in lengths) == 1.0


def test_coded_masks_are_smaller_where_tasks_share_weights_and_near_the_entropy() -> None:
    draws = torch.Generator().manual_seed(0)
    masks = BitMasks({"a": torch.Size([100, 100])})
    first = torch.rand(100, 100, generator=draws) < 0.1
    for task in range(9):  # two symbols: seven tasks and two
        masks.add(torch.device("cpu"))
        masks.write(task, {"a": first})
    share = float(first.float().mean())
    coded = coded_bits(masks)
    assert coded == 2 * 10000 + LENGTH * (2**7 + 2**2)  # a bit for each of two symbols: all on, or all off
    assert coded > 2 * 10000 * -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
    assert coded < masks.bits()


def test_overhead_counts_what_is_there() -> None:
    method = Wsn(net(), example(), capacity=0.1)
    for task in tasks()[:2]:
        method.learn(task, Fit(regime(1)))
    count = sum(shape.numel() for shape in method.masks.shapes.values())
    found = method.overhead()
    assert found.inference == 2 * 8 * -(-count // 8)
    assert found.packed is not None
    assert found.packed <= found.inference
    assert found.training == found.inference + 2 * 32 * count  # scores, and what is put back


@pytest.mark.parametrize(("options", "what"), [({"capacity": 0.0}, "capacity is"), ({"lr": 0.0}, "lr is Adam's")])
def test_what_cannot_be_meant_is_refused(options: dict[str, float], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Wsn(net(), example(), **options)
