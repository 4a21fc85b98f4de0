"""Starting from weights: frozen features, heads fitted to them, three parts, and what is said where there are none."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.store.helpers import write_digits
from zeroforget import nets
from zeroforget.data import Preparation, Split
from zeroforget.methods.base import TaskSpec
from zeroforget.nets import resnet
from zeroforget.store import Model, ModelError, Options, Watch, open_model
from zeroforget.store.folder import BORN, SPREAD
from zeroforget.store.frozen_features import Added, Found, cross_validated, folds, pool
from zeroforget.store.pictures import lesson, list_pictures, read_pictures
from zeroforget.store.schema import interval
from zeroforget.training import logits
from zeroforget.training.probe import fit_head

MADE = {"network": "small", "size": 8, "gray": True}


def weights(path: Path) -> Path:
    """Of a network that has seen nothing; its features are random, and still tell digits apart."""
    torch.manual_seed(0)
    save_file(nets.build("small", (1, 8, 8)).state_dict(), path, {"mean": "[0.25]", "std": "[0.5]"})
    return path


def started(place: Path, data: Path) -> Model:
    model = open_model(place / "m")
    model.learn(data / "low", "low", weights=weights(place / "w.safetensors"), **MADE)
    return model


def test_frozen_features_are_those_of_the_file_in_every_task(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    model = started(tmp_path, data)
    facts = model.learn(data / "high", "high", watch=Watch(say=said.append))
    given = load_file(tmp_path / "w.safetensors")
    for task in ("low", "high"):
        values = model.dense(task).get_submodule("features").state_dict()
        assert {name: value.shape for name, value in values.items()} == {n: v.shape for n, v in given.items()}
        assert all(torch.equal(values[name], given[name]) for name in given)
    assert [task.training["frozen"] for task in model.tasks] == [True, True]
    assert all("unit" in load_file(model.path / "tasks" / task.folder / SPREAD) for task in model.tasks)
    assert sum(facts.born.values()) == 0
    assert set(load_file(model.path / "tasks" / facts.folder / BORN)) >= {"head/weight", "head/bias"}
    assert [(task.preprocessing.mean, task.preprocessing.std) for task in model.tasks] == [((0.25,), (0.5,))] * 2
    assert all(task.accuracy > 0.8 for task in model.tasks)
    assert any("the features are frozen" in line for line in said)
    assert model.verify({"low": data / "low", "high": data / "high"})


def test_features_are_computed_once_and_those_of_test_pictures_again_as_they_are_read(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = started(tmp_path, data), list[int]()

    def counted(extract: nn.Module, part: Split, prepare: Preparation, device: str = "cpu") -> Tensor:
        seen.append(len(part))
        return logits(extract, part, prepare, device=device)

    for module in ("frozen_features", "learning", "task_guess"):
        monkeypatch.setattr(f"zeroforget.store.{module}.logits", counted)
    facts = model.learn(data / "high", "high", device="cpu")
    assert "cross_validation" in facts.training
    assert sum(seen) == sum(facts.data.counts) + facts.data.held_out


def test_a_later_task_may_grow_on_frozen_features(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroforget.store.learning.LESS", math.inf)  # digits are easy, and the head alone is enough
    model = started(tmp_path, data)
    before = model.logits(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "low")
    facts = model.learn(data / "high", "high", growth=0.2, lr=0.02, epochs=4, batch_size=8)
    assert sum(facts.born.values()) > 0
    assert torch.equal(model.logits(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "low"), before)
    assert (facts.training["epochs"], facts.training["kept"], facts.preprocessing.mean) == (4, 3, (0.25,))
    assert facts.training["refitted"] is True
    assert model.verify()


def test_what_is_added_is_trained_otherwise_than_a_network() -> None:
    added, whole = Options().regime(added=True), Options().regime()
    assert (added.optimizer, added.lr, added.epochs, added.schedule, added.keep) == (
        "adamw", 0.0005, 10, "cosine", "last"
    )  # fmt: skip
    assert (whole.optimizer, whole.lr, whole.epochs, whole.keep) == ("sgd", 0.02, 60, "accurate")
    assert Options(lr=0.1, epochs=3).regime(added=True).lr == 0.1


def test_weights_may_be_tuned_by_the_first_task(data: Path, tmp_path: Path) -> None:
    file, model = weights(tmp_path / "w.safetensors"), open_model(tmp_path / "m")
    facts = model.learn(data / "low", "low", weights=file, frozen=False, epochs=2, batch_size=16, **MADE)
    values, given = model.dense("low").get_submodule("features").state_dict(), load_file(file)
    assert not any(torch.equal(values[name], given[name]) for name in given)
    assert (facts.training["frozen"], facts.training["epochs"]) == (False, 2)
    with pytest.raises(ModelError, match="frozen counts for the first task only"):
        model.learn(data / "high", "high", frozen=True)


def test_where_no_weights_are(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(tmp_path / "m")
    with pytest.raises(
        ModelError, match=r"no weights of 'resnet18' come with zeroforget: bring a file .* --weights FILE"
    ):
        model.learn(data / "low", "low", network="resnet18", pretrained=True)
    with pytest.raises(ModelError, match="frozen keeps weights that training starts from"):
        model.learn(data / "low", "low", pretrained=False, frozen=True)
    with pytest.raises(ModelError, match=r"for color photos of 32 pixels and more.*leave out --gray"):
        model.learn(data / "low", "low", pretrained=True, gray=True)
    monkeypatch.setattr(resnet, "EMBEDDED_FILE", tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=r"none.safetensors is missing\); give a file with --weights, or train it"):
        model.learn(data / "low", "low", pretrained=True)
    assert not model.path.exists()


def test_the_packages_weights_are_where_photos_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights in the package (here: random ones), color photos start from them unless something else is said."""
    torch.manual_seed(0)
    file = tmp_path / "compact.safetensors"
    values = {
        n: v.half() if v.is_floating_point() else v for n, v in nets.build("compact", (3, 32, 32)).state_dict().items()
    }
    save_file(values, file, {"mean": json.dumps([0.5] * 3), "std": json.dumps([0.25] * 3)})
    monkeypatch.setattr(resnet, "EMBEDDED_FILE", file)
    photos = write_digits(tmp_path / "photos", (0, 1), 10)
    for picture in photos.rglob("*.png"):
        with Image.open(picture) as image:
            image.convert("RGB").resize((32, 32)).save(picture)
    model = open_model(tmp_path / "m")
    facts = model.learn(photos, "photos", size=32)
    assert (model.backbone.network, facts.preprocessing.std) == ("compact", (0.25,) * 3)
    assert model.dense("photos").get_submodule("features.stem.0").weight.dtype == torch.float32
    model.undo()
    assert model.learn(photos, "again").training["frozen"] is True  # the weights come from the package once more
    other = open_model(tmp_path / "other")
    assert "frozen" not in other.learn(photos, "photos", size=32, pretrained=False, epochs=1).training
    assert other.backbone.network == "small"


