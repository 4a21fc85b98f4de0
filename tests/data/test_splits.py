"""Whatever the seed and the sizes, tasks partition the classes, and their splits partition the images."""

from __future__ import annotations

import dataclasses
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroforget.data import Collection, DataError, Preparation, Task
from zeroforget.data.scenarios import cut, equal_sizes, grouped, hold_out, named_groups
from zeroforget.data.values import set_apart

calm = settings(deadline=None)
seeds = st.integers(0, 2**31 - 1)


def collection(per_class: list[tuple[int, int]]) -> Collection:
    """One image for each row, whose single pixel is its own number modulo 251."""
    labels = list(chain.from_iterable([label] * sum(counts) for label, counts in enumerate(per_class)))
    test = list(chain.from_iterable([False] * train + [True] * final for train, final in per_class))
    order = np.random.RandomState(len(labels)).permutation(len(labels))
    images = torch.arange(len(labels)).remainder(251).to(torch.uint8).view(-1, 1, 1, 1)
    names = tuple(f"c{label}" for label in range(len(per_class)))
    codes = tuple(f"n{label}" for label in range(len(per_class)))
    marks = torch.tensor(labels)[order], torch.tensor(test)[order]
    return Collection("made", names, images, *marks, Preparation(), codes)


@calm
@given(st.integers(1, 30), st.integers(2, 200))
def test_equal_sizes_are_equal_and_complete(tasks: int, classes: int) -> None:
    if classes < 2 * tasks:
        with pytest.raises(ValueError, match="at least 2 classes"):
            equal_sizes(classes, tasks)
        return
    sizes = equal_sizes(classes, tasks)
    assert sum(sizes) == classes
    assert len(sizes) == tasks
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@calm
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), seeds)
def test_groups_partition_the_classes(sizes: list[int], seed: int) -> None:
    groups = grouped(sum(sizes), sizes, seed)
    assert [len(group) for group in groups] == sizes
    assert sorted(chain.from_iterable(groups)) == list(range(sum(sizes)))
    assert groups == grouped(sum(sizes), sizes, seed)
    assert list(chain.from_iterable(grouped(sum(sizes), sizes, None))) == list(range(sum(sizes)))


@calm
@given(st.integers(0, 400), st.integers(0, 999), seeds)
def test_a_tenth_is_held_out(count: int, label: int, seed: int) -> None:
    members = np.arange(count) * 3
    kept, held = hold_out(members, label, seed)
    assert sorted([*kept, *held]) == members.tolist()
    assert abs(len(held) - count / 10) <= 0.5 or (len(held) == 1 and 2 <= count < 10)
    assert np.array_equal(held, hold_out(members, label, seed)[1])


@pytest.mark.parametrize(("count", "held"), [(0, 0), (1, 0), (2, 1), (14, 1), (16, 2), (100, 10)])
def test_a_single_image_is_for_training(count: int, held: int) -> None:
    assert len(hold_out(np.arange(count), 0, 0)[1]) == held


def test_a_task_of_classes_with_single_images_says_how_many_are_needed() -> None:
    cut(collection([(1, 1), (2, 1)]), [[0, 1]], ["enough"], 0)[0].check()
    with pytest.raises(ValueError, match=r"'few' has no val images; .*two training images for one of them to be kept"):
        cut(collection([(1, 1)] * 2), [[0, 1]], ["few"], 0)[0].check()


def rows(task: Task) -> dict[str, list[int]]:
    return {part: split.rows.tolist() for part in ("train", "val", "test") if (split := getattr(task, part))}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(2, 25), st.integers(1, 6)), min_size=4, max_size=12), st.integers(1, 3), seeds)
