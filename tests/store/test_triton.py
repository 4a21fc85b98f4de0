"""A Triton model repository: a version is a task, answers as `predict` does, and never changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.tutorial import run
from tests.store.helpers import learn_more, tree
from zeroforget.store import Model, ModelError, open_model

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


CONFIG = """name: "garden"
backend: "onnxruntime"
max_batch_size: 64
input [{ name: "pixels" data_type: TYPE_FP32 dims: [ 1, 8, 8 ] }]
output [{ name: "logits" data_type: TYPE_FP32 dims: [ -1 ] }]
version_policy: { all { } }
dynamic_batching { }
"""


def softmax(logits: Any, temperature: float) -> Any:
    scaled = np.exp((logits - logits.max(1, keepdims=True)).astype(np.float64) / temperature)
    return scaled / scaled.sum(1, keepdims=True)


def test_each_version_answers_as_predict_does(trained: Path, data: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    place = model.export(tmp_path / "repository", form="triton")
    assert sorted(one.name for one in place.iterdir()) == ["1", "2", "config.pbtxt", "tasks.json"]
    told = json.loads((place / "tasks.json").read_text())
    files = sorted(data.rglob("*.png"))
    pictures = np.stack([model.prepare(file).numpy() for file in files]).astype(np.float32) / 255
    assert (place / "config.pbtxt").read_text() == CONFIG
    for one in told:
        session = onnxruntime.InferenceSession(place / str(one["version"]) / "model.onnx")
        assert [given.name for given in session.get_inputs()] == ["pixels"]
        assert session.get_inputs()[0].shape[1:] == [1, 8, 8]
        # One configuration for all versions: no graph may tell how many classes it has.
        assert [(out.name, out.shape) for out in session.get_outputs()] == [("logits", ["batch", "classes"])]
        found = softmax(session.run(None, {"pixels": pictures})[0], one["temperature"])
        for row, said in zip(found, model.predict(files, one["task"], top=len(one["classes"])), strict=True):
            expected = dict(said.classes)
            assert [expected[name] for name in one["classes"]] == pytest.approx(row.tolist(), abs=1e-5)


def test_another_export_adds_versions_and_changes_none(copied: Callable[[], Model], data: Path, tmp_path: Path) -> None:
    model = copied()
    out, code = run(f"zeroforget export {model.path} --triton -o {tmp_path}/r")
    assert (code, "versions 1 to 2" in out) == (0, True)
    place = tmp_path / "r" / model.path.name
    before = tree(place)
    learn_more(model, data, "high", epochs=1)
    model.export(tmp_path / "r", form="triton")
    after = tree(place)
    assert {name for name in after if after[name] != before.get(name)} == {"3/model.onnx", "tasks.json"}
    assert [one["task"] for one in json.loads(after["tasks.json"])] == ["low", "middle", "high"]
    model.undo()
    with pytest.raises(ModelError, match="holds 'high' as version 3, and this model has another task there, or none"):
        model.export(tmp_path / "r", form="triton")
    assert tree(place) == after


def test_what_is_somebody_elses_stays(copied: Callable[[], Model], tmp_path: Path) -> None:
    model = copied()
    place = tmp_path / "r" / model.path.name
    for name, content in (("1/model.onnx", b"theirs"), ("tasks.json", b"[1]")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
        with pytest.raises(ModelError, match="is no export of this model"):
            model.export(tmp_path / "r", form="triton")
        assert (place / name).read_bytes() == content
    with pytest.raises(ModelError, match="belongs to the model itself"):
        model.export(model.path / "r", form="triton")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="could not be written"):
        model.export(tmp_path / "file", form="triton")
    output, code = run(f"zeroforget export {model.path} --triton --task low -o {tmp_path}/x")
    assert (code != 0, "--task, or ask for --all or --triton" in output) == (True, True)
