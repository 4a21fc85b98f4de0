"""The practitioner's commands: the tutorial's whole day, and what happens when something is wrong."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.cli.tutorial import TUTORIAL, run, sessions, workplace
from tests.store.helpers import QUICK, tree, write_digits
from zeroforget.store import open_model

ZEROFORGET = [sys.executable, "-c", "from zeroforget.cli import main; main()"]


def shape_of(text: str) -> str:
    """The text without what differs from run to run: numbers, hashes, and which mistakes a short training leaves."""
    text = re.sub(r"^  epoch .* s left\n", "", text, flags=re.MULTILINE)  # on a machine so slow that it is said
    text = re.sub(r"\b[0-9a-f]{16,64}\b", "HASH", text)
    text = re.sub(r"^(photos/\S+).*$", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"[ \t]+", " ", re.sub(r"\d[\d,.]*", "N", text)).replace(" \n", "\n").strip()


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as folder:
        yield folder


def test_the_tutorial_prints_what_it_says_it_prints(place: Path) -> None:
    pytest.importorskip("onnxruntime")
    blocks = sessions(TUTORIAL.read_text())
    assert sum(len(block) for block in blocks) >= 15
    for command, printed in (pair for block in blocks for pair in block):
        output, code = run(command)
        assert code == 0, (command, output)
        assert shape_of(output) == shape_of(printed), command
    model = open_model(place / "garden")
    assert model.tasks[0].accuracy > 0.85
    assert open_model(place / "phone").tasks[1].accuracy > 0.75
    serve_as_the_tutorial_says("phone", Path("photos/odd/digit-7/000.png"), "odd")


def serve_as_the_tutorial_says(model: str, picture: Path, task: str) -> None:
    """The day's last command: the server's answer over HTTP is the one that `predict` prints."""
    pytest.importorskip("fastapi")
    printed, _ = run(f"zeroforget predict {model} --task {task} --json {picture}")
    command = [*ZEROFORGET, "serve", model, "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            request = urllib.request.Request(f"{address}predict?task={task}", data=picture.read_bytes(), method="POST")
            with urllib.request.urlopen(request, timeout=20) as answer:
                served = json.load(answer)["classes"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=20)
    best = served[0]
    assert best["class"] in printed
    assert any(abs(float(p) - best["probability"]) < 1e-5 for p in re.findall(r"\d\.\d+(?:e-\d+)?", printed))


def test_the_python_of_the_tutorial_runs(place: Path) -> None:
    write_digits(place / "few", (0, 2))
    open_model("garden").learn("few", "even", **QUICK)
    code = re.search(r"```python\n(import zeroforget.*?)```", TUTORIAL.read_text(), re.DOTALL)
    assert code is not None
    text = code[1].replace("import zeroforget\n", "import types\n").replace("epochs=20", "epochs=1")
    from zeroforget.store import open_model as opened

    scope = {"zeroforget": type("module", (), {"open": staticmethod(opened)})}
    exec(text, scope)  # our own page
    assert [task.name for task in open_model("garden").tasks] == ["even"]


@pytest.fixture(scope="module")
def garden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two tasks beside the pictures it learned from."""
    base = tmp_path_factory.mktemp("cli")
    model = open_model(base / "garden")
    for name, classes in (("low", (0, 1)), ("middle", (2, 3, 4))):
        model.learn(write_digits(base / name, classes), name, **QUICK)
    return base


def test_predictions_for_programs(garden: Path) -> None:
    pictures = f"{garden}/low/digit0/000.png {garden}/nothing.png"
    output, code = run(f"zeroforget predict {garden}/garden --task low --top 2 --json {pictures}")
    good, bad = json.loads(output)
    assert code == 1
    assert {one["class"] for one in good["classes"]} == {"digit0", "digit1"}
    assert sum(one["probability"] for one in good["classes"]) == pytest.approx(1)
    assert bad == {"picture": f"{garden}/nothing.png", "error": "is missing"}
    output, _ = run(f"zeroforget predict {garden}/garden --csv {pictures}")
    rows = list(csv.DictReader(io.StringIO(output)))
    assert rows[0]["task"] in {"low", "middle"}
    assert rows[-1]["error"] == "is missing"
    output, code = run(f"zeroforget predict {garden}/garden --json {garden}/low")
    assert code == 0
    assert len(json.loads(output)) == 48
    assert {task["task"] for task in json.loads(output)[0]["tasks"]} == {"low", "middle"}


