"""Networks of torchvision and timm are adopted by name; the folder is enough to build them again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from tests.store.helpers import LATER
from zeroforget.cli import app
from zeroforget.files.json_fields import sealed, unsealed
from zeroforget.nets import libraries
from zeroforget.store import Model, ModelError, Options, Watch, open_model
from zeroforget.store.adoption import Given, adopt
from zeroforget.store.errors import Damaged
from zeroforget.store.network import empty_network
from zeroforget.store.schema import ModelFacts

FAKES = Path(__file__).parent / "libraries"


def forget_libraries() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in libraries.LIBRARIES]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def fake_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small packages of the libraries' names."""
    forget_libraries()
    monkeypatch.syspath_prepend(FAKES)
    yield
    forget_libraries()


def classifier(name: str, **options: Any) -> nn.Module:
    """With values unlike fresh ones, in service."""
    torch.manual_seed(1)
    net = libraries.build(name, **options)
    for value in [*net.parameters(), *net.buffers()]:
        if value.is_floating_point():
            value.data += 0.1 * torch.rand_like(value)
    return net.requires_grad_(False).eval()


def made(
    tmp_path: Path,
    data: Path,
    name: str,
    file: Path,
    size: int | None = 8,
    gray: bool = False,
    align: int | None = None,
    **more: Any,
) -> Model:
    given = Given(file, **more)
    options = Options(network=name, size=size, gray=gray, align=align, held_out=0.5)
    adopt(tmp_path / "m", data / "middle", "digits", given, options, Watch())
    return open_model(tmp_path / "m")


