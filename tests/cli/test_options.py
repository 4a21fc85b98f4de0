"""Every option of a command reaches what it is for, and every figure that a command prints is the right one."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.cli.test_lab import zeroforget
from tests.cli.tutorial import run
from tests.experiments.helpers import results, write_toml
from tests.store.helpers import LATER, QUICK, write_digits
from zeroforget.cli import adopt as adopt_module
from zeroforget.cli import app
from zeroforget.cli import model as model_module
from zeroforget.cli.methods import _megabytes, _size
from zeroforget.cli.model import _adds
from zeroforget.experiments import runner
from zeroforget.experiments.cluster import Cluster
from zeroforget.experiments.experiment import Experiment, Part
from zeroforget.store import Model, Options, adoption, open_model
from zeroforget.store.network import Addition
from zeroforget.store.options import described
from zeroforget.store.writing import locked


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the tasks low and high beside its pictures; nobody may change it."""
    base = tmp_path_factory.mktemp("options")
    model = open_model(base / "pair")
    model.learn(write_digits(base / "low", (0, 1)), "low", **QUICK)
    model.learn(write_digits(base / "high", (8, 9)), "high", **LATER)
    return base


@pytest.fixture
def garden(pair: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(pair / "pair", tmp_path / "garden"))


def test_learn_takes_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def learn(self: Model, pictures: Path, task: str, *, options: Options, watch: object) -> None:
        seen.append({"pictures": pictures, "task": task, **asdict(options)})
        raise ValueError("seen")

    monkeypatch.setattr(Model, "learn", learn)
    monkeypatch.setattr(Options, "regime", lambda self: None)  # it would look for a GPU
    words = (
        "--network small --width 0.5 --size 16 --gray --weights w.pt --align 8 --growth 0,0.2 --epochs 7 --lr 0.5 "
        "--batch-size 9 --held-out 0.3 --selection 0.1 --test t --tune --scratch --seed 11 --flip --shift 2 --strict "
        "--unreadable 0.5 --again --finish --device cuda:1 --precision bf16 --margin 0.1 --patience 3 --rank 4 "
        "--folds 3"
    )
    run(f"zeroforget learn {tmp_path}/m pictures --task birds {words}")
    run(f"zeroforget learn {tmp_path}/m pictures --task birds --color")
    told = {
        "pictures": Path("pictures"), "task": "birds", "network": "small", "width": 0.5, "size": 16, "gray": True,
        "weights": Path("w.pt"), "align": 8, "growth": [0.0, 0.2], "epochs": 7, "lr": 0.5, "batch_size": 9,
        "held_out": 0.3, "selection": 0.1, "test": Path("t"), "frozen": False, "pretrained": False,
        "seed": 11, "flip": True, "shift": 2, "strict": True, "unreadable": 0.5, "again": True, "finish": True,
        "device": "cuda:1", "precision": "bf16", "margin": 0.1, "patience": 3,
        "rank": 4, "budget": None, "folds": 3,
    }  # fmt: skip
    assert seen == [told, {"pictures": Path("pictures"), "task": "birds", **asdict(Options(gray=False))}]


def test_an_option_is_written_once() -> None:
    """The command line, `Model.learn` and the docs' table have each, with its type and default, from one place."""
    shown = inspect.signature(Model.learn).parameters
    group: Any = get_command(app)
    typed = {option: each for each in group.commands["learn"].params for option in each.opts}
    table = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    for each, hint in described():
        assert (shown[each.name].default, shown[each.name].annotation) == (each.default, hint)
        flag = each.metadata["flag"] or f"--{each.name.replace('_', '-')}"
        assert typed[flag.partition("/")[0]].help == each.metadata["about"]
        assert (flag if "/" in flag else f"{flag}`") in table
        assert each.metadata["about"] in table
    assert inspect.signature(Model.learn).parameters["watch"].kind is inspect.Parameter.KEYWORD_ONLY


