"""`zeroforget methods`: what it prints of every method, of one, and of their overheads."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from zeroforget.cli import app
from zeroforget.cli.methods import describe
from zeroforget.methods import Method, Overhead, names


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["methods", *arguments], catch_exceptions=False, env={"COLUMNS": "100"})


def test_lists_every_method_with_its_claims_and_options() -> None:
    out = call().stdout
    for name in names():
        assert f"\n{name} " in out
    line = next(line for line in out.splitlines() if line.startswith("packnet"))
    assert line.split()[1:6] == ["mask-based", "no", "no", "no", "no"]
    assert "1 bit per parameter and task" in line
    assert "prune=0.5 retrain=0.1" in out
    assert "strength=5000" in out
    line = next(line for line in out.splitlines() if line.startswith("joint"))
    assert line.split()[2:4] == ["yes", "yes"]


def test_lists_as_json() -> None:
    found = {entry["name"]: entry for entry in json.loads(call("--json").stdout)}
    assert list(found) == names()
    assert found["imm-mean"]["options"]["merge"]["default"] == "mean"
    assert found["imm-mode"]["options"]["merge"]["default"] == "mode"
    assert found["piggyback"]["needs_backbone"] is True
    assert found["hat"]["tradeoff"] == "strength"


@pytest.mark.parametrize("name", names())
def test_every_option_of_every_method_is_explained(name: str) -> None:
    card = describe(name)
    assert card["about"].endswith((".", ")"))
    for option, about in card["options"].items():
        assert about["about"], f"{name}: {option}"
        assert about["type"]


def test_one_card() -> None:
    out = " ".join(call("packnet").stdout.split())
    assert "CVPR 2018" in out
    assert "prune=0.5" in out
    assert "share of its weights that a task gives back" in out
    assert "same bits for ever" in out
    card = json.loads(call("packnet", "--json").stdout)
    assert card["options"]["tasks"] == {
        "type": "int | None",
        "default": None,
        "about": "how many tasks will come: each gets an equal share of every layer; None: `prune` decides.",
    }


def test_a_method_of_someone_elses() -> None:
    assert json.loads(call("zeroforget.methods.hat:Hat", "--json").stdout)["family"] == "mask-based"


def test_a_misspelt_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'packnet'"):
        call("pacnet")


def test_the_papers_table_and_figure_for_alexnet() -> None:
    out = call("--overhead", "alexnet", "--tasks", "4").stdout
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line and not line.startswith(" ")}
    assert rows["packnet"][-4:] == ["7.1", "14.2", "21.4", "28.5"]  # the figure comes last
    table = next(line for line in out.splitlines() if line.startswith("packnet"))
    assert table.split()[-4:] == ["256.5", "28.5", "28.5", "27.3"]
    table = next(line for line in out.splitlines() if line.startswith("tfm "))
    assert table.split()[-4:] == ["0.2"] * 4
    assert "57,003,840 parameters" in out
    *_, figure = out.split("Figure 1:")
    assert figure.split("method")[1].split()[:4] == ["1", "2", "3", "4"]
    assert "finetuning" not in figure, "what keeps nothing has no line"


def test_overheads_as_json_for_one_method_and_another_shape() -> None:
    found = json.loads(call("hat", "--overhead", "lenet", "--tasks", "3", "--shape", "1,28,28", "--json").stdout)
    assert found["features"] == 226
    (cost,) = found["methods"]
    assert cost["inference"] == [32 * 226, 2 * 32 * 226, 3 * 32 * 226] == cost["published"] == cost["paper"]


class Silent(Method):
    """Keeps something, and has no words for it."""

    def overhead(self) -> Overhead:
        return Overhead(training=1)


def test_a_method_that_keeps_something_is_not_said_to_keep_nothing() -> None:
    assert "overhead: what its `overhead` counts" in call(f"{__name__}:Silent").stdout
    assert "overhead: none" in call("finetuning").stdout


def test_overheads_for_a_network_of_someone_elses() -> None:
    network = "zeroforget.nets.convnets:LeNet"
    found = json.loads(call("hat", "--overhead", network, "--tasks", "1", "--shape", "1,28,28", "--json").stdout)
    assert found["methods"][0]["inference"] == [32 * 226]
    with pytest.raises(ValueError, match="--shape 3,224,224"):
        call("--overhead", network)


@pytest.mark.parametrize("arguments", [("--overhead", "alexnot"), ("--overhead", "lenet", "--shape", "3")])
def test_mistakes_say_what_to_do(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"did you mean 'alexnet'|such as 3,224,224"):
        call(*arguments)
