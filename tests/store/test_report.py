"""The page of a model: what it says, that no name breaks it, and that a browser shows it without a network."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.experiments.report_browser import Browser, absent
from zeroforget.cli import app
from zeroforget.store import Model, ModelError, open_model
from zeroforget.store.confusions import noted, recorded, seen
from zeroforget.store.report import page

VOID = {"meta", "link", "img", "br"}


class Tags(HTMLParser):
    """Refuses a page whose tags do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID and tag not in {"rect", "line", "polyline"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"rect", "line", "polyline"}:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def made(trained: Path, data: Path) -> str:
    """The page of the trained model, with pictures for one of its tasks."""
    return page(open_model(trained), {"middle": data / "middle"}, command="zeroforget report garden")


def test_the_page_says_how_well_where_it_errs_and_what_it_cost(made: str, trained: Path) -> None:
    tags = Tags()
    tags.feed(made)
    assert not tags.open
    for facts in open_model(trained).tasks:
        low, high = (f"{100 * bound:.0f}" for bound in facts.interval)
        assert f"{100 * facts.accuracy:.1f} %</strong> of {facts.data.held_out} test pictures" in made
        assert f"{low} to {high} %" in made
        assert f"+{facts.bytes:,}" in made
    assert made.count("<h3>Confusion matrix</h3>") == 2
    assert made.count("<h3>Each class, the hardest first</h3>") == 2
    assert made.count('<li class="held">') == 3
    assert made.count("<polyline") == 6  # two losses and an accuracy of each task
    assert open_model(trained).head in made


def test_pictures_give_the_counts_that_were_written_down(trained: Path, data: Path) -> None:
    model = open_model(trained)
    for name in ("low", "middle"):
        facts = model.task(name)
        told = recorded(facts)
        assert told is not None
        again = seen(facts, model.dense(name), data / name)
        assert again.of_test_part
        assert (again.totals, again.wrong) == (told.totals, told.wrong)
        assert again.accuracy == pytest.approx(facts.accuracy)
        assert sum(again.totals) == facts.data.held_out


def test_the_surest_mistakes_are_shown_and_named(data: Path, trained: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    for place, other in (("digit0", "digit1"), ("digit1", "digit0")):
        shutil.copytree(data / "low" / other, wrong / place)  # every picture under the other class
    model = open_model(trained)
    found = seen(model.task("low"), model.dense("low"), wrong)
    assert not found.of_test_part
    assert found.accuracy < 0.5
    assert [one.sure for one in found.mistakes] == sorted((one.sure for one in found.mistakes), reverse=True)
    assert {one.file.parent.name for one in found.mistakes} <= {"digit0", "digit1"}
    assert all(one.file.parent.name == one.shows != one.taken_for for one in found.mistakes)
    text = page(model, {"low": wrong})
    assert text.count("data:image/jpeg;base64,") == len(found.mistakes)
    assert found.mistakes[0].file.name in text


def test_counts_are_right_answers_and_confusions() -> None:
    scores = torch.tensor([[2.0, 1, 0], [0, 2, 1], [0, 1, 2], [2, 0, 1], [0, 1, 2]])
    told = noted(scores, torch.tensor([0, 0, 1, 2, 1]), 3)
    assert told == {"pictures": [2, 2, 1], "wrong": [[1, 2, 2], [0, 1, 1], [2, 0, 1]]}


@pytest.mark.parametrize(
    "told",
    [
        None,
        {},
        {"pictures": [3], "wrong": []},
        {"pictures": [3, -1], "wrong": []},
        {"pictures": [3, 3], "wrong": [[0, 2, 1]]},
        {"pictures": [3, 3], "wrong": [[0, 1]]},
        {"pictures": [3, 3], "wrong": [[0, 1, 4]]},
        {"pictures": [3, 3], "wrong": [[0, 1, "<b>"]]},
    ],
)
def test_counts_that_cannot_be_are_not_believed(trained: Path, told: object) -> None:
    facts = open_model(trained).task("low")
    assert recorded(replace(facts, training={**facts.training, "test": told})) is None


def test_names_are_text(copied: Callable[[], Model], data: Path, tmp_path: Path) -> None:
    strange = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(copied().path, strange)
    text = page(open_model(strange))
    assert "<img src=x" not in text
    assert "&lt;img src=x" in text


def test_a_damaged_model_says_so_and_a_model_without_tasks_has_no_page(model: Model, tmp_path: Path) -> None:
    file = next(model.path.glob("tasks/001-*/probe.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert '<li class="moved">' in page(model)
    with pytest.raises(ModelError, match="no task 'lwo'"):
        page(model, {"lwo": tmp_path})


def test_the_command_writes_it_and_overwrites_only_its_own(trained: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    words = ["report", str(trained), "-o", str(out), "--data", f"low={data / 'low'}"]
    for _ in range(2):
        told = CliRunner().invoke(app, words, catch_exceptions=False)
        assert re.fullmatch(r"wrote .*\(2 tasks, [\d,]+ bytes\)\s*", told.output.replace("\n", " "))
    out.write_text("mine")
    assert isinstance(CliRunner().invoke(app, words).exception, ValueError)
    assert out.read_text() == "mine"
    figures = CliRunner().invoke(app, ["report", str(trained), "--figures", str(tmp_path)])
    assert "--figures are of runs" in str(figures.exception)


@pytest.mark.skipif(absent(), reason="needs chromium and chromedriver")
def test_a_browser_shows_it_in_light_and_dark_and_asks_nothing_of_a_network(made: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(made, encoding="utf-8")
    with Browser(tmp_path) as browser:
        browser.look(1280, 900, dark=False)
        browser.open(file)
        browser.wait("document.readyState === 'complete'")
        light = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert browser.run("return document.querySelectorAll('.matrix td[style]').length") > 0
        assert browser.run("return document.querySelectorAll('svg').length") == 3
        browser.look(390, 800, dark=True)
        browser.settle()
        assert browser.run("return getComputedStyle(document.body).backgroundColor") != light
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        assert not browser.log("browser")
        sent = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
        asked = [event["params"] for event in sent if event["method"] == "Network.requestWillBeSent"]
        ours = [each["request"]["url"] for each in asked if not each["documentURL"].startswith("chrome:")]
        assert all(url.startswith(("file:", "data:")) for url in ours)