def test_adopt_takes_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def adopt(*given: Any) -> None:
        seen.append(given)
        raise ValueError("seen")

    monkeypatch.setattr(adoption, "adopt", adopt)
    (tmp_path / "names.txt").write_bytes("\ufeffcat\n\n  dog \r\n".encode())
    words = (
        f"--network timm/x --weights w.pt --classes {tmp_path}/names.txt --set a=3 --set b=[2,2] --set 'c = max' "
        "--size 32 --mean 0.5,0.25,0 --std 1,2,3 --keep stem --keep head.0 --unknown keep --align 4 --seed 5"
    )
    run(f"zeroforget adopt new pictures --task pets {words}")
    ((model, pictures, task, given, options, _),) = seen
    assert (model, pictures, task) == (Path("new"), Path("pictures"), "pets")
    assert given == adoption.Given(
        *(Path("w.pt"), (0.5, 0.25, 0.0), (1.0, 2.0, 3.0), ("cat", "dog"), {"a": 3, "b": [2, 2], "c": "max"}),
        keep=("stem", "head.0"),
        unknown="keep",
    )
    assert options == Options(network="timm/x", size=32, gray=False, align=4, seed=5, held_out=0.5)
    for wrong in ("novalue", "=3"):
        with pytest.raises(ValueError, match="--set wants KEY=VALUE"):
            adopt_module._settings([wrong])


def test_run_takes_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    load = Experiment.load

    def loaded(file: Path, **given: Any) -> Experiment:
        seen.append(given)
        return load(file)

    def told(experiment: Experiment, out: Path, *, watch: object, **given: Any) -> list[Any]:
        seen[-1] |= {"out": out, **given}
        return [results()]

    monkeypatch.setattr(Experiment, "load", loaded)
    monkeypatch.setattr(runner, "run", told)
    file = write_toml(tmp_path)
    words = ["--methods", "tfm, ewc", "--seeds", "3,4", "--device", "cuda:1", "--set", "ewc.strength=3"]
    words += ["--data-root", "somewhere", "--parallel", "3"]
    words += ["--part", "2/3", "--ray", "--cpus", "2", "--memory", "8"]
    assert "runs are in there/short\n" in zeroforget("run", file, "--out", "there", *words)
    zeroforget("run", file)
    asked = {"methods": ["tfm", "ewc"], "seeds": [3, 4], "device": "cuda:1", "changes": ["ewc.strength=3"]}
    asked |= {"out": Path("there"), "data_root": Path("somewhere"), "parallel": 3}
    asked |= {"part": Part(2, 3), "cluster": Cluster("auto", 2.0, 0.0, 8 * 10**9)}
    usual = {"methods": None, "seeds": None, "device": None, "changes": ()}
    assert seen == [
        asked,
        usual | {"out": Path("runs"), "data_root": None, "parallel": 1, "part": None, "cluster": None},
    ]
    zeroforget("run", "--ray", file, "--ray", "10.0.0.1:6379", "--gpus", "0.25")
    assert seen[-1]["cluster"] == Cluster("10.0.0.1:6379", gpus=0.25)
    zeroforget("run", "--ray", file)
    assert seen[-1]["cluster"] == Cluster()


@pytest.mark.parametrize("command", ["learn {0} {1}/low --task x", "undo {0} --yes", "receive {0} {1}/update.zfu"])
def test_no_wait_does_not_wait(garden: Path, pair: Path, command: str) -> None:
    open_model(garden).ship(pair / "update.zfu", "low")
    with locked(garden, "a test", wait=None, say=print):
        output, code = run(f"zeroforget {command.format(garden, pair)} --no-wait")
    assert (code, "('a test'" in output) == (2, True)


