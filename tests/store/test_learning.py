"""Learning into a folder: nothing learned before moves, an interruption costs nothing, mistakes are said in time."""

from __future__ import annotations

import errno
import functools
import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.store.helpers import LATER, QUICK, learn_more, learned, tree, write_digits
from zeroforget import nets
from zeroforget.files import atomic
from zeroforget.proving.grow import grow
from zeroforget.store import Damaged, Model, ModelError, TaskFacts, Watch, open_model
from zeroforget.store.backbone import Backbone
from zeroforget.store.folder import TRAINING
from zeroforget.store.names import task_name
from zeroforget.store.network import Addition, example, plain_network
from zeroforget.store.options import default_network
from zeroforget.training import Diverged, Progress


def test_the_first_task_makes_the_model_and_later_ones_move_nothing(model: Model, data: Path) -> None:
    before = tree(model.path)
    images = torch.stack([model.prepare(path) for path in sorted((data / "low").rglob("*.png"))])
    answers = {task.name: model.logits(images, task.name) for task in model.tasks}
    said: list[str] = []
    watch = Watch(say=said.append, adds=lambda additions: said.extend(map(str, additions)))
    facts = learn_more(model, data, "high", watch=watch)
    after = tree(model.path)
    assert {name: content for name, content in after.items() if name in before} == before
    new = ("task.json", "born.safetensors", "probe.safetensors", "spread.safetensors")
    assert set(after) - set(before) == {f"tasks/003-high/{name}" for name in new}
    for name, logits in answers.items():
        assert torch.equal(model.logits(images, name), logits)
        assert torch.equal(open_model(model.path).logits(images, name), logits)
    assert model.tasks[-1] == facts
    assert any("features" in line and "bytes" in line and "more than in the task before" in line for line in said)
    assert not (model.path / TRAINING).exists()
    assert model.verify()


def test_what_is_said_to_be_added_is_added(model: Model, data: Path) -> None:
    told: list[Any] = []
    facts = learn_more(model, data, "high", growth=0.2, watch=Watch(adds=told.extend))
    (addition,) = told
    assert addition.weights == facts.weights
    assert addition.operations == facts.operations
    assert {axis: new - old for axis, (old, new) in addition.features.items()} == facts.born
    assert addition.bytes < facts.files["born.safetensors"].bytes < addition.bytes + 3000


class Stop(Exception):
    """Stands for a kill: nothing of ours catches it."""


def stop_in_epoch(number: int) -> Callable[[Progress], None]:
    def progress(at: Progress) -> None:
        if at.epoch == number and at.step == 1:
            raise Stop

    return progress


def test_interrupted_and_gone_on_is_the_same_as_never_interrupted(copied: Callable[[], Model], data: Path) -> None:
    whole, broken = copied(), copied()
    learn_more(whole, data, "high")
    before = tree(broken.path)
    with pytest.raises(Stop):
        learn_more(broken, data, "high", watch=Watch(training=stop_in_epoch(2)))
    assert tree(broken.path) == before
    epochs: list[int] = []
    said: list[str] = []
    learn_more(broken, data, "high", watch=Watch(say=said.append, training=lambda at: epochs.append(at.epoch)))
    assert min(epochs) == 2
    assert "going on with the training that was interrupted" in said
    name = "tasks/003-high/born.safetensors"
    assert tree(broken.path)[name] == tree(whole.path)[name]


def test_other_pictures_or_options_start_over(model: Model, data: Path) -> None:
    with pytest.raises(Stop):
        learn_more(model, data, "high", watch=Watch(training=stop_in_epoch(2)))
    epochs: list[int] = []
    learn_more(model, data, "high", lr=0.01, watch=Watch(training=lambda at: epochs.append(at.epoch)))
    assert min(epochs) == 0


def test_a_damaged_checkpoint_is_removed_and_said(model: Model, data: Path) -> None:
    with pytest.raises(Stop):
        learn_more(model, data, "high", watch=Watch(training=stop_in_epoch(2)))
    (file,) = (model.path / TRAINING).glob("phase-*")
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match="interrupted training is damaged"):
        learn_more(model, data, "high")
    learn_more(model, data, "high")
    assert model.verify()


def test_a_plan_that_is_no_text_starts_over(model: Model, data: Path) -> None:
    (model.path / TRAINING).mkdir()
    (model.path / TRAINING / "plan").write_bytes(b"\xff")
    assert learn_more(model, data, "high").name == "high"