def test_three_parts_share_no_picture_and_the_test_part_is_the_one_written_down(tmp_path: Path) -> None:
    decoded = read_pictures(list_pictures(write_digits(tmp_path, (0, 1, 2), 24)), (1, 8, 8))
    made = lesson("x", decoded, share=0.2, seed=0, flip=False, shift=0)
    rows = [set(split.rows.tolist()) for split in (made.task.train, made.task.val, made.task.test)]  # type: ignore[union-attr]
    assert set.union(*rows) == set(range(72))
    assert sum(map(len, rows)) == 72
    assert [len(part) for part in rows] == [48, 9, 15]
    assert (made.selected, made.data.held_out) == (9, 15)
    few = read_pictures(list_pictures(write_digits(tmp_path / "few", (3, 4), 2)), (1, 8, 8))
    least = lesson("x", few, share=0.2, seed=0, flip=False, shift=0)
    assert (len(least.task.train), least.selected, len(least.task.test)) == (2, 0, 2)


def test_near_copies_of_test_pictures_are_not_learned_from(tmp_path: Path) -> None:
    """The same photo, saved again as JPEG and a little smaller, would be known by heart."""
    folder = tmp_path / "photos"
    for name, first in (("a", 0), ("b", 100)):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            noise = torch.randint(0, 256, (6, 6, 3), generator=torch.Generator().manual_seed(first + number))
            photo = Image.fromarray(noise.byte().numpy()).resize((64, 64), Image.Resampling.BICUBIC)
            photo.save(folder / name / f"{number}.png")
            photo.resize((50, 50)).save(folder / name / f"{number}-small.jpg", quality=80)
    made = lesson("x", read_pictures(list_pictures(folder), (3, 32, 32)), share=0.1, seed=0, flip=False, shift=0)
    names = [file.name.partition("-")[0].partition(".")[0] for file in list_pictures(folder).files]
    parts = (made.task.train, made.task.val, made.task.test)
    of = [{(int(i) // 20, names[i]) for i in split.rows} for split in parts]  # type: ignore[union-attr]
    assert not of[0] & of[2]
    assert not of[0] & of[1]
    assert "near copies of test pictures: " in made.notes[0]
    assert "near copies of selection pictures: " in made.notes[1]


def test_a_folder_of_test_pictures(data: Path, tmp_path: Path) -> None:
    test = write_digits(tmp_path / "test", (0, 1), 40)
    model = open_model(tmp_path / "m")
    facts = model.learn(data / "low", "low", test=test, epochs=2, batch_size=16, **MADE)
    assert (facts.data.held_out, facts.data.share) == (80, 1.0)
    (one,) = model.verify({"low": test}).measured
    assert one.held_out == one.recorded == one.accuracy == facts.accuracy
    (other,) = model.verify({"low": data / "low"}).measured
    assert other.held_out is None


def test_an_interval_by_the_book() -> None:
    """Wilson's, for 8 of 10 and for all of 20."""
    assert interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval(1.0, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert interval(0.0, 0) == (0.0, 1.0)


def test_a_head_is_the_minimum_of_its_loss() -> None:
    torch.manual_seed(0)
    y = torch.arange(90) % 3
    x = torch.randn(90, 7) + torch.eye(3, 7)[y]
    head = fit_head((x, y), (x, y), 3)
    own = x.std(0, correction=0)
    scale = (own + own.mean()) / 2

    def loss(weight: torch.Tensor) -> float:
        scores = x @ weight.T + head.bias
        pull = head.strength / 2 * (weight * scale).square().sum()
        return float(torch.nn.functional.cross_entropy(scores, y) + pull)

    best = loss(head.weight)
    assert head.accuracy > 0.6
    assert all(loss(head.weight + 0.05 * torch.randn(3, 7)) > best for _ in range(50))


def test_few_pictures_with_many_features_are_fitted_firmly() -> None:
    """Where most features are noise and hardly vary, the head leans on those that tell."""
    torch.manual_seed(0)
    y = torch.arange(6000) % 3
    x = 0.02 * torch.randn(6000, 300)
    x[:, :3] = 0.3 * torch.randn(6000, 3) + 0.6 * torch.eye(3)[y]
    head = fit_head((x[:75], y[:75]), (x[75:90], y[75:90]), 3)
    assert head.strength >= 0.1
    assert ((x[90:] @ head.weight.T + head.bias).argmax(1) == y[90:]).double().mean() > 0.75


def test_a_file_of_weights_names_its_network(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({**nets.build("small", (1, 8, 8)).state_dict(), "classifier.weight": torch.zeros(3, 3)}, file)
    model = open_model(tmp_path / "m")
    model.learn(data / "low", "low", weights=file, size=8, gray=True)
    assert json.loads((model.path / "model.json").read_text())["backbone"]["network"] == "small"
    save_file({"a": torch.zeros(3)}, file)
    with pytest.raises(ModelError, match=r"no network of ours: name the one that they are of with --network"):
        open_model(tmp_path / "n").learn(data / "low", "low", weights=file)


def test_what_is_added_to_frozen_features_starts_from_their_head(data: Path, tmp_path: Path) -> None:
    """At a rate of nothing a network that has grown and leans answers as the frozen features' head does, bit for bit
    but for the order of sums; and what does no better is not kept."""
    model, said = started(tmp_path, data), list[str]()
    other = Model(shutil.copytree(model.path, tmp_path / "other"))
    alone = model.learn(data / "high", "high")
    facts = other.learn(
        data / "high", "high", growth=0.2, rank=4, lr=1e-9, epochs=1, watch=Watch(say=said.append)
    )  # fmt: skip
    assert any("does no better than the frozen features" in line for line in said)
    assert (sum(facts.born.values()), facts.rank, facts.accuracy) == (0, 0, alone.accuracy)
    assert torch.equal(*(one.dense("high").get_submodule("head").weight for one in (model, other)))
    net, images = model.network(), torch.randn(8, 1, 8, 8)
    known = torch.randn(20, 64), torch.arange(20) % 2
    head = fit_head(known, known, 2)
    grower = Added(net, images, head, growth=0.2, rank=4)
    before = net.dense("high").get_submodule("features")(images) @ head.first[0].T + head.first[1]
    grower.add_task(TaskSpec("new", 2))
    assert torch.allclose(net.dense("new")(images), before, atol=1e-5)
    assert torch.allclose(grower.train()(images, 2), before, atol=1e-5)


def test_every_class_counts_the_same_however_few_pictures_it_has() -> None:
    torch.manual_seed(0)
    y = torch.cat([torch.zeros(200), torch.ones(10)]).long()
    x = torch.randn(210, 2) + y[:, None]
    shares = []
    for even in (False, True):
        head = fit_head((x, y), (x, y), 2, even=even)
        shares.append(float(((torch.randn(4000, 2) + 1) @ head.weight.T + head.bias).argmax(1).double().mean()))
    assert shares[0] < 0.3
    assert 0.65 < shares[1] < 0.95  # evenly drawn they overlap so that 76 % of each are right


def test_every_picture_of_a_small_set_is_tested_once(data: Path, tmp_path: Path) -> None:
    """The share is what five heads, each fitted to the other four parts, get right; twins are in the same part."""
    model = started(tmp_path, data)
    found = Found.of(model.tasks[0].training)
    assert found is not None
    assert (found.folds, found.pictures, found.accuracy > 0.9) == (5, 48, True)
    assert "each tested by one of 5 that learned from the others" in str(found)
    decoded = read_pictures(list_pictures(data / "middle"), (1, 8, 8))
    ready = lesson("x", decoded, share=0.2, seed=0, flip=False, shift=0)
    every = pool(ready)
    assert sorted(every.rows.tolist()) == list(range(72))  # type: ignore[union-attr]
    parts, tested = folds(every, 4, 0), list[int]()
    for label in range(3):
        assert torch.bincount(parts[every.labels == label], minlength=4).tolist() == [6] * 4

    def judge(train: Split, val: Split, test: Split) -> int:
        rows = [set(part.rows.tolist()) for part in (train, val, test)]  # type: ignore[union-attr]
        assert set.union(*rows) == set(range(72))
        assert sum(map(len, rows)) == 72
        tested.extend(rows[2])
        return len(test) // 2

    assert cross_validated(every, parts, 0, 0.2, judge) == {"folds": 4, "pictures": 72, "accuracy": 0.5}
    assert sorted(tested) == list(range(72))
    twice = Split(torch.cat([decoded.images] * 2), torch.cat([decoded.labels] * 2), torch.arange(144))
    first, second = folds(twice, 4, 0).chunk(2)
    assert torch.equal(first, second)
    for told in ({"folds": 5, "pictures": 3}, {"folds": True, "pictures": 3, "accuracy": 0.5}, 7):
        assert Found.of({"cross_validation": told}) is None


def test_what_is_trained_is_cross_validated_where_it_is_asked_for(data: Path, tmp_path: Path) -> None:
    plain, model = open_model(tmp_path / "plain"), open_model(tmp_path / "m")
    quick = {"epochs": 2, "batch_size": 16, "lr": 0.05}
    assert "cross_validation" not in plain.learn(data / "low", "low", **MADE, **quick).training
    facts = model.learn(data / "low", "low", folds=2, **MADE, **quick)
    assert facts.training["cross_validation"]["pictures"] == 48
    assert facts.network == plain.tasks[0].network  # it changes nothing of the task itself
    assert model.learn(data / "high", "high", folds=2, growth=0.2, **quick).training["cross_validation"]["folds"] == 2
    assert model.verify()
    with pytest.raises(ModelError, match="2 or more"):
        model.learn(data / "middle", "middle", folds=1)