def test_a_picture_that_may_not_be_read_leaves_the_others(garden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, access = Image.open, os.access

    def forbidden(file: Any, *more: Any, **named: Any) -> Image.Image:
        if str(file).endswith("000.png"):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return opened(file, *more, **named)

    monkeypatch.setattr(os, "access", lambda path, *more: not str(path).endswith("000.png") and access(path, *more))
    monkeypatch.setattr(Image, "open", forbidden)
    pictures = " ".join(f"{garden}/low/digit0/00{place}.png" for place in range(2))
    output, code = run(f"zeroforget predict {garden}/garden --task low --json {pictures}")
    bad, good = json.loads(output)
    assert code == 1
    assert bad["error"] == "may not be read by this user"
    assert good["classes"]


def test_of_a_folder_what_is_no_picture_is_left_out(garden: Path, tmp_path: Path) -> None:
    folder, model = tmp_path / "inbox", f"{garden}/garden"
    (folder / "below").mkdir(parents=True)
    for name in ("notes.txt", "labels.json", "below/clip.mp4", ".DS_Store"):
        (folder / name).write_bytes(b"no picture")
    output, code = run(f"zeroforget predict {model} {folder}")
    assert (code, "no pictures to classify" in output) == (2, True)
    picture = (garden / "low" / "digit0" / "000.png").read_bytes()
    (folder / "a.png").write_bytes(picture)
    (folder / "without ending").write_bytes(picture)
    command = [*ZEROFORGET, "predict", model, "--json"]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True)
    assert [Path(one["picture"]).name for one in json.loads(done.stdout)] == ["a.png", "without ending"]
    assert done.stderr == "3 files that are no pictures are left out\n"
    (folder / "b.heic").write_bytes(b"of a format that is not read")
    done = subprocess.run([*command, f"{folder}/notes.txt", str(folder)], capture_output=True, text=True, check=False)
    wrong = [Path(one["picture"]).name for one in json.loads(done.stdout) if "error" in one]
    assert (done.returncode, wrong) == (1, ["notes.txt", "b.heic"])  # what was named, and what is a picture


def test_tasks_and_verify_for_programs(garden: Path) -> None:
    tasks = json.loads(run(f"zeroforget tasks {garden}/garden --json")[0])
    assert [task["name"] for task in tasks] == ["low", "middle"]
    report = json.loads(run(f"zeroforget verify {garden}/garden --json")[0])
    assert report["holds"]
    assert report["head"] == tasks[-1]["hash"]


def test_verify_says_what_moved_and_exits_with_1(garden: Path) -> None:
    head = open_model(garden / "garden").head
    assert run(f"zeroforget verify {garden}/garden --is {head[:16]}")[1] == 0
    output, code = run(f"zeroforget verify {garden}/garden --is {'0' * 16}")
    assert (code, "not 000000000000" in output) == (1, True)
    file = garden / "garden/tasks/001-low/born.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    output, code = run(f"zeroforget verify {garden}/garden")
    file.write_bytes(whole)
    assert code == 1
    assert "✗ the files are those that were written: 1 damaged" in output
    assert "born.safetensors is damaged: its content is not what was written" in output
    assert run(f"zeroforget verify {garden}/garden")[1] == 0


