"""The transfer check's parts: adapters that start as nothing, bytes that match tensors, a table, one small race."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import transfer, transfer_contestants, transfer_docs
from benchmarks.transfer_contestants import (
    Adapting,
    Classifier,
    Copying,
    FromScratch,
    Growing,
    bytes_of_growth,
    fresh,
    rank_within,
)
from benchmarks.transfer_lora import Adapted, LowRank, capped, nbytes, rank_near
from benchmarks.transfer_training import exact, fewer, one_cycle, train
from zeroforget.data import Preparation, Split, Task
from zeroforget.nets.resnet import ResNet
from zeroforget.proving.grow import adopt
from zeroforget.training import Regime

SHAPE = (3, 16, 16)
WIDTH = 0.0625


def made_up(name: str, classes: int = 3, count: int = 8) -> Task:
    """Images of noise around a color for each class."""
    generator = torch.Generator().manual_seed(len(name))
    colors = torch.randint(40, 200, (classes, 3, 1, 1), generator=generator)
    labels = torch.arange(classes).repeat_interleave(count)
    noise = torch.randint(0, 40, (len(labels), *SHAPE), generator=generator)
    split = Split((colors[labels] + noise).to(torch.uint8), labels)
    names = tuple(f"{name} {label}" for label in range(classes))
    return Task(name, names, split, split, split, Preparation((0.5,) * 3, (0.25,) * 3, pad=2, flip=True))


def small(shape: tuple[int, int, int], classes: int, width: float) -> Classifier:
    """The same kind of network with two blocks instead of eight."""
    return Classifier(ResNet((1, 1), False, shape, width=width), classes)


@pytest.fixture
def classifier() -> Classifier:
    torch.manual_seed(0)
    plain = small(SHAPE, 5, WIDTH)
    plain(torch.randn(16, *SHAPE))  # batch statistics of its own
    return plain.requires_grad_(False).eval()


def test_a_low_rank_branch_starts_as_nothing_and_is_a_low_rank_change_of_the_weight() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
    x = torch.randn(2, 4, 9, 9)
    expected = plain(x)
    branch = LowRank(plain, 2)
    assert torch.equal(branch(x), expected)
    nn.init.normal_(branch.up.weight)
    change = torch.einsum("or,rikl->oikl", branch.up.weight[:, :, 0, 0], branch.down.weight)
    assert torch.linalg.matrix_rank(change.detach().flatten(1)) == 2
    merged = F.conv2d(x, plain.weight + change, stride=2, padding=1)
    assert torch.allclose(branch(x), merged, atol=1e-5)
    assert not plain.weight.requires_grad
    assert branch.down.weight.requires_grad


def test_grouped_convolutions_get_no_branch() -> None:
    with pytest.raises(ValueError, match="without groups"):
        LowRank(nn.Conv2d(4, 4, 3, groups=4), 1)


def test_an_adapted_network_starts_with_the_features_of_the_one_in_service(classifier: Classifier) -> None:
    adapted = Adapted(classifier.features, 3, 2).eval()
    x = torch.randn(2, *SHAPE)
    assert torch.equal(adapted.features(x), classifier.features(x))
    frozen = {name for name, p in adapted.named_parameters() if not p.requires_grad}
    convolutions = [m for m in classifier.modules() if isinstance(m, nn.Conv2d)]
    assert len(frozen) == len(convolutions)
    assert all(name.endswith(".plain.weight") for name in frozen)
    stored = sum(t.numel() * t.element_size() for name, t in adapted.state_dict().items() if name not in frozen)
    assert nbytes(adapted.own()) == stored


def test_the_rank_is_the_one_whose_bytes_are_closest(classifier: Classifier) -> None:
    sizes = {rank: nbytes(Adapted(classifier.features, 3, rank).own()) for rank in range(1, 9)}
    assert [rank_near(classifier.features, 3, sizes[rank] + 1) for rank in (1, 2, 3)] == [1, 2, 3]
    largest = Adapted(classifier.features, 3, 1000)
    for module in largest.modules():
        if isinstance(module, LowRank):
            branch = module.down.weight.numel() + module.up.weight.numel()
            assert branch <= module.plain.weight.numel()
            assert module.down.out_channels == capped(module.plain, 1000)


def test_bytes_of_growth_are_those_of_the_tensors_that_a_task_trains_and_its_statistics(classifier: Classifier) -> None:
    net = adopt(classifier, torch.randn(2, *SHAPE), task="service")
    growing = Growing(net, 0.25)
    sizes = []
    for name in ("two", "three", "four"):
        model = growing.begin(made_up(name))
        trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
        norms = [m for m in classifier.modules() if isinstance(m, nn.BatchNorm2d)]
        features = sum(len(m.tasks[-1].running_mean) for m in growing.net.body.modules() if hasattr(m, "tasks"))
        statistics = 2 * 4 * features + 8 * len(norms)  # mean, variance, and the counter of batches
        masks = sum(-(-width // 4) for width in growing.net.widths().values())
        assert growing.stored() == trained + statistics + masks
        sizes.append(growing.stored())
    assert bytes_of_growth(net, 0.25, 3, 3) == sum(sizes) / 3
    assert net.tasks == ("service",)


@pytest.mark.parametrize("growth", [0.0, 0.2])
def test_rank_births_are_as_large_as_fits_into_the_bytes(classifier: Classifier, growth: float) -> None:
    net = adopt(classifier, torch.randn(2, *SHAPE), task="service")
    wanted = bytes_of_growth(net, growth, 1, 3) + 1500
    rank = rank_within(net, growth, wanted, 1, 3)
    sizes = {}
    for tried in (rank, rank + 1):
        growing = Growing(net, growth, tried, "it")
        growing.begin(made_up("two"))
        sizes[tried] = growing.stored()
    powers = 4 * len(net.leaning())
    assert rank > 1
    assert sizes[rank] <= wanted + powers < sizes[rank + 1] + powers
    assert rank_within(net, growth, 0.0, 1, 3) == 1


def test_contestants_leave_the_first_task_alone_and_learn(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = adopt(classifier, torch.randn(2, *SHAPE), task="service")
    x = torch.randn(4, *SHAPE)
    expected = classifier(x)
    assert torch.equal(net(x, 0), expected)
    regime = Regime(optimizer="adamw", lr=0.03, epochs=10, batch_size=8)
    monkeypatch.setattr(transfer_contestants, "fresh", small)
    contestants: list[Any] = [
        Growing(net, 0.0),
        Growing(net, 0.2),
        Growing(net, 0.1, 2, "growth 20 %"),
        Copying(classifier),
        Adapting(classifier, 2, "growth 20 %"),
    ]
    for contestant in [*contestants, FromScratch(classifier, SHAPE, WIDTH)]:
        for name in ("two", "three"):
            task = made_up(name)
            model = contestant.begin(task)
            before = {key: value.clone() for key, value in contestant.moving().items()}
            took = train(model, contestant.moving, task, regime, seed=0)
            moved = [key for key, value in contestant.moving().items() if not torch.equal(value, before[key])]
            assert any("running_mean" in key for key in moved)
            assert took.loss < 1.0  # chance is log(3) = 1.0986
            with exact():
                assert torch.equal(contestant.first()(x), expected)
                assert contestant.answer()(x).shape == (4, 3)


def test_a_network_in_service_is_a_resnet_with_batch_norms() -> None:
    plain = fresh((3, 64, 64), 5, WIDTH)
    assert plain(torch.randn(2, 3, 64, 64)).shape == (2, 5)
    assert plain.features.stem(torch.randn(2, 3, 64, 64)).shape == (2, 4, 32, 32)


def test_a_trial_is_taken_back(classifier: Classifier) -> None:
    net = adopt(classifier, torch.randn(2, *SHAPE), task="service")
    growing = Growing(net, 0.2)
    growing.begin(made_up("two"))
    growing.discard()
    assert growing.net.tasks == ("service",)


def test_the_rate_rises_and_falls() -> None:
    shares = [one_cycle(step / 100) for step in range(101)]
    assert shares[0] == 0
    assert max(shares) == shares[25] == 1
    assert shares[100] == pytest.approx(0)


def test_fewer_keeps_the_first_classes() -> None:
    part = fewer(made_up("two", classes=4, count=6), 2, 3)
    assert part.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert part.classes == ("two 0", "two 1")


def test_a_race_writes_down_what_it_found_and_the_page_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [made_up("service", 5), *(made_up(name) for name in ("two", "three", "four"))]
    monkeypatch.setattr(transfer, "tasks_of", lambda *_: tasks)
    monkeypatch.setattr(transfer, "SHAPE", SHAPE)
    monkeypatch.setattr(transfer, "fresh", small)
    monkeypatch.setattr(transfer_contestants, "fresh", small)
    size = replace(transfer.QUICK, first=5, classes=3, width=WIDTH, first_epochs=1, epochs=1, rates=(1e-3, 1e-2))
    args = transfer.arguments(["--device", "cpu", "--quick"])
    race = transfer.Race(size, 0, "cpu", False, None)
    found = transfer.about(args, size) | {"runs": [race.facts]}
    results, states = tmp_path / "results" / "transfer.json", 0
    for _ in race.run():
        transfer.write(results, found)
        states += 1
    assert states == 2 + 12 * 3
    (run,) = json.loads(results.read_text())["runs"]
    assert run["adopted"]["equal"]
    assert all(task["first_equal"] for each in run["contestants"] for task in each["tasks"])
    sizes = {each["name"]: sum(task["bytes"] for task in each["tasks"]) / 3 for each in run["contestants"]}
    assert abs(sizes["adapters, bytes as growth 20 %"] - sizes["growth 20 %"]) < 0.3 * sizes["growth 20 %"]
    leaning = "rank births, bytes as growth 5 %"
    assert {leaning, f"growth 2 % and {leaning}", "growth 0.2 % and rank births, bytes as 1.1 % of the network"} < set(
        sizes
    )
    assert all(("rank" in each) == ("bytes as" in each["name"]) for each in run["contestants"])

    page = tmp_path / "transfer.md"
    page.write_text("before\n\n<!-- transfer -->\nold\n<!-- end -->\n\nafter\n")
    transfer_docs.write(page, results)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\n\nafter\n")
    assert "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "accuracy" not in line]
    assert len(rows) == 12
    assert rows[0].startswith("| growth 0 % | **")
    assert all(row.endswith("| yes |") for row in rows)
    assert len({row.count("|") for row in text.splitlines() if row.startswith("|")}) == 1


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    with pytest.raises(ValueError, match="no lines"):
        transfer_docs.write(page, tmp_path / "none.json")
    assert page.read_text() == "nothing here\n"
