"""`zeroforget networks`: the table, its footnotes and its JSON."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from zeroforget.cli.app import app
from zeroforget.cli.methods import networks, parse_shape


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [networks.__name__, *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def line(output: str, name: str) -> list[str]:
    return next(row.split() for row in output.splitlines() if row.startswith(name))


def test_table_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = run()
    assert max(map(len, output.splitlines())) <= 80
    alexnet = "alexnet² 3×224×224 57,003,840 9,344 7.1 MB 2.3 kB 54,547,712 9,344"
    lenet = "lenet¹ 1×32×32 60,856 226 7.6 kB 57 B 59,956 226"
    resnet18 = "resnet18 3×224×224 11,176,512 3,904 1.4 MB 976 B"
    for row in (alexnet, lenet, resnet18):
        assert line(output, row.split()[0]) == row.split()
    assert line(output, "vgg16³")[-2:] == line(output, "vgg16-tiny³")[-2:] == ["119,579,904", "10,880"]


def test_footnotes_say_why_the_papers_figures_differ() -> None:
    _, *notes = re.split(r" [¹²³⁴] ", " ".join(run().split()))
    expected = ["original of 1998", "k²·out + out", "features those of vgg16-tiny", "No rule we know"]
    assert [words in note for words, note in zip(expected, notes, strict=True)] == [True] * 4


def test_json() -> None:
    rows = {row["name"]: row for row in json.loads(run("--json"))}
    assert rows["vgg16"]["weights"] == 134_260_544
    assert rows["vgg16"]["paper"]["weights_by_its_rule"] == rows["vgg16"]["paper"]["weights"] == 119_579_904
    assert rows["resnet50"]["paper"]["weights_by_its_rule"] is None
    assert rows["small"] == {
        "name": "small",
        "shape": [1, 8, 8],
        "weights": 13_056,
        "features": 112,
        "weight_mask_bytes": 1_632,
        "feature_mask_bytes": 28,
    }


def test_a_shape_too_small_for_one_network_leaves_the_others() -> None:
    output = run("--shape", "3,32,32")
    assert line(output, "alexnet²")[1:6] == ["3×32×32³", "–", "–", "–", "–"]
    assert "alexnet needs images of at least 63×63" in " ".join(output.split())
    assert line(output, "vgg16⁴")[2] == "33,597,248"
    rows = {row["name"]: row for row in json.loads(run("--shape", "3,32,32", "--json"))}
    alexnet = rows["alexnet"]
    assert "weights" not in alexnet
    assert "63×63" in alexnet["error"]


def test_shape() -> None:
    assert parse_shape("3,224,112") == (3, 224, 112)
    for wrong in ("3,224", "a,b,c", "3,0,4", "", "1,2,3,4"):
        with pytest.raises(ValueError, match="such as 3,224,224"):
            parse_shape(wrong)
