"""A scenario that could not be learned to its end is refused as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zeroforget.data import Preparation, Scenario, Split, Task

SHAPE = (1, 6, 4)


def task(name: str = "b", classes: int = 2, images: Tensor | None = None, labels: Tensor | None = None) -> Task:
    x = torch.rand(4, *SHAPE) if images is None else images
    y = torch.arange(len(x)) % classes if labels is None else labels
    return Task(name, tuple(map(str, range(classes))), *[Split(x, y)] * 3)


def test_a_sound_one_passes() -> None:
    Scenario("s", SHAPE, (task("a"), task("b", 3), task("c", images=torch.zeros(2, *SHAPE, dtype=torch.uint8)))).check()
    large = replace(task("b", images=torch.rand(2, 1, 9, 9)), prepare=Preparation(crop=5))
    Scenario("s", (1, 5, 5), (replace(task("a", images=torch.rand(2, 1, 5, 5))), large)).check()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (task("a"), "scenario 's' has two tasks 'a'"),
        (task(classes=1), r"task 'b' has 1 class\(es\)"),
        (task(labels=torch.tensor([0, 1, 2, 0])), "labels run from 0 to 2"),
        (task(images=torch.rand(4, 1, 4, 4)), "'b': train images come to the network as 1x4x4, .*scenario.* is 1x6x4"),
        (task(images=torch.rand(4, *SHAPE).double()), "'b': train images come to the network as torch.float64"),
        (task(images=torch.ones(4, *SHAPE).long()), "task 'b': the train images are torch.int64; give bytes"),
        (replace(task(), prepare=Preparation((0.5,) * 3, (0.2,) * 3)), "come to the network as 3x6x4"),
        (replace(task(), prepare=Preparation(crop=5)), "come to the network as"),
        (task(labels=torch.tensor([0.0, 1.0, 1.0, 0.0])), "task 'b': train labels are torch.float32; .*labels.long()"),
        (task(labels=torch.tensor([False, True, True, False])), "labels are torch.bool"),
        (task(labels=torch.eye(2).long()[[0, 1, 1, 0]]), r"labels are of shape \(4, 2\)"),
    ],
)
def test_what_its_second_task_lacks_is_named(second: Task, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenario("s", SHAPE, (task("a"), second)).check()


def test_no_tasks_at_all() -> None:
    with pytest.raises(ValueError, match="scenario 's' has no tasks"):
        Scenario("s", SHAPE, ()).check()


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_whole_kind_count_on_past_its_end(kind: torch.dtype) -> None:
    labels = (torch.arange(4) % 2).to(kind)
    parts = [task(str(place), labels=labels) for place in range(200)]
    parts[0].check()
    assert torch.equal(parts[0].train.batch(torch.tensor([3, 0]))[1], torch.tensor([1, 0]))
    merged = Split.merge([part.train for part in parts], range(0, 400, 2))
    assert torch.equal(merged.labels[-4:], torch.tensor([398, 399, 398, 399]))


def test_merged_splits_keep_to_their_own_rows() -> None:
    images, others = torch.arange(6.0).view(6, 1, 1, 1), torch.arange(6.0, 9.0).view(3, 1, 1, 1)
    part = Split(images, torch.tensor([0, 1]), torch.tensor([4, 2]))
    whole, other = Split(images, torch.zeros(6)), Split(others, torch.tensor([1, 0, 1]))
    everything = torch.arange(8)
    for splits, seen in (([part, whole], [4, 2, 0, 1, 2, 3, 4, 5]), ([part, other], [4, 2, 6, 7, 8])):
        merged = Split.merge(splits, [0, 2])
        found, labels = merged.batch(everything[: len(merged)])
        assert found.flatten().tolist() == seen
        assert labels.tolist() == [0, 1, *(splits[1].labels.long() + 2).tolist()]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_images_that_are_used_must_be_finite(value: float) -> None:
    images = torch.rand(5, *SHAPE)
    images[4, 0, 0, 0] = value
    unused = Split(images, torch.tensor([0, 1]), torch.tensor([0, 1]))
    used = replace(unused, rows=torch.tensor([0, 4]))
    Task("a", ("x", "y"), unused, unused, unused).check()
    with pytest.raises(ValueError, match="the test images hold NaN or infinite values"):
        Task("a", ("x", "y"), unused, unused, used).check()


def test_arrays_and_lists_are_told_to_become_tensors() -> None:
    images, labels = torch.rand(4, *SHAPE), torch.arange(4) % 2
    for wrong, part in (((images.numpy(), labels), "images"), ((images, [0, 1, 0, 1]), "labels")):
        with pytest.raises(ValueError, match=rf"a split's {part} are a tensor, not \w+; torch.as_tensor"):
            Split(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rows are a tensor, not list"):
        Split(images, labels[:2], [0, 1])  # type: ignore[arg-type]