MISTAKES = {
    "tasks {0}/nothing": "there is no model",
    "learn {0}/garden {0}/nothing --task x": "is not a folder",
    "learn {0}/garden {0}/low --task low": "already, and learned tasks never change",
    "learn {0}/garden {0}/low --task x --growth much": "--growth wants a share",
    "predict {0}/garden {0}/low --task birds": "no task 'birds'",
    "verify {0}/garden --data low": "--data wants TASK=FOLDER",
    "export {0}/garden -o {0}/x.onnx": "--all",
    "export {0}/garden --task low -o {0}/x.pt": "does not tell what to write",
    "ship {0}/garden -o {0}/x.zfu": "--since",
    "learn {0}/new {0}/garden --task x": "is a model, not pictures",
    "learn {0}/low {0}/garden --task x": "is a model, not pictures",
    "learn {0} {0}/low --task x": "holds other things, such as 'garden'; name a folder that is new or holds a model",
    "learn {0}/low {0}/middle --task x": "low is no model and holds other things, such as 'digit0'",
    "learn {0}/garden {0}/low/digit0 --task x": "holds 24 pictures but no class folders; put each class's pictures",
    "learn {0}/garden {0}/low --task x --color": "is for gray pictures, which cannot change; leave out --color",
    "tasks {0}/low": "low is no model and holds other things",
    "export {0}/garden --task low --format torch -o {0}/x.onnx": "taken for format onnx, not torch: let it end in .pt2",
    "receive {0}/garden {0}/garden/model.json": "is no update",
    "learn {0}/garden/model.json {0}/nothing --task x": "is a file, and a model is a folder",
    "learn {0}/new {0}/low --task x --seed -1": "--seed is a whole number",
    "learn {0}/new {0}/low --task x --width 17": "--width is a share",
    "learn {0}/new {0}/low --task x --shift -1": "error: --shift is from 0 to 512 pixels, not -1\n",
    "learn {0}/new {0}/low --task x --shift 100000": "error: --shift is from 0 to 512 pixels, not 100000\n",
    "learn {0}/new {0}/low --task x --held-out 1": "error: --held-out is a share of each class",
    "learn {0}/new {0}/low --task x --batch-size 0": "error: --batch-size must be positive, not 0\n",
    "learn {0}/new {0}/low --task x --lr -1": "error: --lr must be positive",
    "learn {0}/new {0}/low --task x --device tpu": "error: there is no device 'tpu'",
    "verify {0}/garden --data low={0}/low --data low={0}/middle": "names the task 'low' twice",
    "verify {0}/garden --is abcdef012345678": "at least 16 digits",
    "export {0}/nothing --all -o {0}/x.onnx": "there is no model",
    "export {0}/garden --all -o {0}/nosuch/x.onnx": "there is no folder",
    "export {0}/garden --task low -o {0}/garden/tasks/001-low/born.safetensors": "belongs to the model itself",
    "ship {0}/garden --all -o {0}/nosuch/x.zfu": "there is no folder",
    "ship {0}/garden --all -o {0}/garden/model.json": "belongs to the model itself",
    "ship {0}/garden --all -o {0}/low": "is a folder; name a file",
    "undo {0}/garden": "say --yes",
    "adopt {0}/new {0}/low --task x --network small --weights x --classes {0}/low/digit0/000.png": "no text in UTF-8",
    "adopt {0}/new {0}/low --task x --network small --weights x --mean 1e31": "got 1e+31",
    "adopt {0}/new {0}/low --task x --network small --weights x --std 1e-7": "got 1e-07",
    "adopt {0}/new {0}/low --task x --network small --weights x --seed -1": "--seed is a whole number",
    "adopt {0}/garden/model.json {0}/low --task x --network small --weights x": "is a file, and a model is a folder",
    "adopt {0}/middle {0}/low --task x --network small --weights x": "middle is no model and holds other things",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_one_plain_sentence(garden: Path, command: str) -> None:
    before = tree(garden)
    output, code = run(f"zeroforget {command.format(garden)}")
    assert code == 2
    assert MISTAKES[command] in output
    assert tree(garden) == before


def test_a_new_model_is_told_and_an_old_one_is_not(garden: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".gitkeep").touch()
    for name in ("gardn", "new"):  # misspelt, and a folder that has nothing to lose
        learn = f"zeroforget learn {tmp_path}/{name} {garden}"
        output, code = run(f"{learn}/low --task low --size 8 --gray --epochs 1")
        assert (code, output.count(f"making a new model in {tmp_path}/{name}\n")) == (0, 1)
    output, code = run(f"{learn}/middle --task middle --epochs 1")
    assert (code, "new model" in output) == (0, False)


def test_a_search_prints_what_it_tried(garden: Path) -> None:
    write_digits(garden / "high", (8, 9))
    output, code = run(f"zeroforget learn {garden}/garden {garden}/high --task high --growth 0,0.1 --epochs 1")
    assert code == 0
    assert "growing by 0.1 adds" in output
    assert output.count("(taken)") == 1
    assert "2 earlier tasks unchanged" in output
    assert run(f"zeroforget undo {garden}/garden --yes --task even")[1] == 2
    assert run(f"zeroforget undo {garden}/garden --yes --task high")[0].startswith("took back 'high'")


def test_ctrl_c_leaves_the_model_and_offers_what_is_there(garden: Path) -> None:
    write_digits(garden / "odd", (5, 7))
    # At this rate the loss falls a little with every epoch, so training cannot end before it is interrupted.
    slowly = ["--epochs", "100000", "--lr", "0.001"]
    words = ["learn", str(garden / "garden"), str(garden / "odd"), "--task", "odd", *slowly]
    with subprocess.Popen(
        [*ZEROFORGET, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        training = garden / "garden" / ".training"
        while process.poll() is None and not any(training.glob("phase-*.safetensors")):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "is as it was, with 2 tasks" in " ".join(told.split())
    assert "--finish" in told
    assert open_model(garden / "garden").verify()
    assert len(open_model(garden / "garden").tasks) == 2
    output, code = run(f"zeroforget {' '.join(words)} --finish")
    assert (code, "going on with the training that was interrupted" in output) == (0, True)
    run(f"zeroforget undo {garden}/garden --yes")
