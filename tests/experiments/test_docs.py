"""What docs/experiments.md and docs/own-method.md show works as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.results import load_runs
from zeroforget.methods.contract import Contract

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experiments.md").read_text()
METHOD = (ROOT / "docs" / "own-method.md").read_text()


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_example_file_is_valid_and_its_misspelling_is_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(blocks("toml")[0])
    assert [c.label for c in Experiment.load(file).methods] == ["finetuning", "ewc", "firm"]
    file.write_text(blocks("toml")[0].replace("strength = 1000.0", "strenght = 1000.0"))
    message = re.search(r"error: mine\.toml: (.*)", PAGE)
    assert message is not None
    with pytest.raises(ValueError, match=re.escape(message.group(1))):
        Experiment.load(file)


def test_the_search_and_the_reference_can_be_added(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(blocks("toml")))
    experiment = Experiment.load(file)
    assert experiment.search.enabled
    assert experiment.methods[-1].label == "alone"


def test_a_method_of_ones_own_runs_from_the_folder_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(blocks("python", METHOD)[0])
    (tmp_path / "mine.toml").write_text(blocks("toml", METHOD)[0])
    (line,) = [line for line in "".join(blocks("sh", METHOD)).splitlines() if line.startswith("zeroforget run ")]
    zeroforget = Path(sys.executable).with_name("zeroforget")
    command = [zeroforget, *line.split()[1:], "--set", "regime.epochs=2"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert "mine:Near on digits/5, seed 0" in told.stdout
    assert [run.method for run in load_runs([tmp_path / "runs" / "mine"])] == ["finetuning", "mine:Near", "tfm"]


def test_the_method_on_the_page_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "method_of_the_page.py").write_text(blocks("python", METHOD)[0])
    monkeypatch.syspath_prepend(tmp_path)
    Contract("method_of_the_page:Near").describes_itself()


def test_every_experiment_file_is_listed() -> None:
    for file in (ROOT / "experiments").glob("*.toml"):
        assert f"| `{file.name}` |" in PAGE
