"""Exported networks answer as the model does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from zeroforget.store import Model, ModelError, open_model
from zeroforget.store import export as exporting

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def pixels(model: Model, data: Path) -> torch.Tensor:
    return torch.stack([model.prepare(path) for path in sorted(data.rglob("*.png"))])


def run(path: Path, images: torch.Tensor, **more: np.ndarray) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"pixels": (images.float() / 255).numpy(), **more})[0])


def test_one_task_as_plain_onnx(trained: Path, data: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    path = model.export(tmp_path / "middle.onnx", "middle")
    images = pixels(model, data / "middle")
    for batch in (images, images[:1], images[:7]):
        assert torch.allclose(run(path, batch), model.logits(batch, "middle"), rtol=0, atol=1e-5)
    about = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(about["classes"]) == ["digit2", "digit3", "digit4"]
    preprocessing = json.loads(about["preprocessing"])
    assert preprocessing["size"] == [8, 8]
    assert preprocessing["mean"] == list(model.task("middle").preprocessing.mean)
    assert about["task_hash"] == model.task("middle").hash


def test_all_tasks_in_one_graph(trained: Path, data: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    path = model.export(tmp_path / "all.onnx")
    images = pixels(model, data / "low")
    for number, task in enumerate(model.tasks):
        found = run(path, images, task=np.array(number))
        assert torch.allclose(found, model.logits(images, task.name), rtol=0, atol=1e-5)
    for beyond in (2, 9, -1, -2, -3, -(2**63)):
        with pytest.raises(Exception, match=r"task_is_from_0_to_1.*out of data bounds"):
            run(path, images, task=np.array(beyond))
    tasks = json.loads({entry.key: entry.value for entry in onnx.load(path).metadata_props}["tasks"])
    assert [task["task"] for task in tasks] == ["low", "middle"]


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_a_number_that_no_task_has_is_an_error_however_the_graph_is_optimized(
    trained: Path, data: Path, tmp_path: Path, level: str
) -> None:
    model, options = open_model(trained), onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    path = model.export(tmp_path / "all.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    given = {"pixels": (pixels(model, data / "low")[:3].float() / 255).numpy()}
    for number, task in enumerate(model.tasks):  # chosen among all, a network answers as the same one alone
        one = onnxruntime.InferenceSession(model.export(tmp_path / "one.onnx", task.name), options)
        assert np.array_equal(session.run(None, {**given, "task": np.array(number)})[0], one.run(None, given)[0])
    for number in (-1, -2, 2):
        with pytest.raises(Exception, match="out of data bounds"):
            session.run(None, {**given, "task": np.array(number)})


def test_a_single_task_is_answered_by_its_number(model: Model, data: Path, tmp_path: Path) -> None:
    model.undo()
    images = pixels(model, data / "low")
    found = run(model.export(tmp_path / "all.onnx"), images, task=np.array(0))
    assert torch.allclose(found, model.logits(images, "low"), rtol=0, atol=1e-5)


def test_a_torch_export_program(trained: Path, data: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    path = model.export(tmp_path / "low.pt2", "low")
    images = pixels(model, data / "low")
    program = torch.export.load(path).module()
    assert torch.allclose(program(images.float() / 255), model.logits(images, "low"), rtol=0, atol=1e-5)


@pytest.mark.soak
def test_the_second_exporter_agrees(trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")

    def gone(*_: object) -> bytes:
        raise TypeError("export() got an unexpected keyword argument 'dynamo'")

    monkeypatch.setattr(exporting, "_traced", gone)
    model = open_model(trained)
    images = pixels(model, data / "low")
    path = model.export(tmp_path / "low.onnx", "low")
    assert torch.allclose(run(path, images), model.logits(images, "low"), rtol=0, atol=1e-5)
    path = model.export(tmp_path / "all.onnx")
    assert torch.allclose(run(path, images, task=np.array(1)), model.logits(images, "middle"), rtol=0, atol=1e-5)


def test_a_wrong_export_is_not_kept(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(trained)
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    with pytest.raises(ModelError, match="it was not kept"):
        model.export(tmp_path / "low.onnx", "low")
    assert list(tmp_path.iterdir()) == []


def test_mistakes(trained: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    with pytest.raises(ModelError, match="'onnx' or 'torch'"):
        model.export(tmp_path / "a", "low", form="jpeg")
    with pytest.raises(ModelError, match="one task each"):
        model.export(tmp_path / "a", form="torch")
    with pytest.raises(ModelError, match="no task 'x'"):
        model.export(tmp_path / "a", "x")
    for name in ("low.pt", "low.safetensors", "low"):
        with pytest.raises(ModelError, match=rf"{name} does not tell what to write.*\.onnx or \.pt2"):
            model.export(tmp_path / name, "low")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "form", "own"), [("low.onnx", "torch", ".pt2"), ("low.PT2", "onnx", ".onnx")])
def test_an_ending_is_not_given_to_the_other_format(
    trained: Path, tmp_path: Path, name: str, form: str, own: str
) -> None:
    with pytest.raises(ModelError, match=rf"{name} would be taken for format \w+, not {form}: let it end in \{own}$"):
        open_model(trained).export(tmp_path / name, "low", form=form)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["low.json", "low.ort", "low.txt", "low"])
def test_with_a_format_the_ending_is_free(trained: Path, data: Path, tmp_path: Path, name: str) -> None:
    """Libraries take some endings for other formats."""
    model = open_model(trained)
    images = pixels(model, data / "low")
    plain = model.export(tmp_path / name, "low", form="onnx").rename(tmp_path / "low.onnx")
    assert torch.allclose(run(plain, images), model.logits(images, "low"), rtol=0, atol=1e-5)


OTHERS = {
    "notes": b"# Notes\n",
    "another program's network": b"\x08\x08\x12\x07pytorch\x1a\x062.13.0",
    "half a zip": b"PK\x03\x04 zeroforget.json",
}


@pytest.mark.parametrize("name", ["low.onnx", "all.onnx", "low.pt2"])
@pytest.mark.parametrize("content", OTHERS)
def test_what_was_not_exported_is_not_overwritten(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    (tmp_path / name).write_bytes(OTHERS[content])
    monkeypatch.setattr(exporting, "_network", pytest.fail)  # told before anything is made
    said = rf"{name} is there and is no export of zeroforget's; name another file, or remove it first"
    with pytest.raises(ModelError, match=said):
        open_model(trained).export(tmp_path / name, None if name == "all.onnx" else "low")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {name: OTHERS[content]}


def test_weights_and_updates_are_no_exports(trained: Path, tmp_path: Path) -> None:
    model, out = open_model(trained), tmp_path / "out"
    for make in (lambda: torch.save({"w": torch.zeros(2)}, out), lambda: model.ship(out)):
        make()
        before = out.read_bytes()
        for form in ("onnx", "torch"):
            with pytest.raises(ModelError, match="out is there and is no export"):
                model.export(out, "low", form=form)
        assert out.read_bytes() == before
        out.unlink()


def test_an_earlier_export_is_overwritten_by_any_other(trained: Path, tmp_path: Path) -> None:
    model, out = open_model(trained), tmp_path / "out"
    out.touch()  # an empty file has nothing to lose
    found = []
    for task, form in (("low", "torch"), ("low", "onnx"), (None, "onnx"), ("middle", "torch"), ("middle", "torch")):
        model.export(out, task, form=form)
        found.append(out.read_bytes())
    assert len(set(found)) >= 4
    assert list(tmp_path.iterdir()) == [out]


def test_an_earlier_export_stays_if_a_new_one_fails(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = open_model(trained), tmp_path / "low"
    before = model.export(out, "low", form="onnx").read_bytes()
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    for form in ("onnx", "torch"):
        with pytest.raises(ModelError, match="it was not kept"):
            model.export(out, "middle", form=form)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"low": before}


def test_a_full_disk_is_told_in_both_forms(trained: Path, tmp_path: Path) -> None:
    """In a process of its own: torch's writer of files would end it."""
    code = (
        "import resource, signal, sys\n"
        "from zeroforget.store import open_model\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "for form in ('torch', 'onnx'):\n"
        "    try:\n        open_model(sys.argv[1]).export(sys.argv[2] + form, 'low', form=form)\n"
        "    except ValueError as error:\n        print(error)\n"
    )
    words = [sys.executable, "-c", code, str(trained), str(tmp_path / "low.")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("could not be written") == 2
    assert list(tmp_path.iterdir()) == []
