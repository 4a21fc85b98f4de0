"""What the practitioner's commands print wherever it goes: any encoding, narrow terminals, odd names, a stop."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.cli.tutorial import run
from tests.store.helpers import QUICK, write_digits
from zeroforget.cli.app import LAB, MODEL
from zeroforget.files.text import has_hidden
from zeroforget.store import Model, open_model

ZEROFORGET = [sys.executable, "-c", "from zeroforget.cli import main; main()"]


@pytest.fixture(scope="module")
def garden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one task, `low`, beside its pictures."""
    base = tmp_path_factory.mktemp("output")
    open_model(base / "garden").learn(write_digits(base / "low", (0, 1)), "low", **QUICK)
    return base


def spoken(garden: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, beside the model."""
    env = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "FORCE_COLOR"}} | environment
    return subprocess.run(
        [*ZEROFORGET, *words], cwd=garden, env=env, capture_output=True, text=True, check=False, encoding="utf-8"
    )


def test_signs_that_an_encoding_lacks_stop_nothing(garden: Path) -> None:
    told = spoken(garden, "verify", "garden", PYTHONIOENCODING="ascii")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.count("\\u2713") == 3
    assert "8\\u00d78 gray" in spoken(garden, "tasks", "garden", PYTHONIOENCODING="ascii").stdout


@pytest.mark.skipif(sys.platform != "linux", reason="names there are any bytes")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_name_that_is_no_text_is_told_so_that_it_can_be_read(garden: Path, encoding: str) -> None:
    odd = os.fsdecode(b"caf\xff \xc3\xa9.png")
    shutil.copy(garden / "low" / "digit0" / "000.png", garden / odd)
    told = spoken(garden, "predict", "garden", odd, "--json", PYTHONIOENCODING=encoding)
    assert (told.returncode, told.stderr) == (0, "")
    assert json.loads(told.stdout)[0]["picture"] == odd
    assert spoken(garden, "predict", "garden", odd, PYTHONIOENCODING=encoding).returncode == 0
    (garden / odd).unlink()


def test_a_narrow_terminal_hides_no_answer(garden: Path) -> None:
    told = spoken(garden, "predict", "garden", "low/digit0/000.png", FORCE_COLOR="1", COLUMNS="40")
    assert "low/digit0/000.png" in told.stdout
    assert "digit0" in told.stdout.replace("low/digit0", "")
    told = spoken(garden, "tasks", "garden", FORCE_COLOR="1", COLUMNS="40")
    assert re.search(r"\d+\.\d %", told.stdout)
    assert "…" not in told.stdout


def test_what_pillow_warns_of_is_not_printed(garden: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (8, 8)).save(garden / "cut.jpg", exif=exif.tobytes()[:-3])
    told = spoken(garden, "predict", "garden", "cut.jpg")
    assert (told.returncode, told.stderr) == (0, "")


def test_a_missing_file_is_named_without_a_number(garden: Path) -> None:
    words = ("adopt", "new", "low", "--task", "x", "--network", "small", "--weights", "x", "--classes", "nothing.txt")
    told = spoken(garden, *words)
    assert (told.returncode, told.stderr) == (2, "error: nothing.txt: no such file or directory\n")


def test_a_stop_is_told_whatever_the_folder_is_called(
    garden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "gar[/den]"
    shutil.copytree(garden / "garden", path)
    monkeypatch.setattr(Model, "learn", stopped)
    output, code = run(f"zeroforget learn '{path}' {garden}/low --task more")
    assert code == 130
    assert f"stopped. {path} is as it was, with 1 task." in output


def test_a_stop_after_the_task_was_written_says_so(
    garden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = Model.learn

    def stopped(self: Model, *words: object, **more: object) -> None:
        learn(open_model(self.path), *words, **more)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(Model, "learn", stopped)
    output, code = run(f"zeroforget learn {tmp_path}/m {garden}/low --task more --size 8 --gray --epochs 1")
    assert code == 130
    assert "stopped, but 'more' had been learned: it is in" in output


@pytest.mark.parametrize("module", ["zeroforget.cli", "typer", "zeroforget.cli.serve", "torch"])
def test_ctrl_c_is_quiet_from_the_first_moment(module: str) -> None:
    """Whatever is being imported when it comes."""
    stopping = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{module}': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from zeroforget.__main__ import main\n"
        "main()\n"
    )
    words = [sys.executable, "-c", stopping, "verify", "garden"]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    assert told.returncode == 130
    assert told.stderr in {"stopped\n", ""}


def test_a_damaged_model_has_no_hash_to_compare(garden: Path, tmp_path: Path) -> None:
    shutil.copytree(garden / "garden", tmp_path / "m")
    (tmp_path / "m" / "tasks" / "001-low" / "born.safetensors").write_bytes(b"")
    output, code = run(f"zeroforget verify {tmp_path}/m --is {'0' * 64}")
    assert code == 1
    assert f"✗ a damaged model is not {'0' * 64}\n" in output


def test_hidden_files_and_folders_are_not_classified(garden: Path, tmp_path: Path) -> None:
    shutil.copytree(garden / "low", tmp_path / "low")
    (tmp_path / "low" / ".cache").mkdir()
    shutil.copy(tmp_path / "low" / "digit0" / "000.png", tmp_path / "low" / ".cache" / "000.png")
    (tmp_path / "low" / "Thumbs.db").write_bytes(b"x")
    output, code = run(f"zeroforget predict {garden}/garden --json {tmp_path}/low")
    assert (code, len(json.loads(output))) == (0, 48)


def test_one_form_at_a_time(garden: Path) -> None:
    output, code = run(f"zeroforget predict {garden}/garden --json --csv {garden}/low")
    assert (code, "--json or --csv, not both" in output) == (2, True)


def test_learn_computes_with_as_many_threads_as_asked_for(
    garden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def learn(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise ValueError("seen")

    monkeypatch.setattr(Model, "learn", learn)
    before = torch.get_num_threads()
    run(f"zeroforget learn {tmp_path}/m {garden}/low --task low --threads {before + 1}")
    run(f"zeroforget learn {tmp_path}/m {garden}/low --task low")
    assert (seen, torch.get_num_threads()) == ([before + 1, before], before)
    output, code = run(f"zeroforget learn {tmp_path}/m {garden}/low --task low --threads 0")
    assert (code, "--threads" in output) == (2, True)


def test_help_groups_the_commands_a_models_first() -> None:
    output = run("zeroforget --help")[0]
    parts = [output.index(panel) for panel in (MODEL, LAB)]
    assert parts == sorted(parts)
    assert "Commands" not in output  # where those without a group would be


def test_receive_tells_how_a_first_model_comes() -> None:
    assert "--all" in run("zeroforget receive --help")[0]


def test_a_task_that_was_not_learned_is_doubted(garden: Path, tmp_path: Path) -> None:
    words = ("learn", str(tmp_path / "m"), "low", "--task", "x", "--size", "8", "--gray", "--epochs", "1")
    told = spoken(garden, *words, "--lr", "1e-9", "--seed", "1")
    assert told.returncode == 0
    assert "\nwarning: not clearly better than to answer always the same (50.0 %)" in told.stderr
    assert "zeroforget undo" in told.stderr


SIGNS = "\x1b]0;owned\x07\x9b2J\u202eevil\x7f"


def test_no_sign_that_a_terminal_obeys_is_printed_whatever_its_source(tmp_path: Path) -> None:
    """File names, JSON keys and texts of errors: each is named with the signs escaped."""
    strange = tmp_path / f"pic{SIGNS}.png"
    strange.write_bytes(b"no picture")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.json").write_text(json.dumps({SIGNS: SIGNS}))
    (tmp_path / "u.zfu").write_bytes(SIGNS.encode())
    made = write_digits(tmp_path / "photos", (0, 1), 12)
    assert run(f"zeroforget learn {tmp_path}/garden {made} --task low --size 8 --gray --epochs 1")[1] == 0
    commands = [
        *(["predict", str(tmp_path / "garden"), str(strange), *more] for more in ([], ["--json"], ["--csv"])),
        *([name, str(tmp_path / "m")] for name in ("tasks", "verify")),
        ["receive", str(tmp_path / "garden"), str(strange)],
        ["learn", str(tmp_path / "garden"), str(tmp_path / f"no{SIGNS}"), "--task", "x"],
        ["learn", str(tmp_path / "garden"), str(made), "--task", f"x{SIGNS}"],
        ["run", str(tmp_path / f"e{SIGNS}.toml")],
        ["table", str(tmp_path / f"e{SIGNS}")],
    ]
    done = subprocess.run([sys.executable, "-c", ONE_BY_ONE], input=json.dumps(commands).encode(), capture_output=True)
    assert done.returncode == 0, done.stderr
    told = done.stdout.decode().split(AFTER)
    assert len(told) == len(commands) + 1
    for words, said in zip(commands, told, strict=False):
        assert not has_hidden(said.replace("\n", "")), (words, said)
        assert "\\u001b" in said or words[0] in {"tasks", "verify"}, (words, said)


AFTER = "=== next ==="
ONE_BY_ONE = f"""
import json, sys
from zeroforget.cli import main
sys.stderr = sys.stdout
for words in json.load(sys.stdin):
    sys.argv = ["zeroforget", *words]
    try:
        main()
    except SystemExit:
        pass
    print("{AFTER}", flush=True)
"""
"""The program's own `main`, command after command in one process: most of a process' time goes into its imports."""


def test_class_folders_with_such_names_are_refused_before_anything_is_learned(tmp_path: Path) -> None:
    made = write_digits(tmp_path / "photos", (0, 1), 12)
    (made / "digit0").rename(made / f"digit{SIGNS}")
    output, code = run(f"zeroforget learn {tmp_path}/garden {made} --task low --size 8 --gray --epochs 1")
    assert code != 0
    assert "signs that are not shown" in output
    assert not (tmp_path / "garden").exists()


def test_no_cell_of_a_table_begins_a_formula(tmp_path: Path) -> None:
    made = write_digits(tmp_path / "photos", (0, 1), 12)
    (made / "digit0").rename(made / "=1+1")
    (made / "digit1").rename(made / "@x")
    assert run(f"zeroforget learn {tmp_path}/garden {made} --task low --size 8 --gray --epochs 1")[1] == 0
    output, _ = run(f"zeroforget predict {tmp_path}/garden {made} --csv --task low")
    cells = [cell for row in csv.reader(io.StringIO(output)) for cell in row]
    assert "'=1+1" in cells
    assert not [cell for cell in cells if cell.startswith(("=", "@", "+", "-"))]
