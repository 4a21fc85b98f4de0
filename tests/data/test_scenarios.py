"""Scenarios by name and by plan."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.data import helpers
from zeroforget.data import Plan, Scenario, load, load_folder, missing, named_plans, plan, scenario, whole_task
from zeroforget.data.scenarios import semantic_groups, superclasses

NAMES = [
    *("digits/5", "fashion-mnist/5", "cifar100/10", "cifar100/20", "cifar100/superclasses"),
    *("tiny-imagenet/random", "tiny-imagenet/semantic", "tiny-imagenet/large-first", "tiny-imagenet/40"),
    *("flowers/4", "birds/4", "actions/4", "imagenet/10", "multi"),
]


def check(made: Scenario) -> None:
    for task in made.tasks:
        task.check()
        assert len(set(task.classes)) == len(task.classes)
        x, y = task.train.batch(torch.arange(2))
        assert task.prepare.train(x, torch.Generator().manual_seed(0)).shape == (2, *made.shape)
        assert task.prepare.test(x).shape == (2, *made.shape)
        assert x.dtype == torch.uint8
        assert y.dtype == torch.int64


def test_every_experiment_of_the_paper_has_its_scenario() -> None:
    assert list(named_plans()) == NAMES


def test_digits() -> None:
    made = scenario("digits/5", seed=3)
    check(made)
    assert [task.classes for task in made.tasks] == [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7"), ("8", "9")]
    assert sum(len(task.test) for task in made.tasks) == 355
    assert sum(len(task.train) + len(task.val) for task in made.tasks) == 1442


def test_the_seed_moves_validation_images_and_nothing_of_the_test_set() -> None:
    one, other, again = (
        scenario("digits/5", 1).tasks[0],
        scenario("digits/5", 2).tasks[0],
        scenario("digits/5", 1).tasks[0],
    )
    assert torch.equal(one.test.rows, other.test.rows)
    assert not torch.equal(one.val.rows, other.val.rows)
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(one, part).rows, getattr(again, part).rows)
        assert torch.equal(getattr(one, part).labels, getattr(again, part).labels)
        assert torch.equal(getattr(one, part).images, getattr(again, part).images)


def test_statistics_of_digits_are_those_of_its_training_images() -> None:
    found = load("digits")
    pixels = found.images[~found.test].float() / 255
    assert pixels.mean().item() == pytest.approx(found.prepare.mean[0], abs=1e-4)
    assert pixels.std().item() == pytest.approx(found.prepare.std[0], abs=1e-4)


def test_semantic_groups_are_a_partition_of_the_200_classes() -> None:
    groups = semantic_groups()
    codes = list(chain.from_iterable(groups.values()))
    assert [len(group) for group in groups.values()] == [20] * 10
    assert len(codes) == len(set(codes)) == 200
    assert all(code.startswith("n") and code[1:].isdecimal() and len(code) == 9 for code in codes)
    assert groups["animals-water-pets"][11] == "n02113799"  # the paper's "poodle" is the standard poodle
    assert groups["food"][0] == "n04560804"  # water jug
    official = dict(line.split("\t") for line in (Path(__file__).parent / "tiny_words.tsv").read_text().splitlines())
    assert set(codes) == set(official)


def test_every_name_of_the_paper_is_a_word_for_its_class() -> None:
    official = dict(line.split("\t") for line in (Path(__file__).parent / "tiny_words.tsv").read_text().splitlines())
    table = (files("zeroforget.data") / "tiny_semantic.tsv").read_text(encoding="utf-8").splitlines()
    others = []
    for code, _, name in (line.split("\t") for line in table):
        if name.lower() not in official[code].lower().split(", "):
            others.append((name, official[code]))
    assert others == [("poodle", "standard poodle")]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    codes = tuple(sorted(chain.from_iterable(semantic_groups().values())))
    helpers.tiny_imagenet(tmp_path / "tiny-imagenet-200", codes, train=2, val=1)
    return tmp_path


def test_tiny_imagenet_in_three_ways(tiny: Path) -> None:
    everything = Counter(load("tiny-imagenet", tiny).classes)
    for name, sizes in (
        ("random", [20] * 10),
        ("semantic", [20] * 10),
        ("large-first", [110, *[10] * 9]),
        ("40", [5] * 40),
    ):
        made = scenario(f"tiny-imagenet/{name}", 0, tiny)
        assert [len(task.classes) for task in made.tasks] == sizes
        assert Counter(chain.from_iterable(task.classes for task in made.tasks)) == everything
        assert made.shape == (3, 64, 64)
        check(made)
    assert [task.name for task in scenario("tiny-imagenet/semantic", 5, tiny).tasks] == list(semantic_groups())
    pets = scenario("tiny-imagenet/semantic", 0, tiny).tasks[6]
    assert pets.classes[11] == "word of n02113799"
    orders = {tuple(scenario("tiny-imagenet/random", seed, tiny).tasks[0].classes) for seed in range(3)}
    assert len(orders) == 3


def test_cifar100_in_ten_and_twenty(tmp_path: Path) -> None:
    helpers.cifar100(tmp_path / "cifar-100-python")
    for count in (10, 20):
        made = scenario(f"cifar100/{count}", 0, tmp_path)
        check(made)
        assert [len(task.classes) for task in made.tasks] == [100 // count] * count


def test_superclasses_are_the_official_ones(tmp_path: Path) -> None:
    """As the coarse labels of the data files group the fine ones."""
    groups = superclasses()
    fine = sorted(chain.from_iterable(groups.values()))
    assert [len(group) for group in groups.values()] == [5] * 20
    assert len(set(fine)) == 100
    assert groups["large_carnivores"] == ("bear", "leopard", "lion", "tiger", "wolf")
    assert list(groups) == sorted(groups)
    helpers.cifar100(tmp_path / "cifar-100-python", names=fine)
    made = scenario("cifar100/superclasses", 0, tmp_path)
    check(made)
    assert [(task.name, task.classes) for task in made.tasks] == list(groups.items())


def test_order_and_split_have_seeds_of_their_own(tmp_path: Path) -> None:
    fine = sorted(chain.from_iterable(superclasses().values()))
    helpers.cifar100(tmp_path / "cifar-100-python", names=fine)

    def drawn(name: str, **seeds: int) -> tuple[list[tuple[str, ...]], list[int]]:
        made = scenario(name, 0, tmp_path, **seeds)
        kept = torch.cat([task.val.rows for task in made.tasks]).sort().values
        return [task.classes for task in made.tasks], kept.tolist()

    classes, kept = drawn("cifar100/10")
    assert drawn("cifar100/10", order=0, split=0) == (classes, kept)
    other = drawn("cifar100/10", order=1)
    assert other[0] != classes
    assert other[1] == kept
    other = drawn("cifar100/10", split=1)
    assert other[0] == classes
    assert other[1] != kept
    groups, _ = drawn("cifar100/superclasses")
    shuffled = scenario("cifar100/superclasses", 0, tmp_path, order=3).tasks
    assert [task.classes for task in shuffled] != groups
    assert sorted(task.classes for task in shuffled) == sorted(groups)
    assert [task.name for task in shuffled] == [f"cifar100-{place}" for place in range(1, 21)]


FINE: dict[str, Callable[[Path], None]] = {
    "flowers": lambda folder: helpers.flowers(folder, 9),
    "birds": lambda folder: helpers.birds(folder, 9),
    "scenes": helpers.scenes,
    "cars": helpers.cars,
    "aircraft": helpers.aircraft,
    "actions": helpers.actions,
}


def test_multi_chains_six_data_sets(tmp_path: Path) -> None:
    assert missing("multi", tmp_path) == ["flowers", "scenes", "birds", "cars", "aircraft", "actions"]
    for name, write in FINE.items():
        write(tmp_path / name)
    assert missing("multi", tmp_path) == []
    made = scenario("multi", 0, tmp_path)
    check(made)
    assert [task.name for task in made.tasks] == ["flowers", "scenes", "birds", "cars", "aircraft", "actions"]
    assert made.shape == (3, 224, 224)
    assert made.tasks[0].prepare.crop == 224
    assert made.tasks[2].prepare.crop is None


@pytest.mark.parametrize(("name", "sizes"), [("flowers/4", [3, 2, 2, 2]), ("birds/4", [3, 2, 2, 2])])
def test_fine_grained_in_four(tmp_path: Path, name: str, sizes: list[int]) -> None:
    FINE[name.partition("/")[0]](tmp_path / name.partition("/")[0])
    made = scenario(name, 0, tmp_path)
    check(made)
    assert [len(task.classes) for task in made.tasks] == sizes


def test_plans_as_a_configuration_file_writes_them() -> None:
    made = scenario({"data": "digits", "sizes": [4, 2, 2, 2]}, 1)
    assert [len(task.classes) for task in made.tasks] == [4, 2, 2, 2]
    made = scenario({"name": "odd", "data": "digits", "groups": [["1", "3"], ["7", "9", "5"]], "names": ["a", "b"]})
    assert [(task.name, task.classes) for task in made.tasks] == [("a", ("1", "3")), ("b", ("7", "9", "5"))]
    assert made.name == "odd"
    assert made.tasks[1].test.labels.unique().tolist() == [0, 1, 2]
    assert len(scenario("digits/2").tasks) == 2
    whole = scenario("digits").tasks
    assert len(whole) == 1
    assert whole[0].classes == tuple("0123456789")
    assert plan(Plan("x", ("digits",))).name == "x"


def test_tasks_of_a_chain_may_have_names_of_their_own() -> None:
    made = scenario({"data": ["digits", "digits"], "names": ["once", "again"]})
    assert [task.name for task in made.tasks] == ["once", "again"]


def test_only_small_ones_for_trying_have_their_classes_in_order(tmp_path: Path) -> None:
    ordered = [name for name, each in named_plans().items() if not each.shuffle]
    assert ordered == ["digits/5", "fashion-mnist/5"]
    helpers.mnist(tmp_path / "fashion-mnist")
    made = scenario("fashion-mnist/5", 7, tmp_path)
    assert made.tasks[0].classes == ("T-shirt/top", "Trouser")


def test_folders_are_data_too(tmp_path: Path) -> None:
    for label in range(4):
        for place in range(10):
            helpers.picture(tmp_path / "box" / f"kind{label}" / f"{place}.jpg", 10 * label + place)
    heard: list[str] = []
    plan = {"data": f"folder:{tmp_path / 'box'}", "tasks": 2, "size": 32}
    made = scenario(plan, progress=lambda what, done, total: heard.append(what))
    assert heard == ["decoding box"]
    check(made)
    assert made.shape == (3, 32, 32)
    assert len(scenario(f"folder:{tmp_path / 'box'}/2").tasks) == 2
    task = whole_task(load_folder(tmp_path / "box", 32), seed=0, name="boxes")
    assert (task.name, len(task.train), len(task.val), len(task.test)) == ("boxes", 28, 4, 8)


def test_the_validation_folder_of_a_data_set_is_what_its_tasks_are_chosen_by(tmp_path: Path) -> None:
    for part, count in (("train", 6), ("val", 2), ("test", 3)):
        for label in range(4):
            for place in range(count):
                helpers.picture(tmp_path / "box" / part / f"kind{label}" / f"{place}.jpg", label)
    shutil.rmtree(tmp_path / "box" / "val" / "kind3")
    name = f"folder:{tmp_path / 'box'}"
    # Whatever else a plan says of the images.
    made = scenario({"data": name, "sizes": [2, 2], "shuffle": False, "size": 8, "flip": False})
    assert [(len(task.train), len(task.val), len(task.test)) for task in made.tasks] == [(12, 4, 6), (11, 3, 6)]
    for seed in (0, 1):
        (task,) = scenario({"data": name, "size": 8}, seed).tasks
        assert set(task.val.rows.tolist()) >= set(range(36, 42))  # val/ comes last; of kind3 one is drawn


def pictures(folder: Path, *classes: str) -> None:
    for label, name in enumerate(classes):
        for place in range(5):
            helpers.picture(folder / name / f"{place}.jpg", 10 * label + place)


def test_a_folder_whose_name_is_a_number_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for year in ("2019", "2020"):
        pictures(tmp_path / "photos" / year, "cat", "dog", f"fish{year}")
    monkeypatch.chdir(tmp_path)
    (task,) = scenario({"data": "folder:photos/2020", "size": 8}).tasks
    assert plan("folder:photos/2020") == Plan("folder:photos/2020", ("folder:photos/2020",))
    assert (task.classes, len(scenario("folder:photos/2020").tasks)) == (("cat", "dog", "fish2020"), 1)
    assert plan("folder:photos/2021").tasks == 2021  # no such folder
    assert plan("folder:/2020") == Plan("folder:/2020", ("folder:/2020",))
    assert plan("folder:~/2020").tasks == 2020
    monkeypatch.setenv("HOME", str(tmp_path / "photos"))
    assert plan("folder:~/2020").tasks is None


def test_a_class_whose_name_is_a_number_is_no_data_set(tmp_path: Path) -> None:
    pictures(tmp_path / "digits", *map(str, range(10)))
    assert [len(task.classes) for task in scenario(f"folder:{tmp_path}/digits/5").tasks] == [2] * 5


@pytest.mark.parametrize("more", [("2",), ("train/cat", "train/dog", "test/cat", "test/dog")])
def test_a_folder_that_can_be_read_in_two_ways_is_refused_with_the_way_out(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Its name is a number, it holds class folders, and the folder above it is a data set too."""
    pictures(tmp_path / "box", "2/cat", "2/dog", *more)
    name = f"folder:{tmp_path}/box"
    with pytest.raises(ValueError, match=r"is the folder .*/box/2, or .*/box in 2 tasks") as told:
        plan(f"{name}/2")
    one, other = (plan(tomllib.loads(f"scenario = {way}")["scenario"]) for way in re.findall("{.*?}", str(told.value)))
    assert (one.data, one.tasks, other.data, other.tasks) == ((f"{name}/2",), None, (name,), 2)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("tiny-imagenet/randm", r"did you mean 'tiny-imagenet/random'"),
        ("nothing/like/it", r"no scenario .*`zeroforget scenarios` lists all"),
        ("folder:", r"'folder:' names no folder"),
        ({"data": ["folder:photos", "folder:"]}, r"names no folder"),
        ("digits/6", r"cannot cut 10 classes into 6 tasks"),
        ({"data": "digits", "taks": 5}, r"no 'taks'; did you mean 'tasks'"),
        ({"tasks": 5}, r"needs 'data'"),
        ({"data": []}, r"names no data set"),
        ({"data": "digits", "tasks": 5, "sizes": [5, 5]}, r"both 'tasks' and 'sizes'"),
        ({"data": ["digits", "mnist"], "tasks": 5}, r"'tasks' cuts one data set, but 2 are named"),
        ({"data": "digits", "tasks": 5, "names": ["a"]}, r"names 1 tasks but has 5"),
        ({"data": "digits", "groups": [["0", "11"]]}, r"no class '11'"),
        ({"data": "digit"}, r"no data set 'digit'; did you mean 'digits'"),
        ({"data": ["digits", 3]}, r"'data' is \['digits', 3\]; it should be the name"),
        ({"data": "digits", "tasks": "5"}, r"'tasks' is '5'; it should be a number"),
        ({"data": "digits", "tasks": True}, r"'tasks' is True"),
        ({"data": "digits", "tasks": 0}, r"'tasks' is 0"),
        ({"data": "digits", "sizes": 5}, r"'sizes' is 5"),
        ({"data": "digits", "sizes": [5, -5, 10]}, r"'sizes' is \(5, -5, 10\)"),
        ({"data": "digits", "sizes": []}, r"'sizes' is \(\)"),
        ({"data": "digits", "sizes": [9, 1]}, r"'sizes' is \(9, 1\); it should be numbers of 2 or more"),
        ({"data": "digits", "groups": []}, r"'groups' is \(\)"),
        ({"data": "digits", "groups": [["0", "1"], ["2"]]}, r"'groups' is .* lists of 2 class names or more"),
        ({"data": "digits", "tasks": 2, "names": ["a", "a"]}, r"'names' is \('a', 'a'\); .* different names"),
        ({"data": "digits", "groups": ["0", "1"]}, r"'groups' is .* lists of 2 class names or more"),
        ({"data": "digits", "names": "a"}, r"'names' is 'a'"),
        ({"data": "digits", "shuffle": "no"}, r"'shuffle' is 'no'"),
        ({"data": "digits", "size": 0}, r"'size' is 0"),
    ],
)
def test_mistakes_in_plans(wanted: str | dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenario(wanted)


def test_a_chain_needs_one_shape_and_seeds_are_not_negative(tmp_path: Path) -> None:
    helpers.mnist(tmp_path / "mnist")
    with pytest.raises(ValueError, match=r"images of 'mnist' are 1x28x28, those of 'digits' 1x8x8"):
        scenario({"data": ["digits", "mnist"]}, root=tmp_path)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="seed is 0 or more"):
            scenario("digits/5", seed=seed)
    assert scenario("digits/5", seed=2**32 - 1).tasks


@pytest.mark.parametrize(
    "use",
    [
        lambda: scenario("mnist/5", root=""),
        lambda: missing("mnist/5", root=""),
        lambda: load("mnist", root=""),
        lambda: load_folder(""),
        lambda: load("folder:"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(use: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"^a path is empty; name a file or a folder, or \. for the current folder$"):
        use()