def test_tasks_partition_the_images(per_class: list[tuple[int, int]], tasks: int, seed: int) -> None:
    whole = collection(per_class)
    tasks = min(tasks, len(per_class) // 2)
    groups = grouped(len(per_class), equal_sizes(len(per_class), tasks), seed)
    made = cut(whole, groups, [f"t{place}" for place in range(tasks)], seed)
    used: list[int] = []
    for task, group in zip(made, groups, strict=True):
        task.check()
        assert task.classes == tuple(whole.classes[label] for label in group)
        for part, places in rows(task).items():
            split = getattr(task, part)
            assert split.images is whole.images
            assert [group[label] for label in split.labels.tolist()] == whole.labels[places].tolist()
            assert set(whole.test[places].tolist()) == {part == "test"}
            assert set(split.labels.tolist()) == set(range(len(group)))
            used += places
    assert sorted(used) == list(range(len(whole)))


def test_the_held_out_images_of_a_class_do_not_depend_on_its_task() -> None:
    whole = collection([(20, 2)] * 6)
    held = []
    for groups in ([[0, 1, 2], [3, 4, 5]], [[5, 0], [1, 4], [3, 2]]):
        made = cut(whole, groups, [str(place) for place in range(len(groups))], 7)
        held.append(sorted(chain.from_iterable(task.val.rows.tolist() for task in made if task.val.rows is not None)))
    assert held[0] == held[1]
    other = cut(whole, [[0, 1, 2, 3, 4, 5]], ["all"], 8)[0].val.rows
    assert sorted(other.tolist()) != held[0]


def test_images_that_are_for_validation_are_not_drawn() -> None:
    """A class without any has a tenth of its training images drawn, as where no class has any."""
    whole = collection([(20, 2)] * 4)
    members = [np.flatnonzero((whole.labels == label) & ~whole.test) for label in range(4)]
    val = torch.zeros(len(whole), dtype=torch.bool)
    val[members[0][:5]] = val[members[2][3]] = True
    marked = dataclasses.replace(whole, val=val)
    made = cut(dataclasses.replace(marked, prepare=Preparation(flip=True)), [[2, 1], [3, 0]], ["a", "b"], 7)
    drawn = {label: hold_out(members[label], label, 7)[1].tolist() for label in (1, 3)}
    first, second = (rows(task) for task in made)
    assert first["val"] == [members[2][3], *drawn[1]]
    assert second["val"] == [*drawn[3], *members[0][:5]]
    used = [*chain.from_iterable(first.values()), *chain.from_iterable(second.values())]
    assert sorted(used) == list(range(len(whole)))
    assert not val[first["train"]].any()


def test_marks_for_validation_that_cannot_be_are_named() -> None:
    whole = collection([(5, 1)] * 2)
    with pytest.raises(DataError, match="12 test marks, but 3 for validation"):
        dataclasses.replace(whole, val=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(DataError, match="marks an image for both validation and testing"):
        dataclasses.replace(whole, val=whole.test)
    with pytest.raises(ValueError, match="class 'c0' has 0 training and 1 test images"):
        cut(dataclasses.replace(whole, val=~whole.test), [[0, 1]], ["t"], 0)


def test_written_groups_by_name_or_code() -> None:
    whole = collection([(5, 1)] * 5)
    assert named_groups(whole, [["c3", "n0"], ["c1", "c4"]]) == [[3, 0], [1, 4]]
    with pytest.raises(ValueError, match=r"no class 'x'; it has c0, c1"):
        named_groups(whole, [["c1", "x"]])
    with pytest.raises(ValueError, match="'n1' is in two tasks"):
        named_groups(whole, [["c1", "c2"], ["n1", "c3"]])
    with pytest.raises(ValueError, match=r"it has c0, .*, c7 and 2 more$"):
        named_groups(collection([(5, 1)] * 10), [["c1", "x"]])
    crossed = dataclasses.replace(whole, codes=tuple(reversed(whole.classes)))
    assert named_groups(crossed, [["c0", "c1"]]) == [[0, 1]], "a name counts before a code"


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"tasks of \[3, 4\] classes make 7, but there are 10 classes"):
        grouped(10, [3, 4], 0)
    with pytest.raises(ValueError, match="class 'c1' has 2 training and 0 test images"):
        cut(collection([(5, 1), (2, 0)]), [[0, 1]], ["t"], 0)


def test_the_draws_never_change() -> None:
    """Results in papers depend on these; a seed must mean the same for ever."""
    assert grouped(10, [5, 5], 0) == [[3, 7, 6, 4, 1], [0, 2, 8, 5, 9]]
    assert hold_out(np.arange(20), 3, 0)[1].tolist() == [7, 13]
    assert hold_out(np.arange(100, 130), 0, 5)[1].tolist() == [109, 113, 117]
    marks = set_apart(np.arange(24) % 2)
    assert np.flatnonzero(marks).tolist() == [4, 8, 15, 21]


def test_a_fifth_is_set_apart_for_testing_and_never_all() -> None:
    for count, apart in ((1, 0), (2, 0), (3, 1), (9, 1), (10, 2), (14, 2), (15, 3)):
        assert set_apart(np.zeros(count, dtype=np.int64)).sum() == apart


def test_a_collection_has_one_of_each_for_every_image() -> None:
    whole = collection([(2, 1)] * 2)
    with pytest.raises(DataError, match="6 images, 5 labels and 6 test marks"):
        dataclasses.replace(whole, labels=whole.labels[:5])