def test_finish_takes_the_best_so_far(model: Model, data: Path) -> None:
    with pytest.raises(ModelError, match="no interrupted training"):
        learn_more(model, data, "high", finish=True, epochs=50)
    with pytest.raises(Stop):
        learn_more(model, data, "high", epochs=50, watch=Watch(training=stop_in_epoch(3)))
    facts = learn_more(model, data, "high", epochs=50, finish=True)
    assert facts.training["epochs"] == 4


def test_growths_of_single_axes_are_read_as_they_were_written(model: Model) -> None:
    facts = model.tasks[0]
    each = {"features": 3, "shares": 0.25, "whole": 1.0, "none": 0}
    read = TaskFacts.from_json(json.loads(json.dumps(replace(facts, growth=each).to_json())), "there", "")
    assert isinstance(read.growth, dict)
    assert {axis: (type(value), value) for axis, value in read.growth.items()} == {
        axis: (type(value), value) for axis, value in each.items()
    }
    for wrong in (-1, -0.5, "a", True, None, 1e9):
        with pytest.raises(Damaged, match=r"growth\.axis"):
            TaskFacts.from_json(replace(facts, growth={"axis": wrong}).to_json(), "there", "")  # type: ignore[dict-item]


def test_a_search_takes_the_smallest_good_growth(model: Model, data: Path) -> None:
    facts = learn_more(model, data, "high", growth=(0.0, 0.1, 0.2), epochs=2)
    tried = facts.training["search"]
    assert [row["growth"] for row in tried] == [0.0, 0.1, 0.2]
    best = max(row["val_accuracy"] for row in tried)
    smallest = min(row["growth"] for row in tried if row["val_accuracy"] >= best - 0.015)
    assert facts.growth == smallest
    assert model.verify()


def test_growths_that_add_the_same_features_are_tried_once(model: Model, data: Path) -> None:
    said: list[str] = []
    growths = (0.0, 0.001, 0.1, 0.1001, 0.2)
    facts = learn_more(model, data, "high", growth=growths, epochs=1, watch=Watch(say=said.append))
    assert [row["growth"] for row in facts.training["search"]] == [0.0, 0.1, 0.2]
    assert [line for line in said if "not tried" in line] == [
        "a growth of 0.001 adds the same features as 0 and is not tried",
        "a growth of 0.1001 adds the same features as 0.1 and is not tried",
    ]


@pytest.mark.parametrize(
    ("operations", "words"),
    [(1216, "costs 21.6 % more than"), (1000, "costs as much as"), (950, "costs 5.0 % less than")],
)
def test_what_a_picture_costs_beside_the_task_before(operations: int, words: str) -> None:
    told = str(Addition(0.1, 0.0, {"a": (3, 4)}, weights=5, bytes=20, operations=operations, before=1000))
    assert told == f"1 feature, 5 weights, 20 bytes; a picture {words} in the task before"


def test_a_growing_network_has_no_end(model: Model, tmp_path: Path) -> None:
    for number in range(4, 8):
        pictures = write_digits(tmp_path / str(number), (number, number + 1), 6)
        model.learn(pictures, f"task {number}", **(LATER | {"epochs": 1, "growth": 0.5}))
    widths = model.network().widths()
    first = model.network().widths(0)
    assert all(widths[axis] > 2.5 * first[axis] for axis in widths)
    assert model.verify()


