"""`net.save`: any growing network of one input in a folder, proved, and built again only by code that is trusted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroforget
from tests.store import own_networks
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import own_code
from zeroforget.store import Model, ModelError, open_model

HERE = "tests.store.own_networks"


@pytest.fixture(autouse=True)
def _nobody_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "_trusted", set())


def taught(body: nn.Module, x: Tensor) -> GrowingNetwork:
    """Two tasks, the second with new features and a rank birth."""
    torch.manual_seed(0)
    net = zeroforget.grow(body, x, start=0.5)
    batches = [(x, torch.arange(len(x)) % 2)] * 2
    net.fit(batches, batches, task="first", classes=["low", "high"], epochs=1)
    net.fit(batches, batches, task="second", classes=2, growth=0.25, rank=2, epochs=1)
    return net


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "table": (own_networks.table, (8,)),
    "Waves": (own_networks.Waves, (2, 64)),
    "pictures": (own_networks.pictures, (1, 8, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_saved_answers_bit_for_bit_and_is_proved(name: str, tmp_path: Path) -> None:
    build, shape = CASES[name]
    net, x = taught(build(), torch.randn(6, *shape)), torch.randn(5, *shape)
    net.save(tmp_path / "m", build=f"{HERE}:{name}")
    model = open_model(tmp_path / "m")
    assert [task.name for task in model.tasks] == ["first", "second"]
    assert model.tasks[0].classes == ("low", "high")
    assert "not measured" in str(model)
    for task in ("first", "second"):
        assert torch.equal(model.dense(task)(x), net(x, task))
        assert torch.equal(model.network().eval()(x, task), net(x, task))
    report = model.verify()
    assert report.holds
    assert "2 of 2 tasks bit for bit" in report.proofs[1].found
    more = model.network()
    more.fit([(x, torch.arange(5) % 2)], [(x, torch.arange(5) % 2)], task="third", classes=2, growth=0.25, epochs=1)
    more.save(tmp_path / "again", build=f"{HERE}:{name}")
    assert torch.equal(open_model(tmp_path / "again").dense("first")(x), net(x, "first"))


def saved(tmp_path: Path, **more: Any) -> Path:
    net = taught(own_networks.table(), torch.randn(6, 8))
    return net.save(tmp_path / "m", build=f"{HERE}:table", **more)  # type: ignore[no-any-return]


def test_its_code_runs_only_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    own_code._trusted.clear()
    assert len(open_model(path).tasks) == 2  # what is written down is read without it
    with pytest.raises(ModelError, match=rf"runs only where you trust it: .*trust='{HERE}:table'.*ZEROFORGET_TRUST="):
        open_model(path).dense("first")
    monkeypatch.setenv(own_code.TRUST, f"other:thing,{HERE}:table")
    assert open_model(path).verify().holds
    monkeypatch.delenv(own_code.TRUST)
    assert isinstance(zeroforget.open(path, trust=f"{HERE}:table").dense("first"), nn.Module)
    forged = shutil.copytree(path, tmp_path / "forged")
    values = (forged / "model.json").read_text()
    (forged / "model.json").write_text(values.replace(f"{HERE}:table", "os:getcwd"))
    with pytest.raises(ValueError, match=r"model\.json is damaged"):
        open_model(forged)


def test_damage_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path)
    file = next((path / "tasks").glob("001*")) / "born.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert not open_model(path).verify().holds


def test_pictures_are_refused_where_it_takes_tensors(tmp_path: Path, data: Path) -> None:
    model = open_model(saved(tmp_path))
    picture = next(data.rglob("*.png"))
    for use in (lambda: model.predict(picture, "first"), lambda: model.learn(data / "low", "low")):
        with pytest.raises(ModelError, match="takes inputs of 8, tensors as they are, not pictures"):
            use()
    with pytest.raises(ModelError, match="tensors as they are"):
        model.export(tmp_path / "out.onnx", "first")
    with pytest.raises(ModelError, match="tensors as they are"):
        model.verify({"first": data / "low"})


def test_a_network_of_pictures_goes_on_with_folders_of_them(tmp_path: Path, data: Path) -> None:
    net = taught(own_networks.pictures(), torch.rand(6, 1, 8, 8))
    net.save(tmp_path / "m", build=f"{HERE}:pictures", mean=(0.25,), std=(0.5,))
    model: Model = open_model(tmp_path / "m")
    x = torch.stack([model.prepare(path) for path in sorted((data / "low").rglob("*.png"))[:4]])
    before = model.logits(x, "first")
    assert torch.equal(before, net((x.float() / 255 - 0.25) / 0.5, "first"))
    facts = model.learn(data / "low", "low", epochs=2, batch_size=16, growth=0.5)
    assert sum(facts.born.values()) > 0
    assert torch.equal(model.logits(x, "first"), before)
    assert model.verify().holds
    assert json.loads((model.path / "model.json").read_text())["backbone"]["network"] == f"code/{HERE}:pictures"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"build": "table"}, "code is named as package.module:function"),
        ({"build": "__main__:table"}, "in a module that another program can import"),
        ({"build": f"{HERE}:missing"}, "cannot be imported here"),
        ({"build": f"{HERE}:strings"}, "made str, not a torch module"),
        ({"build": f"{HERE}:growing"}, "let it return the plain one that grow was given"),
        ({"build": f"{HERE}:Waves"}, "does not build this network again"),
        ({"options": {"width": 30}}, "does not build this network again"),
        ({"inputs": torch.zeros(2, 7)}, r"inputs are torch.float32 of \(some, 8\)"),
        ({"mean": (0.1,), "std": (0.1,)}, "mean and std are of pictures"),
    ],
)
def test_what_cannot_be_saved_is_told_and_leaves_nothing(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    net = taught(own_networks.table(), torch.randn(6, 8))
    with pytest.raises(ValueError, match=why):
        net.save(tmp_path / "m", **({"build": f"{HERE}:table"} | more))
    assert not (tmp_path / "m").exists()
    if "build" not in more:
        return
    empty = zeroforget.grow(own_networks.table(), torch.randn(2, 8))
    with pytest.raises(ModelError, match="no task yet"):
        empty.save(tmp_path / "m", build=f"{HERE}:table")
