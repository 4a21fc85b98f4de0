"""A task's network for other programs: plain ONNX, a torch.export program or a repository of Triton, compared with ours
before it is kept."""

from __future__ import annotations

import functools
import importlib
import io
import json
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroforget.files import atomic
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import PROBE, Folder
from zeroforget.store.schema import Preprocessing, TaskFacts, read_bytes
from zeroforget.store.writing import check_output, output

TOLERANCE = 1e-5
"""How far another program's logits may be from ours, as a share of the largest (or of 1, if that is more)."""
OPSET = 18
_FORMS = {".onnx": "onnx", ".pt2": "torch"}
_PRODUCER = "zeroforget"
_ABOUT = "zeroforget.json"
"""The file in a torch.export program that says what it is."""


class Exportable(Protocol):
    """What of a model is written: its tasks, their networks and what they answer."""

    path: Path
    folder: Folder

    @property
    def head(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def tasks(self) -> tuple[TaskFacts, ...]: ...
    def task(self, name: str | int) -> TaskFacts: ...
    def dense(self, task: str | int) -> nn.Module: ...
    def logits(self, images: Tensor, task: str | int) -> Tensor: ...


class FromPixels(nn.Module):
    """A task's network with the normalization of pixels in front: it takes values from 0 to 1."""

    def __init__(self, dense: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.dense = dense
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(preprocessing, name)).view(1, -1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of (batch, channels, height, width)."""
        logits: Tensor = self.dense((pixels - self.get_buffer("mean")) / self.get_buffer("std"))
        return logits


def export(model: Exportable, out: Path, task: str | int | None, form: str | None) -> Path:
    """Write a task, or all of them, and check what was written; a file that fails the check is not left behind."""
    ending = _FORMS.get(out.suffix.lower())
    form = form or ending
    if form not in {None, "onnx", "torch"}:
        raise ModelError(f"a network can be exported as 'onnx' or 'torch' (torch.export), not '{form}'")
    if ending not in {None, form}:
        own = next(suffix for suffix, one in _FORMS.items() if one == form)
        raise ModelError(f"{out.name} would be taken for format {ending}, not {form}: let it end in {own}")
    if form == "torch" and task is None:
        raise ModelError("torch.export programs hold one task each; name the task")
    model.head  # noqa: B018 - says so if there is no model
    chosen = list(model.tasks) if task is None else [model.task(task)]
    if not chosen:
        raise ModelError(f"{model.path} has no task to export")
    check_output(out, model.path, "export", is_export)
    if form is None:
        raise ModelError(f"{out.name} does not tell what to write: let it end in .onnx or .pt2, or name the format")
    with output(out, f".{form}") as aside:  # onnxruntime goes by the ending
        if form == "torch":
            _torch(model, chosen[0], aside)
        elif task is None:
            _all_onnx(model, chosen, aside)
        else:
            _onnx(model, chosen[0], aside)
    return out


def is_export(path: Path) -> bool:
    """Whether a file is a network that was exported here: ONNX names its producer first, a program holds `_ABOUT`."""
    with path.open("rb") as file:
        if b"\x12" + bytes([len(_PRODUCER)]) + _PRODUCER.encode() in file.read(32):  # field 2, of so many bytes
            return True
    try:
        with zipfile.ZipFile(path) as program:
            return any(PurePosixPath(name).match(f"extra*/{_ABOUT}") for name in program.namelist())
    except Exception:  # no zip file, or a broken one
        return False


def _network(model: Exportable, task: TaskFacts) -> FromPixels:
    return FromPixels(model.dense(task.number), task.preprocessing).eval()


def _shape() -> dict[str, dict[int, Any]]:
    return {"pixels": {0: torch.export.Dim("batch", min=1, max=2**20)}}


def _program(model: Exportable, task: TaskFacts) -> torch.export.ExportedProgram:
    two = torch.zeros(2, *model.shape)
    return torch.export.export(_network(model, task), (two,), dynamic_shapes=_shape(), strict=False)


def _torch(model: Exportable, task: TaskFacts, out: Path) -> None:
    content = io.BytesIO()  # where its own writing of a file meets a full disk, it ends the process
    torch.export.save(_program(model, task), content, extra_files={_ABOUT: json.dumps(about_task(model, task))})
    atomic.write_new(out, content.getvalue())
    with out.open("rb") as written:
        again = torch.export.load(io.BytesIO(written.read())).module()
    check_answers(model, task, again)


def _onnx(model: Exportable, task: TaskFacts, out: Path) -> None:
    _, runtime = onnx_libraries()
    proto = onnx_graph(model, task)
    describe(proto, about_task(model, task))
    atomic.write_new(out, proto.SerializeToString())
    session = runtime.InferenceSession(out, providers=["CPUExecutionProvider"])
    check_answers(model, task, functools.partial(run_session, session))


def onnx_graph(model: Exportable, task: TaskFacts) -> Any:
    """A task's ONNX graph: pixels in, logits out, any batch."""
    onnx, _ = onnx_libraries()
    try:
        return onnx.load_from_string(_traced(model, task))
    except (TypeError, AttributeError, ImportError):  # a torch that no longer has its first exporter
        return _translated(model, task)


def _traced(model: Exportable, task: TaskFacts) -> bytes:
    """By torch's first exporter: twenty times as quick as the second, and it needs no further package."""
    out: Any = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is the first one
        torch.onnx.export(
            _network(model, task),
            (torch.zeros(2, *model.shape),),
            out,
            input_names=["pixels"],
            output_names=["logits"],
            dynamic_axes={"pixels": {0: "batch"}, "logits": {0: "batch"}},
            opset_version=OPSET,
            dynamo=False,
        )
    return bytes(out.getvalue())


def _translated(model: Exportable, task: TaskFacts) -> Any:
    """By torch's second exporter, from a torch.export program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of its own parts
        made = torch.onnx.export(
            _network(model, task),
            (torch.zeros(2, *model.shape),),
            input_names=["pixels"],
            output_names=["logits"],
            dynamic_shapes=_shape(),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
            external_data=False,
        )
    if made is None:
        raise ModelError(f"torch could not translate the network of '{task.name}' to ONNX")
    return made.model_proto


def _all_onnx(model: Exportable, tasks: list[TaskFacts], out: Path) -> None:
    """One graph for all tasks: a chain of branches on the task's number, each a task's own plain network."""
    onnx, runtime = onnx_libraries()
    helper, kind = onnx.helper, onnx.TensorProto
    parts = [_branch(onnx, onnx_graph(model, task).graph, index) for index, task in enumerate(tasks)]
    branch = parts[-1]
    for index in range(len(parts) - 2, -1, -1):
        here = f"is_{index}"
        nodes = [
            helper.make_node("Equal", ["one_of_them", f"number_{index}"], [here], name=f"equal_{index}"),
            helper.make_node("If", [here], [f"out_{index}"], name=here, then_branch=parts[index], else_branch=branch),
        ]
        number = helper.make_tensor(f"number_{index}", kind.INT64, [], [index])
        result = helper.make_tensor_value_info(f"out_{index}", kind.FLOAT, ["batch", "classes"])
        branch = helper.make_graph(nodes, f"tasks_from_{index}", [], [result], [number])
    inputs = [
        helper.make_tensor_value_info("pixels", kind.FLOAT, ["batch", *model.shape]),
        helper.make_tensor_value_info("task", kind.INT64, []),
    ]
    _refuse_others(onnx, branch, len(parts))
    last = branch.output[0].name
    branch.node.append(helper.make_node("Identity", [last], ["logits"], name="answer"))
    branch.ClearField("output")
    branch.output.append(helper.make_tensor_value_info("logits", kind.FLOAT, ["batch", "classes"]))
    branch.input.extend(inputs)
    branch.name = "all_tasks"
    proto = helper.make_model(branch, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    describe(proto, {"tasks": [about_task(model, task) for task in tasks]})
    onnx.checker.check_model(proto)
    atomic.write_new(out, proto.SerializeToString())
    session = runtime.InferenceSession(out, providers=["CPUExecutionProvider"])
    for index, task in enumerate(tasks):
        number = torch.tensor(index).numpy()
        check_answers(model, task, functools.partial(run_session, session, task=number))


def _refuse_others(onnx: ModuleType, graph: Any, count: int) -> None:
    """A number that no task has becomes an index beyond the list, which is an error and not some task's answer."""
    helper, kind = onnx.helper, onnx.TensorProto
    graph.initializer.extend(
        [
            helper.make_tensor("numbers", kind.INT64, [count], range(count)),
            helper.make_tensor("zero", kind.INT64, [], [0]),
            helper.make_tensor("beyond", kind.INT64, [], [count]),
        ]
    )
    nodes = [  # an index below 0 would count from the end
        helper.make_node("Less", ["task", "zero"], ["below"], name="below"),
        helper.make_node("Where", ["below", "beyond", "task"], ["index"], name="index"),
        helper.make_node("Gather", ["numbers", "index"], ["one_of_them"], name=f"task_is_from_0_to_{count - 1}"),
    ]
    for place, node in enumerate(nodes):
        graph.node.insert(place, node)


def _branch(onnx: ModuleType, graph: Any, index: int) -> Any:
    """A task's graph as a branch: names of its own, the pixels from outside."""
    renamed = onnx.compose.add_prefix_graph(graph, f"task{index}/", rename_inputs=False)
    renamed.ClearField("input")
    renamed.ClearField("value_info")
    renamed.name = f"task{index}"
    return renamed


def run_session(session: Any, pixels: Tensor, **more: Any) -> Tensor:
    """What a graph answers."""
    return torch.from_numpy(session.run(None, {"pixels": pixels.numpy(), **more})[0])


def check_answers(model: Exportable, task: TaskFacts, run: Callable[[Tensor], Tensor]) -> None:
    """The task's own probe through what was written, as one batch and picture by picture."""
    images = model.folder.tensors(model.folder.task(task), task, PROBE)["images"]
    pixels = images.float() / 255
    with torch.no_grad():
        ours = model.logits(images, task.number)
        for theirs in (run(pixels), torch.cat([run(one) for one in pixels.split(1)])):
            off = float((theirs - ours).abs().max() / ours.abs().max().clamp_min(1))
            if theirs.shape != ours.shape or not off <= TOLERANCE:
                raise ModelError(f"the exported network of '{task.name}' answers {off:.2g} off; it was not kept")


def about_task(model: Exportable, task: TaskFacts) -> dict[str, Any]:
    """What a program must know to use the network."""
    return {
        "task": task.name,
        "classes": list(task.classes),
        "preprocessing": task.preprocessing.to_json()
        | {"input": "float32 (batch, channels, height, width), values from 0 to 1; mean and std are applied inside"},
        "temperature": task.calibration.temperature,
        "accuracy": task.accuracy if task.measured else None,
        "model": model.head,
        "task_hash": task.hash,
    }


def describe(proto: Any, about: dict[str, Any]) -> None:
    """Write into a graph what is known about it, and who made it."""
    del proto.metadata_props[:]
    for key, value in about.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    proto.producer_name = _PRODUCER


def onnx_libraries() -> tuple[Any, Any]:
    """The packages onnx and onnxruntime; ModelError says how to get them."""
    try:
        import onnx
        import onnx.compose

        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ModelError(
            f"export to ONNX needs {error.name}; install it with: pip install 'zeroforget[onnx]'. "
            "'--format torch' needs nothing more"
        ) from error
    return onnx, runtime


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
        for place, name in enumerate(node.output):
            if name == own:
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