def test_weights_to_start_from(tmp_path: Path, data: Path) -> None:
    given = nets.build("small", (1, 8, 8))
    for parameter in given.parameters():
        parameter.data.fill_(0.01)
    save_file(given.state_dict() | {"head.weight": torch.zeros(3)}, tmp_path / "start.safetensors")
    model = open_model(tmp_path / "m")
    model.learn(data / "low", "low", weights=tmp_path / "start.safetensors", lr=1e-9, **{**QUICK, "epochs": 1})
    first = model.dense("low").get_submodule("features.convolutions.0")
    assert torch.allclose(first.get_parameter("weight"), torch.tensor(0.01), atol=1e-4)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    for name, word in (("other", "lacks 'convolutions.0.weight'"), ("missing", "missing")):
        with pytest.raises((ModelError, OSError), match=word):
            open_model(tmp_path / "n").learn(data / "low", "low", weights=tmp_path / f"{name}.safetensors", **QUICK)
    save_file(nets.build("small", (1, 8, 8), width=0.5).state_dict(), tmp_path / "half.safetensors")
    with pytest.raises(ModelError, match=r"its width is 0\.5, not 1: give --width 0\.5"):
        open_model(tmp_path / "n").learn(data / "low", "low", weights=tmp_path / "half.safetensors", **QUICK)
    with pytest.raises(ModelError, match="first task only"):
        model.learn(data / "high", "high", weights=tmp_path / "start.safetensors")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"size": 16}, "size 8, which cannot change"),
    "network": ({"network": "lenet"}, "network small"),
    "color": ({"gray": False}, "is for gray pictures, which cannot change; leave out --color"),
    "growth": ({"growth": -1.0}, "growth"),
    "align": ({"align": 8}, "align 1, which cannot change"),
    "no align": ({"align": 0}, "align is from 1 to 1024 features, not 0"),
    "half an align": ({"align": 1.5}, "align is a whole number"),
    "precision": ({"precision": "fp8"}, "precision is 'float32', 'tf32' or 'bf16'"),
    "misspelt": ({"epoch": 3}, "no option 'epoch'; did you mean 'epochs'"),
    "held out": ({"held_out": 1.0}, "held_out"),
    "shift below zero": ({"shift": -1}, "^shift is from 0 to 512 pixels, not -1$"),
    "shift out of sight": ({"shift": 100_000}, "^shift is from 0 to 512 pixels, not 100000$"),
    "half a shift": ({"shift": 0.5}, "^shift is a whole number, not 0.5$"),
    "seed below zero": ({"seed": -1}, "seed is a whole number from 0"),
    "large seed": ({"seed": 10**20}, "seed is a whole number from 0"),
    "half a seed": ({"seed": 0.5}, "seed is a whole number, not 0.5"),
    "too wide": ({"width": 17}, "width is a share .* at most 16"),
    "width below zero": ({"width": -1}, "width is a share .* above 0"),
    "no width": ({"width": float("nan")}, "width is a finite number"),
    "device": ({"device": "cuda:9"}, "cuda"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_said_and_change_nothing(trained: Path, data: Path, mistake: str) -> None:
    options, word = MISTAKES[mistake]
    before = tree(trained)
    with pytest.raises(ValueError, match=word):
        open_model(trained).learn(data / "high", "high", **options)
    assert tree(trained) == before


def test_code_of_ones_own_is_for_python(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'mine:Net' is code of your own.*zeroforget\.adopt in Python"):
        open_model(tmp_path / "m").learn(data / "low", "low", network="mine:Net", **QUICK)
    assert not (tmp_path / "m").exists()


ODD_NAMES = [
    "",
    "a/b",
    "../up",
    ".dot",
    "x" * 65,
    "new\nline",
    "a:b",
    "a*",
    "'a'",
    "a\0",
    "\u0301a",
    "a \u0301b",
    "a-\u0301",
]
ODD_NAMES += ["a\u200db", "a\u200c", "\u200da", "a\u202eb", "a\u20dd", "\ufeffa", "\u0915\u200d\u0915", "\u0643\u200c"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_that_cannot_name_a_folder(trained: Path, data: Path, name: str) -> None:
    with pytest.raises(ModelError, match="cannot name a task"):
        open_model(trained).learn(data / "high", name)


def test_a_task_is_learned_once(trained: Path, data: Path) -> None:
    with pytest.raises(ModelError, match="already, and learned tasks never change"):
        open_model(trained).learn(data / "high", "low")


def test_names_of_any_script(tmp_path: Path, data: Path) -> None:
    model = open_model(tmp_path / "m")
    model.learn(data / "low", "zwölf Blüten", **QUICK)
    assert model.tasks[0].folder == "001-zwölf_Blüten"
    assert open_model(tmp_path / "m").predict(data / "low" / "digit0" / "000.png", "zwölf Blüten")[0].classes


def test_where_nothing_may_be_written_no_model_is_spoken_of_that_is_not_there(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("zeroforget.files.atomic.make_folder", read_only)
    with pytest.raises(ModelError, match=r"^no model can be made in \S+: it is on a read-only file system$"):
        open_model(tmp_path / "m").learn(data / "low", "low", **QUICK)
    with pytest.raises(ModelError, match=r"^\S+ cannot be changed: .* still work\. The model is as it was$"):
        open_model(trained).learn(data / "high", "high", **LATER)


@pytest.mark.parametrize(
    "name",
    [
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u092b\u0942\u0932",  # Hindi: vowel signs and a virama
        "\u0e14\u0e2d\u0e01\u0e44\u0e21\u0e49",  # Thai: a tone mark
        "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",  # Hebrew: points
        "x\u0304 1",  # no letter is composed of these
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian: parted inside a word
        "\u0d15\u0d23\u0d4d\u200d",  # Malayalam: a joiner after a virama
        "\u845b\U000e0100",  # Japanese: a variant of a letter
    ],
)
def test_names_with_marks_that_no_letter_is_composed_of(tmp_path: Path, data: Path, name: str) -> None:
    model = open_model(tmp_path / "m")
    model.learn(data / "low", unicodedata.normalize("NFD", name), **QUICK)
    kept = unicodedata.normalize("NFC", name)
    assert [folder.name for folder in (tmp_path / "m" / "tasks").iterdir()] == [f"001-{kept.replace(' ', '_')}"]
    again = open_model(tmp_path / "m")
    assert (again.tasks[0].name, again.task(name).name) == (kept, kept)
    assert again.verify()
    with pytest.raises(ModelError, match="already"):
        again.learn(data / "low", name)


def test_a_first_task_that_fails_leaves_no_model(tmp_path: Path) -> None:
    model = open_model(tmp_path / "m")
    with pytest.raises(ModelError):
        model.learn(tmp_path / "nothing", "low", **QUICK)
    assert not (tmp_path / "m").exists()
    assert model.tasks == ()
    with pytest.raises(ModelError, match="there is no model"):
        model.predict(b"")


def test_a_colored_network_with_batch_norm(tmp_path: Path, data: Path) -> None:
    model = open_model(tmp_path / "m")
    more = {"network": "resnet18", "width": 0.05, "size": 12, "epochs": 1, "batch_size": 16}
    model.learn(data / "low", "low", **more)
    model.learn(data / "high", "high", epochs=1, flip=True, shift=1)
    assert model.shape == (3, 12, 12)
    assert model.verify()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_aligned_widths_and_mixed_precision_move_nothing(tmp_path: Path, data: Path, device: str) -> None:
    model = open_model(tmp_path / "m")
    how = {"device": device, "precision": "bf16"}
    model.learn(data / "low", "low", network="small", width=0.6, align=8, **QUICK, **how)
    images = torch.stack([model.prepare(path) for path in sorted((data / "low").rglob("*.png"))])
    first, widths = model.logits(images, "low"), model.network().widths()
    assert any(width % 8 for width in widths.values())  # the given network's own
    facts = learn_more(model, data, "high", growth=0.1, **how)
    again = open_model(tmp_path / "m")
    assert all(width % 8 == 0 and width > widths[axis] for axis, width in again.network().widths().items())
    assert torch.equal(again.logits(images, "low"), first)
    assert again.task("high") == facts
    assert again.verify()


@pytest.mark.parametrize("size", [8, 28, 64, 128])
def test_the_default_networks_grow(size: int) -> None:
    network, width = default_network(size)
    backbone = Backbone(network, {"width": width}, (3, size, size))
    net = grow(plain_network(backbone, 0), example(backbone))
    net.add_task("first", 2)
    net.add_task("second", 3, 0.1)
    assert net.dense("second")(torch.zeros(1, 3, size, size)).shape == (1, 3)


def test_task_json_is_readable(trained: Path) -> None:
    values = json.loads((trained / "tasks" / "002-middle" / "task.json").read_text())
    assert values["classes"] == ["digit2", "digit3", "digit4"]
    assert values["preprocessing"]["size"] == [8, 8]
    assert values["born"]


def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroforget.store.options.MOST_SEED", 2**70)
    options = QUICK | {"epochs": 1, "seed": 2**70}
    with pytest.raises(ModelError, match=r"model\.json could not be read again \(field 'seed'"):
        open_model(tmp_path / "m").learn(data / "low", "low", **options)
    assert not (tmp_path / "m").exists()
    model = open_model(tmp_path / "m")
    model.learn(data / "low", "low", **(options | {"seed": 0}))
    before = tree(model.path)
    with pytest.raises(ModelError, match=r"task\.json could not be read again \(field 'data\.seed'"):
        learn_more(model, data, "high", epochs=1, seed=2**70)
    assert tree(model.path) == before
    assert not list(model.path.glob(".aside-*"))


def test_weights_that_do_not_fit_leave_no_folder(tmp_path: Path, data: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="lacks"):
        open_model(tmp_path / "m").learn(data / "low", "low", weights=tmp_path / "other.safetensors", **QUICK)
    assert not (tmp_path / "m").exists()


def test_a_training_that_diverges_advises_a_lower_rate_and_leaves_no_folder(tmp_path: Path, data: Path) -> None:
    with pytest.raises(Diverged, match=r"Try a lower one, such as --lr 0\.02\.") as error:
        open_model(tmp_path / "m").learn(data / "low", "low", **QUICK, lr=1e29)
    assert "clip" not in str(error.value)
    assert not (tmp_path / "m").exists()


def test_a_model_made_meanwhile_for_other_pictures(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has found nothing there at first, and waited for the lock."""
    make, said = atomic.make_folder, list[str]()

    def slow(path: Path) -> None:
        monkeypatch.setattr(atomic, "make_folder", make)
        open_model(path).learn(data / "low", "low", **(QUICK | {"epochs": 1}))

    monkeypatch.setattr(atomic, "make_folder", slow)
    model = open_model(tmp_path / "m")
    model.learn(data / "high", "high", epochs=1, watch=Watch(say=said.append))
    assert model.shape == (1, 8, 8)
    assert model.verify()
    assert any("made the model meanwhile" in line for line in said)


def test_a_file_where_the_folder_should_be(tmp_path: Path, data: Path) -> None:
    (tmp_path / "m").write_text("mine")
    for path in (tmp_path / "m", tmp_path / "m" / "below"):
        with pytest.raises(ModelError, match="m is a file, and a model is a folder"):
            open_model(path).learn(data / "nothing", "low")


def test_a_name_may_have_200_bytes(trained: Path, data: Path) -> None:
    assert task_name("\U00020000" * 50)
    with pytest.raises(ModelError, match="it has 204 bytes in UTF-8, and 200 are the most"):
        open_model(trained).learn(data / "high", "\U00020000" * 51)


@pytest.mark.parametrize("place", [".", "model", "digit0/model"])
def test_a_model_among_its_pictures_would_be_taken_for_a_class(tmp_path: Path, place: str) -> None:
    folder = write_digits(tmp_path / "photos", (0, 1), 4)
    with pytest.raises(ModelError, match="is among the pictures; name a folder for the model that is not in"):
        open_model(folder / place).learn(folder, "low", **QUICK)
    assert sorted(path.name for path in folder.iterdir()) == ["digit0", "digit1"]


def test_what_fails_leaves_no_folders_above_the_model(tmp_path: Path, data: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(Diverged):
        open_model(tmp_path / "mine" / "new" / "deep" / "m").learn(data / "low", "low", **QUICK, lr=1e29)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_another_interrupted_training_is_not_given_up_in_silence(model: Model, data: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.epoch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_more(model, data, "high", watch=Watch(training=stop))
    said: list[str] = []
    learn_more(model, data, "high", seed=5, watch=Watch(say=said.append))
    assert any("interrupted training" in line and "given up" in line for line in said)


def test_mirrored_and_moved_pictures_are_learned_from_if_asked_for(tmp_path: Path) -> None:
    pictures = write_digits(tmp_path / "pictures", (0, 1), 8)

    def born(**how: Any) -> bytes:
        model = open_model(tmp_path / "-".join(map(str, ("m", *how.items()))))
        model.learn(pictures, "low", size=16, gray=True, epochs=1, batch_size=16, **how)
        return tree(model.path)["tasks/001-low/born.safetensors"]

    usual = born()
    assert born(shift=1) == usual  # a sixteenth of the size
    assert len({usual, born(shift=0), born(flip=True)}) == 3


def test_a_network_near_its_limit_grows_by_what_is_left(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroforget.store.starting.Backbone", functools.partial(Backbone, limit=1.25))
    model, said = learned(tmp_path / "m", data, "low"), list[str]()
    facts = learn_more(model, data, "high", growth=(0.125, 0.5), epochs=1, watch=Watch(say=said.append))
    assert [row["growth"] for row in facts.training["search"]] == [0.125, 0.25]
    assert "the network is near its limit: it can grow by 0.25 of its full width" in said
    last = learn_more(model, data, "middle", growth=(0.5, 1.0), epochs=1)
    assert max(model.network().shares.values()) <= 1.25
    assert last.growth == pytest.approx(model.network().history[-1].growth)
    assert model.verify()


def test_weights_to_start_from_after_every_task_was_taken_back(tmp_path: Path, data: Path) -> None:
    model = learned(tmp_path / "m", data, "low")
    assert model.undo() == "low"
    text = (model.path / "model.json").read_bytes()
    given = nets.build("small", (1, 8, 8))
    for parameter in given.parameters():
        parameter.data.fill_(0.01)
    save_file(given.state_dict(), tmp_path / "start.safetensors")
    learn_more(model, data, "low", weights=tmp_path / "start.safetensors", lr=1e-9, epochs=1)
    first = model.dense("low").get_submodule("features.convolutions.0")
    assert torch.allclose(first.get_parameter("weight"), torch.tensor(0.01), atol=1e-4)
    assert (model.path / "model.json").read_bytes() == text
    assert model.verify()


def test_a_first_task_does_not_grow(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"growth is what a later task adds, and this is the first.*leave out --growth"
    ):
        open_model(tmp_path / "garden").learn(data / "low", "low", growth=0.1, network="small", size=8)
    assert not (tmp_path / "garden").exists()