def saved(net: nn.Module, path: Path, prefix: str = "", wrap: str = "") -> Path:
    values = {prefix + name: value for name, value in net.state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(values, path)
    else:
        torch.save({wrap: values, "epoch": 3} if wrap else values, path)
    return path


def json_of(model: Model) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((model.path / "model.json").read_text())
    return values


@pytest.mark.parametrize(
    ("name", "options", "file", "prefix", "wrap"),
    [
        ("torchvision/residual10", {}, "w.pth", "module.", "state_dict"),
        ("torchvision/residual10", {}, "w.safetensors", "", ""),
        ("timm/patches_tiny", {"img_size": 8}, "w.pt", "", "model"),
        ("timm/patches_tiny.some_tag", {"img_size": 8}, "w.safetensors", "net.", ""),
    ],
)
def test_its_logits_stay_its_own(
    data: Path, tmp_path: Path, name: str, options: dict[str, Any], file: str, prefix: str, wrap: str
) -> None:
    whole = classifier(name, num_classes=3, **options)
    weights = saved(whole, tmp_path / file, prefix, wrap)
    arguments = ["adopt", str(tmp_path / "m"), str(data / "middle"), "--task", "digits", "--network", name]
    result = CliRunner().invoke(app, [*arguments, "--weights", str(weights), "--size", "8"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "adopted 'digits': 3 classes" in result.output
    model, x = open_model(tmp_path / "m"), torch.randn(3, 3, 8, 8)
    assert torch.equal(model.dense("digits")(x), whole(x))
    model.learn(data / "low", "low", growth=0.5, **LATER)
    again = open_model(tmp_path / "m")
    assert torch.equal(again.dense("digits")(x), whole(x))
    assert again.verify().holds
    again.export(tmp_path / "low.pt2", "low", form="torch")
    exported = torch.export.load(tmp_path / "low.pt2").module()
    assert exported(torch.rand(2, 3, 8, 8)).shape == (2, 2)
    about, library = json_of(model), name.partition("/")[0]
    assert about["version"] == 2
    assert about["backbone"]["options"] == {**options, "num_classes": 3}
    assert about["backbone"]["library"]["name"] == library
    assert about["backbone"]["library"]["version"] == {"torchvision": "9.1.0", "timm": "9.2.0"}[library]


def test_what_the_weights_do_not_tell_can_be_said(data: Path, tmp_path: Path) -> None:
    whole = classifier("torchvision/residual10", num_classes=3, width=4)
    file = saved(whole, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"'stem\.weight' is \(4, .* the network has \(6, .*--set"):
        made(tmp_path, data, "torchvision/residual10", file)
    model = made(tmp_path, data, "torchvision/residual10", file, options={"width": 4})
    x = torch.randn(3, 3, 8, 8)
    assert torch.equal(model.dense("digits")(x), whole(x))


def test_size_and_normalization_are_the_librarys_own(data: Path, tmp_path: Path) -> None:
    whole = classifier("timm/patches_tiny", num_classes=3, img_size=8)
    model = made(tmp_path, data, "timm/patches_tiny", saved(whole, tmp_path / "w.pt"), size=None)
    assert model.shape == (3, 8, 8)
    assert (model.tasks[0].preprocessing.mean, model.tasks[0].preprocessing.std) == ((0.5,) * 3, (0.25,) * 3)


def test_another_size_is_told_by_the_tensor_that_shows_it(data: Path, tmp_path: Path) -> None:
    file = saved(classifier("timm/patches_tiny", num_classes=3, img_size=8), tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"'pos_embed' is \(1, 4, 6\), .* has \(1, 16, 6\); .* give the --size"):
        made(tmp_path, data, "timm/patches_tiny", file, size=16)
    assert not (tmp_path / "m").exists()


def test_gray_pictures(data: Path, tmp_path: Path) -> None:
    whole = classifier("timm/patches_tiny", num_classes=3, img_size=8, in_chans=1)
    file = saved(whole, tmp_path / "w.pt")
    one = {"mean": (0.5,), "std": (0.5,)}
    with pytest.raises(ModelError, match="networks of torchvision take color pictures"):
        made(tmp_path, data, "torchvision/residual10", file, gray=True, **one)
    with pytest.raises(ModelError, match=r"'patch_embed\.weight' is \(6, 1, .* with 1 channel: give --gray"):
        made(tmp_path, data, "timm/patches_tiny", file)
    model = made(tmp_path, data, "timm/patches_tiny", file, gray=True, std=one["std"])
    assert (model.tasks[0].preprocessing.mean, model.tasks[0].preprocessing.std) == ((0.5,), (0.5,))
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(model.dense("digits")(x), whole(x))


def test_how_its_axes_were_found_is_kept(data: Path, tmp_path: Path) -> None:
    whole = classifier("torchvision/awkward", num_classes=3)
    file = saved(whole, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"sort.*--unknown keep"):
        made(tmp_path, data, "torchvision/awkward", file)
    model = made(tmp_path, data, "torchvision/awkward", file, unknown="keep")
    assert json_of(model)["backbone"]["library"]["care"]
    model.learn(data / "low", "low", growth=0.5, **LATER)
    assert set(model.tasks[1].born) == {"stem", "baked.conv", "last"}
    x = torch.randn(3, 3, 8, 8)
    again = open_model(tmp_path / "m")
    assert torch.equal(again.dense("digits")(x), whole(x))
    assert again.verify().holds


def heads(model: Model) -> list[int]:
    return [task.born["qkv"] for task in model.tasks]


def test_heads_are_aligned_by_their_channels_and_models_that_counted_heads_stay_what_they_are(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, x = classifier("timm/heads_tiny", num_classes=3), torch.randn(3, 3, 8, 8)
    file = saved(whole, tmp_path / "w.pt")
    new = made(tmp_path / "new", data, "timm/heads_tiny", file, align=8)
    new.learn(data / "low", "low", growth=0.5, **LATER)
    assert heads(new) == [2, 2]
    assert open_model(new.path).verify().holds
    with monkeypatch.context() as before:
        before.setattr("zeroforget.growing.growth.common_spans", lambda tensors: {})
        old = made(tmp_path / "old", data, "timm/heads_tiny", file, align=8)
        old.learn(data / "low", "low", growth=0.5, **LATER)
        answers = [old.dense(task)(x) for task in ("digits", "low")]
    assert heads(old) == [2, 6]
    for more in ([], [8]):  # 14 of 8 + 8 channels are 16 heads, for this model goes on as it began
        again = open_model(old.path)
        assert all(torch.equal(again.dense(k)(x), y) for k, y in zip(("digits", "low"), answers, strict=True))
        assert again.verify().holds
        assert heads(again) == [2, 6, *more]
        if not more:
            again.learn(data / "middle", "middle", growth=3.0, **LATER)


def test_without_the_library_the_remedy_is_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(classifier("timm/patches_tiny", num_classes=3, img_size=8), tmp_path / "w.pt")
    made(tmp_path, data, "timm/patches_tiny", file)
    monkeypatch.undo()
    forget_libraries()
    monkeypatch.setitem(sys.modules, "timm", None)
    model = open_model(tmp_path / "m")
    assert [task.name for task in model.tasks] == ["digits"]
    for use in (lambda: model.dense("digits"), model.verify, lambda: model.learn(data / "low", "low", **LATER)):
        with pytest.raises(ModelError, match=r"from timm, which cannot be imported.*pip install timm.*timm 9\.2\.0"):
            use()
    with pytest.raises(ValueError, match="pip install timm"):
        adopt(tmp_path / "n", data / "middle", "d", Given(file), Options(network="timm/patches_tiny"), Watch())
    assert not (tmp_path / "n").exists()


BROKEN = {
    "raise RuntimeError('operator torchvision::nms does not exist\\nat file.cpp')": "torchvision::nms does not exist",
    "raise AttributeError()": "AttributeError",
    "import torch.no_such_part": "No module named 'torch.no_such_part'",
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_library_that_is_installed_and_broken_is_not_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(libraries.NoLibrary) as error:
        libraries.build("torchvision/resnet50")
    said = str(error.value)
    assert f"installed but broken ({'operator ' * code.startswith('raise R')}{BROKEN[code]});" in said
    assert said.endswith("install builds of torch and torchvision that belong together")
    assert "\n" not in said
    assert "pip" not in said


def test_another_version_of_the_library(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = classifier("torchvision/residual10", num_classes=3)
    made(tmp_path, data, "torchvision/residual10", saved(whole, tmp_path / "w.pt"))
    import torchvision.models as models  # the small one above

    monkeypatch.setattr(sys.modules["torchvision"], "__version__", "9.3.0")
    report = open_model(tmp_path / "m").verify()
    assert report.holds
    assert "1 learned on another platform" in report.proofs[1].found
    monkeypatch.setitem(models._MODELS, "residual10", models.Awkward)
    wanted = r"made with torchvision 9\.1\.0, and its network of version 9\.3\.0 is another.*torchvision==9\.1\.0"
    with pytest.raises(ModelError, match=wanted) as error:
        open_model(tmp_path / "m").dense("digits")
    assert not isinstance(error.value, Damaged)


def test_names_and_options_that_cannot_be(data: Path, tmp_path: Path) -> None:
    file = saved(classifier("torchvision/residual10", num_classes=3), tmp_path / "w.pt")
    for name, why in (
        ("torchvision/residual11", r"torchvision 9\.1\.0 has no classifier 'residual11'; near names are residual10"),
        ("keras/residual10", "no library 'keras'.*torchvision and timm"),
        ("timm/hf-hub:someone/patches_tiny", "no classifier"),
    ):
        with pytest.raises(ValueError, match=why):
            made(tmp_path, data, name, file)
    for options, why in (
        ({"depht": 3}, r"cannot build 'residual10' with depht=3 \("),
        ({"weights": "DEFAULT"}, "'weights' is not for building"),
        ({"checkpoint_path": "x"}, "'checkpoint_path' is not for building"),
        ({"width": {"a": 1}}, "'width' must be a number"),
    ):
        with pytest.raises(ValueError, match=why):
            made(tmp_path, data, "torchvision/residual10", file, options=options)
    with pytest.raises(ModelError, match="adopt"):
        open_model(tmp_path / "n").learn(data / "low", "low", network="timm/patches_tiny")
    assert not (tmp_path / "m").exists()


def test_a_file_with_more_or_less_is_refused(data: Path, tmp_path: Path) -> None:
    values = classifier("torchvision/residual10", num_classes=3).state_dict()
    torch.save({**values, "extra.weight": torch.zeros(2, 2)}, tmp_path / "more.pt")
    with pytest.raises(ModelError, match=r"holds 'extra\.weight', which torchvision/residual10 has no place for"):
        made(tmp_path, data, "torchvision/residual10", tmp_path / "more.pt")
    values.pop("fc.bias")
    torch.save(values, tmp_path / "less.pt")
    with pytest.raises(ModelError, match=r"lacks 'fc\.bias'; it should hold the tensors of torchvision/residual10"):
        made(tmp_path, data, "torchvision/residual10", tmp_path / "less.pt")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"options": {"num_classes": 3, "checkpoint_path": "evil.pth"}}, "'checkpoint_path' is not for building"),
        ({"options": {"num_classes": [[3]]}}, "'num_classes' must be a number"),
        ({"options": {"num_classes": 2_000_000_000, "dim": 12}}, "the network would have 26,"),
        ({"network": "torchvision/residual10"}, "must be one of its library"),
        ({"network": "timm/hf-hub:someone/else"}, "no classifier 'hf-hub:someone/else'"),
        ({"library": {"name": "os"}}, "must be one of torchvision, timm"),
    ],
)
def test_an_edited_model_builds_nothing_else(data: Path, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    file = saved(classifier("timm/patches_tiny", num_classes=3, img_size=8), tmp_path / "w.pt")
    path = made(tmp_path, data, "timm/patches_tiny", file).path / "model.json"
    values = unsealed(path.read_bytes(), path)
    values["backbone"] |= change
    path.write_bytes(sealed(values))
    with pytest.raises(Damaged, match=why):
        empty_network(ModelFacts.from_json(unsealed(path.read_bytes(), path), path), path)


@pytest.mark.parametrize("name", ["torchvision/residual10", "timm/heads_tiny"])
def test_a_task_is_learned_on_a_librarys_features(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, or as the library fetches them: the same features, which stay as they are."""
    whole = classifier(name, num_classes=7)
    weights, models = saved(whole, tmp_path / "w.safetensors"), []
    for place, how in (("file", {"weights": weights}), ("fetched", {"pretrained": True})):
        with monkeypatch.context() as there:
            if place == "fetched":
                there.setattr(libraries, "pretrained", lambda name: dict(whole.state_dict()))
            models.append(open_model(tmp_path / place))
            models[-1].learn(data / "low", "low", network=name, size=8, **how)
    x = torch.randn(2, 3, 8, 8)
    features = [model.dense("low").get_submodule("features")(x) for model in models]
    assert torch.equal(*features)
    assert (json_of(models[0])["version"], models[0].tasks[0].training["frozen"]) == (2, True)
    models[0].learn(data / "high", "high")
    assert torch.equal(models[0].dense("high").get_submodule("features")(x), features[0])
    assert open_model(tmp_path / "file").verify()


def test_published_weights_bring_the_options_they_are_built_with(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = classifier("torchvision/residual10", width=4).state_dict()
    monkeypatch.setattr(libraries, "pretrained", lambda name: dict(values))
    monkeypatch.setattr(libraries, "beside_pretrained", lambda name: {"width": 4})
    model = open_model(tmp_path / "m")
    model.learn(data / "low", "low", network="torchvision/residual10", pretrained=True, size=8)
    assert json_of(model)["backbone"]["options"]["width"] == 4


@pytest.mark.parametrize(
    ("name", "where"), [("torchvision/residual10", "torchvision publishes"), ("timm/heads_tiny", "timm")]
)
def test_weights_that_cannot_be_fetched_say_which_file_to_bring(
    name: str, where: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = (
        rf"weights of '{name}' cannot be had here \(this would fetch something\).*bring the file: .*{where}.*--weights"
    )
    with pytest.raises(ValueError, match=told):
        open_model(tmp_path / "m").learn(data / "low", "low", network=name, pretrained=True, size=8)
    with pytest.raises(ModelError, match="say --pretrained, or --weights FILE where you have them"):
        open_model(tmp_path / "m").learn(data / "low", "low", network=name, size=8)
    assert not (tmp_path / "m").exists()
