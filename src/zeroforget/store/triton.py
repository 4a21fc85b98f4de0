"""A model repository for NVIDIA's Triton server: one model whose versions are the tasks, each a plain ONNX graph.

A task never changes, so a version never does: another export adds the versions of new tasks to those that are there.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroforget.files import atomic
from zeroforget.store.errors import ModelError
from zeroforget.store.export import (
    Exportable,
    about_task,
    check_answers,
    describe,
    onnx_graph,
    onnx_libraries,
    run_session,
)
from zeroforget.store.schema import TaskFacts, read_bytes

TASKS = "tasks.json"
"""Which task each version is, with its classes and the temperature of its probabilities; Triton passes it over."""
MOST_TOGETHER = 64
"""Pictures that Triton may put into one batch."""
_CONFIG = """name: "{name}"
backend: "onnxruntime"
max_batch_size: {most}
input [{{ name: "pixels" data_type: TYPE_FP32 dims: [ {shape} ] }}]
output [{{ name: "logits" data_type: TYPE_FP32 dims: [ -1 ] }}]
version_policy: {{ all {{ }} }}
dynamic_batching {{ }}
"""


def triton_repository(model: Exportable, repository: Path) -> Path:
    """Write the tasks as versions of one model into a repository; the model's folder there comes back."""
    model.head  # noqa: B018 - says so if there is no model
    if not model.tasks:
        raise ModelError(f"{model.path} has no task to export")
    if repository.resolve().is_relative_to(model.path.resolve()):
        raise ModelError(f"{repository} belongs to the model itself; name another folder to write")
    name = re.sub(r"[^\w-]", "_", model.path.resolve().name, flags=re.ASCII)
    place = repository / name
    _check_versions(place, model.tasks)
    try:
        atomic.make_folder(place)
        for task in model.tasks:
            if not (place / str(task.number)).is_dir():
                _write_version(model, task, place)
        told = [{"version": task.number, **about_task(model, task)} for task in model.tasks]
        atomic.write_bytes(place / TASKS, (json.dumps(told, indent=1, ensure_ascii=False) + "\n").encode())
        shape = ", ".join(map(str, model.shape))
        atomic.write_bytes(place / "config.pbtxt", _CONFIG.format(name=name, most=MOST_TOGETHER, shape=shape).encode())
    except OSError as error:
        raise ModelError(f"{place} could not be written: {error.strerror or error}") from error
    return place


def _check_versions(place: Path, tasks: Sequence[TaskFacts]) -> None:
    """What is there must be versions of these tasks and no others."""
    if not place.exists() or not any(place.iterdir()):
        return
    known = {task.number: task.hash for task in tasks}
    try:
        told = json.loads(read_bytes(place / TASKS))
        held = {one["version"]: (one["task"], one["task_hash"]) for one in told}
    except (ModelError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{place} is there and is no export of this model; name another folder") from error
    for number, (name, own) in held.items():
        if known.get(number) != own:
            raise ModelError(
                f"{place} holds '{name}' as version {number}, and this model has another task there, or none; "
                "remove that folder, or name another"
            )


def _write_version(model: Exportable, task: TaskFacts, place: Path) -> None:
    """One task, checked and then named: a server that looks meanwhile finds all of a version, or none."""
    _, runtime = onnx_libraries()
    graph = onnx_graph(model, task)
    _free_classes(graph)
    describe(graph, about_task(model, task))
    aside = place / f".{task.number}.part"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        atomic.write_new(aside / "model.onnx", graph.SerializeToString())
        session = runtime.InferenceSession(aside / "model.onnx", providers=["CPUExecutionProvider"])
        check_answers(model, task, functools.partial(run_session, session))
        atomic.place(aside, place / str(task.number))
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _free_classes(proto: Any) -> None:
    """Let the graph not tell how many classes it has: Triton wants one shape of output for all versions of a model."""
    onnx, _ = onnx_libraries()
    helper, kind, graph = onnx.helper, onnx.TensorProto, proto.graph
    own = graph.output[0].name
    for node in graph.node:
        for place, output in enumerate(node.output):
            if output == own:
                node.output[place] = "of_this_task"
    graph.initializer.extend(
        [helper.make_tensor("first_side", kind.INT64, [1], [0]), helper.make_tensor("the_rest", kind.INT64, [1], [-1])]
    )
    graph.node.extend(
        [
            helper.make_node("Shape", [graph.input[0].name], ["sides"], name="sides"),
            helper.make_node("Gather", ["sides", "first_side"], ["pictures"], name="pictures"),
            helper.make_node("Concat", ["pictures", "the_rest"], ["rows"], name="rows", axis=0),
            helper.make_node("Reshape", ["of_this_task", "rows"], [own], name="answer"),
        ]
    )
    graph.ClearField("output")
    graph.output.append(helper.make_tensor_value_info(own, kind.FLOAT, ["batch", "classes"]))
    onnx.checker.check_model(proto)
