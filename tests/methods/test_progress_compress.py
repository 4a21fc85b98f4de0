"""Progress & compress: which part learns when, what is distilled, and what is kept of old importance."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.methods.small_tasks import answers, example, learned, net, regime, replayed, right, tasks
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.importance import fisher, samples_of
from zeroforget.methods.progress_compress import ProgressCompress
from zeroforget.training import Fit, Progress


def state(method: ProgressCompress, prefix: str) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in method.state_dict().items() if n.startswith(prefix)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def one(norm: bool = False, **options: object) -> ProgressCompress:
    return cast(ProgressCompress, learned("progress-compress", count=1, norm=norm, epochs=2, **options))


@pytest.mark.parametrize("reset", [True, False])
def test_the_active_column_resets_unless_told_not_to(reset: bool) -> None:
    method = one(reset=reset)
    column, laterals = state(method, "active."), state(method, "laterals.0.")
    method.add_task(TaskSpec("more", 3))
    assert same(column, state(method, "active.")) != reset
    assert same(laterals, state(method, "laterals.0.")) != reset


def test_the_base_rests_while_the_column_progresses_and_the_other_way_round() -> None:
    method = one(norm=True)
    seen: dict[int, dict[str, Tensor]] = {}

    def look(progress: Progress) -> None:
        seen[progress.phase] = {n: t.clone() for n, t in method.state_dict().items()}

    before = {n: t.clone() for n, t in method.state_dict().items()}
    method.learn(tasks()[1], Fit(regime(2), progress=look))
    for name in state(method, "net."):
        assert torch.equal(seen[0][name], before[name]), name
    after = {n: t.clone() for n, t in method.state_dict().items()}
    trained = [n for n in state(method, "active.") if not torch.equal(seen[0][n], before[n])]
    assert len(trained) == len(state(method, "active."))
    # Phase 1 starts from the best epoch of phase 0; within it the column does not move.
    assert all(torch.equal(seen[1][n], after[n]) for n in state(method, "active.") | state(method, "laterals."))
    assert not same(state(method, "net.0.weight"), before)
    assert same({n.replace("net.", "base."): t for n, t in state(method, "net.").items()}, state(method, "base."))


@pytest.mark.parametrize("progressing", [True, False])
def test_only_what_learns_is_in_training_mode(progressing: bool) -> None:
    method = one(norm=True)
    method._progressing = progressing
    method.train()
    assert [method.active.training, method.laterals.training, method.active_head.training] == [progressing] * 3
    assert method.net.training != progressing
    assert not any(module.training for module in method.base.modules())


def test_while_a_task_is_learned_the_base_still_answers_for_the_others() -> None:
    method = one()
    then = answers(method, 0)
    method.add_task(TaskSpec("more", 3))
    method._progressing = True
    assert torch.equal(answers(method, 0), then)
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(method.predictor(1)(x), method.ask_active(x))


def test_what_is_distilled_is_the_active_column_under_the_elastic_pull() -> None:
    method = one(strength=7.0, decay=0.5)
    method.add_task(TaskSpec("more", 3))
    method.eval()
    with torch.no_grad():
        for parameter in method.net.parameters():
            parameter += 0.01
    x = torch.randn(5, 1, 8, 8)
    p, q = method.ask_active(x).softmax(1), method(x, 1).softmax(1)
    divergence = sum(p[i, c] * (p[i, c] / q[i, c]).log() for i in range(5) for c in range(3)) / 5
    pull = sum(method.importance[n].sum() for n, _ in method.net.named_parameters()) * 0.01**2
    loss = method.loss(x, torch.zeros(5, dtype=torch.long), 1)
    torch.testing.assert_close(loss, divergence + 7.0 / 2 * 0.5 * pull, rtol=1e-3, atol=1e-5)
    method.zero_grad()
    loss.backward()
    assert all(p.grad is None for p in method.active.parameters())
    assert all(p.grad is not None for p in method.net.parameters())


def test_progress_is_cross_entropy_of_the_column_with_laterals_and_reaches_no_base() -> None:
    method = one()
    method.add_task(TaskSpec("more", 3))
    method._progressing = True
    x, y = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    loss = method.loss(x, y, 1)
    assert torch.equal(loss, F.cross_entropy(method.ask_active(x), y))
    method.zero_grad()
    loss.backward()
    assert all(p.grad is not None for p in method.laterals.parameters())
    assert all(p.grad is None for part in (method.net, method.base) for p in part.parameters())
    before = method.ask_active(x)
    with torch.no_grad():
        method.laterals[-1].scale += 1.0  # type: ignore[operator]
    assert not torch.equal(method.ask_active(x), before), "the head ignores its lateral"


def test_the_teacher_reads_the_base_as_it_was() -> None:
    method = one()
    method.eval()
    x = torch.randn(5, 1, 8, 8)
    before = method.ask_active(x)
    with torch.no_grad():
        for parameter in method.net.parameters():
            parameter.zero_()
    assert torch.equal(method.ask_active(x), before)


def test_importance_fades_and_adds() -> None:
    method = one(decay=0.25)
    first = {n: method.importance[n].clone() for n, _ in method.net.named_parameters()}
    fit = Fit(regime(2))
    method.learn(tasks()[1], fit)
    names = [f"net.{n}" for n in first]
    now = fisher(method, names, samples_of(tasks()[1], fit, 1), 1)
    for name, value in first.items():
        torch.testing.assert_close(method.importance[name], 0.25 * value + now[f"net.{name}"])


def drift(name: str) -> float:
    """How far the first task's probabilities move while the second is learned."""
    then = answers(learned(name, count=1), 0).softmax(1)
    return float((answers(learned(name, count=2), 0).softmax(1) - then).abs().mean())


def test_the_base_moves_less_than_in_finetuning() -> None:
    assert drift("progress-compress") < drift("finetuning") / 2


def test_it_learns_and_loads() -> None:
    method = learned("progress-compress", norm=True)
    assert min(right(method, i) for i in range(3)) > 0.7
    twin = replayed(method, "progress-compress", norm=True)
    assert all(torch.equal(answers(twin, i), answers(method, i)) for i in range(3))


def test_overhead_is_an_extra_network_while_learning() -> None:
    method = one()
    network = sum(p.numel() for p in method.net.parameters())
    extra = sum(p.numel() for p in [*method.laterals.parameters(), *method.active_head.parameters()])
    assert method.overhead().training == 32 * (3 * network + extra)
    assert method.overhead().inference == 0


def test_decay_is_a_share() -> None:
    with pytest.raises(ValueError, match="decay"):
        ProgressCompress(net(), example(), decay=1.5)


def test_the_active_column_begins_with_draws_of_its_own_and_has_seen_nothing() -> None:
    method = ProgressCompress(net(norm=True), example())
    assert method.active.training
    assert not torch.equal(method.active.get_parameter("0.weight"), method.net.get_parameter("0.weight"))
    assert same(state(method, "base."), {n.replace("net.", "base."): t for n, t in state(method, "net.").items()})
    drawn = state(method, "active.")
    method.add_task(TaskSpec("first", 2))
    assert same(drawn, state(method, "active."))
    assert not method.active.get_buffer("1.running_mean").any()


def test_without_a_reset_only_the_lateral_of_the_head_is_new() -> None:
    method = one(reset=False)
    before = list(method.laterals)
    method.add_task(TaskSpec("more", 7))
    assert [now is then for now, then in zip(method.laterals, before, strict=True)] == [True] * (len(before) - 1) + [
        False
    ]
    assert method.ask_active(example()).shape == (2, 7)
