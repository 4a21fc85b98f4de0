"""`zeroforget adopt`: a classifier's file of weights becomes a model whose first task answers bit for bit as it did."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from tests.store.helpers import LATER
from zeroforget import nets
from zeroforget.cli import app
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import grow
from zeroforget.store import ModelError, Options, Watch, open_model
from zeroforget.store.adoption import Given, adopt
from zeroforget.store.tensors import growing_tensors


def classifier(path: Path, prefix: str = "features.", head: str = "head") -> nn.Module:
    """A classifier of three classes and its file."""
    torch.manual_seed(0)
    features = nets.build("small", (1, 8, 8), width=0.5)
    width = features(torch.zeros(2, 1, 8, 8)).shape[1]
    whole = nn.Sequential(features, nn.Linear(width, 3)).requires_grad_(False).eval()
    values = {prefix + name: value for name, value in whole[0].state_dict().items()}
    save_file(values | {f"{head}.weight": whole[1].weight.data, f"{head}.bias": whole[1].bias.data}, path)
    return whole


def given(weights: Path, **more: tuple[str, ...]) -> Given:
    return Given(weights, (0.25,), (0.5,), **more)


OPTIONS = Options(network="small", width=0.5, size=8, gray=True, held_out=0.5)


@pytest.mark.parametrize(("prefix", "head"), [("", "fc"), ("features.", "head")])
def test_its_logits_stay_its_own(data: Path, tmp_path: Path, prefix: str, head: str) -> None:
    whole = classifier(tmp_path / "w.safetensors", prefix, head)
    arguments = ["adopt", str(tmp_path / "m"), str(data / "middle"), "--task", "digits", "--network", "small"]
    arguments += ["--weights", str(tmp_path / "w.safetensors"), "--width", "0.5", "--size", "8", "--gray"]
    result = CliRunner().invoke(
        app, [*arguments, "--mean", "0.25", "--std", "0.5", "--align", "8"], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert "adopted 'digits': 3 classes" in result.output
    model = open_model(tmp_path / "m")
    images = torch.stack([model.prepare(path) for path in sorted((data / "middle").rglob("*.png"))])
    expected = whole((images.float() / 255 - 0.25) / 0.5)
    torch.testing.assert_close(model.logits(images, "digits"), expected, rtol=1e-5, atol=1e-5)
    dense = model.dense("digits")
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(dense(x), whole(x))
    model.learn(data / "low", "low", **LATER)
    assert torch.equal(model.dense("digits")(x), whole(x))
    assert model.verify().holds
    assert list(model.network().widths().values()) == [16, 24, 40]  # 8, 16 and 32, and a tenth at multiples of 8


def test_without_pictures_it_is_proved_by_drawn_ones_and_not_measured(data: Path, tmp_path: Path) -> None:
    whole = classifier(tmp_path / "w.safetensors")
    (tmp_path / "names.txt").write_text("two\nthree\nfour\n")
    arguments = ["adopt", str(tmp_path / "m"), "--task", "digits", "--network", "small", "--width", "0.5", "--gray"]
    arguments += ["--weights", str(tmp_path / "w.safetensors"), "--size", "8", "--mean", "0.25", "--std", "0.5"]
    refused = CliRunner().invoke(app, arguments)
    assert "name them with --classes FILE" in str(refused.exception)
    result = CliRunner().invoke(app, [*arguments, "--classes", str(tmp_path / "names.txt")], catch_exceptions=False)
    assert "adopted 'digits': 3 classes" in result.output
    assert "not measured, for want of pictures" in result.output
    model = open_model(tmp_path / "m")
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(model.dense("digits")(x), whole(x))
    assert (model.tasks[0].classes, model.tasks[0].measured) == (("two", "three", "four"), False)
    assert "not measured" in str(model)
    picture = next((data / "low").rglob("*.png"))
    assert model.predict(picture)[0].task == "digits"
    model.learn(data / "low", "low", **LATER)
    assert [name for name, _ in model.predict(picture)[0].tasks] == ["low"]
    report = model.verify()
    assert report.holds
    assert "2 of 2 tasks bit for bit" in report.proofs[1].found
    probe = next((model.path / "tasks").glob("001*")) / "probe.safetensors"
    content = bytearray(probe.read_bytes())
    content[-1] ^= 1
    probe.write_bytes(content)
    assert not model.verify().holds


@pytest.mark.parametrize(
    ("names", "why"),
    [(("a", "b"), "has 3 outputs, but 2 names"), (("a", "b", "a"), "two outputs have the name 'a'")],
)
def test_names_that_do_not_fit_its_outputs(tmp_path: Path, names: tuple[str, ...], why: str) -> None:
    classifier(tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=why):
        adopt(tmp_path / "m", None, "digits", given(tmp_path / "w.safetensors", classes=names), OPTIONS, Watch())
    assert not (tmp_path / "m").exists()


def test_outputs_in_another_order_are_told_by_their_names(data: Path, tmp_path: Path) -> None:
    whole = classifier(tmp_path / "w.safetensors")
    order = ("digit4", "digit2", "digit3")
    facts = adopt(
        tmp_path / "m", data / "middle", "digits", given(tmp_path / "w.safetensors", classes=order), OPTIONS, Watch()
    )
    assert facts.classes == ("digit2", "digit3", "digit4")
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(open_model(tmp_path / "m").dense("digits")(x), whole(x)[:, [1, 2, 0]])


def test_names_of_outputs_are_found_however_they_are_composed(data: Path, tmp_path: Path) -> None:
    classifier(tmp_path / "w.safetensors")
    shutil.copytree(data / "middle", tmp_path / "data")
    (tmp_path / "data" / "digit3").rename(tmp_path / "data" / "ros\u00e9")
    names = given(tmp_path / "w.safetensors", classes=("rose\u0301", "digit2", "digit4"))
    facts = adopt(tmp_path / "m", tmp_path / "data", "digits", names, OPTIONS, Watch())
    assert facts.classes == ("digit2", "digit4", "ros\u00e9")


def test_mistakes_are_told_before_anything_is_made(data: Path, tmp_path: Path) -> None:
    classifier(tmp_path / "w.safetensors")
    good = given(tmp_path / "w.safetensors")
    where = tmp_path / "m"
    with pytest.raises(ModelError, match="3 outputs, but there are 2 names"):
        adopt(where, data / "low", "digits", good, OPTIONS, Watch())
    with pytest.raises(ModelError, match="mean and std need 1"):
        adopt(where, data / "middle", "digits", Given(good.weights, (0.1, 0.2), (1.0,)), OPTIONS, Watch())
    save_file({"head.weight": torch.zeros(3, 4)}, tmp_path / "bad.safetensors")
    with pytest.raises(ModelError, match=r"bad\.safetensors lacks"):
        adopt(where, data / "middle", "digits", given(tmp_path / "bad.safetensors"), OPTIONS, Watch())
    assert not open_model(where).tasks
    adopt(where, data / "middle", "digits", good, OPTIONS, Watch())
    with pytest.raises(ModelError, match="there already"):
        adopt(where, data / "middle", "digits", good, OPTIONS, Watch())


def test_a_network_that_answers_otherwise_is_not_adopted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(*args: Any, **more: Any) -> GrowingNetwork:
        net = grow(*args, **more)
        next(iter(growing_tensors(net).values())).value += 1e-3
        return net

    classifier(tmp_path / "w.safetensors")
    monkeypatch.setattr("zeroforget.store.starting.grow", spoiled)
    with pytest.raises(ModelError, match="would not answer as the classifier does; nothing was made"):
        adopt(tmp_path / "m", data / "middle", "digits", given(tmp_path / "w.safetensors"), OPTIONS, Watch())
    assert not (tmp_path / "m").exists()


def test_strictly_no_picture_may_be_unreadable(data: Path, tmp_path: Path) -> None:
    classifier(tmp_path / "w.safetensors")
    shutil.copytree(data / "middle", tmp_path / "data")
    (tmp_path / "data" / "digit2" / "broken.png").write_bytes(b"none")
    good = given(tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"broken\.png"):
        adopt(tmp_path / "m", tmp_path / "data", "digits", good, replace(OPTIONS, strict=True), Watch())
    assert not (tmp_path / "m").exists()
    assert adopt(tmp_path / "m", tmp_path / "data", "digits", good, OPTIONS, Watch()).data.skipped == 1