@pytest.mark.parametrize(("answer", "left", "code"), [("y\n", 1, 0), ("n\n", 2, 1), ("", 2, 1)])
def test_undo_asks_first(garden: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int, code: int) -> None:
    monkeypatch.setattr(model_module, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    told = CliRunner().invoke(app, ["undo", str(garden)], input=answer)
    assert (told.exit_code, len(open_model(garden).tasks)) == (code, left)
    assert "Take back 002-high?" in told.output
    assert ("took back 'high'; the model ends with 001-low" in told.output) == (left == 1)


def test_tasks_add_up(pair: Path) -> None:
    first, second = open_model(pair / "pair").tasks
    lines = [line.split() for line in run(f"zeroforget tasks {pair}/pair")[0].splitlines()]
    born = [sum(task.born.values()) for task in (first, second)]
    assert lines[1][5:7] == [str(born[0]), f"(+{born[0]})"]
    assert lines[2][5:7] == [str(sum(born)), f"(+{born[1]})"]
    assert lines[2][:4] == ["high", "2", f"{100 * second.accuracy:.1f}", "%"]
    layers = {line[0]: line[1:] for line in lines[5:] if line and line[0] in first.born}
    assert layers == {axis: [str(count), str(count + second.born.get(axis, 0))] for axis, count in first.born.items()}


def test_what_is_shipped_is_a_share_of_the_model(pair: Path, tmp_path: Path) -> None:
    update, whole = tmp_path / "update.zfu", open_model(pair / "pair").bytes
    output, _ = run(f"zeroforget ship {pair}/pair --since low -o {update}")
    size = update.stat().st_size
    assert output == f"wrote {update}: 'high', {size:,} bytes, {100 * size / whole:.1f} % of the model\n"
    shutil.copytree(pair / "pair", tmp_path / "again")
    head = open_model(pair / "pair").head[:16]
    told = f"the origin of {update} is unknown: it is not signed\nnothing new; the model is {head}\n"
    assert run(f"zeroforget receive {tmp_path}/again {update}")[0] == told


def test_a_hash_is_the_models_however_it_is_written(pair: Path) -> None:
    head = open_model(pair / "pair").head
    assert run(f"zeroforget verify {pair}/pair --is {head[:16].upper()}")[1] == 0
    output, code = run(f"zeroforget verify {pair}/pair --json --is {'0' * 64}")
    assert (code, json.loads(output)["holds"], json.loads(output)["head"]) == (1, False, head)


def test_verify_measures_what_was_held_out_and_what_was_not(pair: Path, tmp_path: Path) -> None:
    recorded = open_model(pair / "pair").tasks[0].accuracy
    output, code = run(f"zeroforget verify {pair}/pair --data low={pair}/low")
    assert code == 0
    assert f"; test part {100 * recorded:.2f} %, recorded {100 * recorded:.2f} %\n" in output
    shutil.copytree(pair / "low" / "digit0", tmp_path / "other" / "digit1")  # every one of them is named wrongly
    output, code = run(f"zeroforget verify {pair}/pair --data low={tmp_path}/other")
    assert code == 0
    assert re.search(
        rf"of 24 pictures \(95 % interval: \d+ to \d+ %\) \(recorded .*: {100 * recorded:.1f} %\)\n", output
    )


def test_classes_of_a_picture_are_numbered_from_the_best(pair: Path) -> None:
    output, _ = run(f"zeroforget predict {pair}/pair --task low --csv {pair}/low/digit0/000.png")
    rows = [line.split(",") for line in output.splitlines()[1:]]
    assert [row[2] for row in rows] == ["1", "2"]
    assert float(rows[0][4]) > float(rows[1][4])


@pytest.mark.parametrize(
    ("count", "end"), [(0, "  no new features: a head and its norms"), (8, "l7 1→2"), (9, "l7 1→2 …")]
)
def test_of_many_layers_that_grow_eight_are_named(capsys: pytest.CaptureFixture[str], count: int, end: str) -> None:
    features = {f"l{place}": (1, 2) for place in range(count)} | {"still": (3, 3)}
    _adds([Addition(0.1, 0.0, features, 1, 4, 10, 10)])
    assert capsys.readouterr().out.splitlines()[1].endswith(end)


def test_figures_for_people() -> None:
    assert [_size(count) for count in (999, 1000, 999_949, 1_000_000)] == ["999 B", "1.0 kB", "999.9 kB", "1.0 MB"]
    sizes = (None, (8, 0), (80_000,), (400_000,), (8_000_000_000,))
    assert [_megabytes(bits) for bits in sizes] == ["–", "0", "0.01", "0.1", "1,000.0"]


def test_an_error_is_one_line_however_long_and_whatever_is_in_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeroforget.cli import main

    name = "[/red] " + "a long name " * 20 + "x"
    monkeypatch.setattr(sys, "argv", ["zeroforget", "table", name])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: no such folder: {name}\n"
