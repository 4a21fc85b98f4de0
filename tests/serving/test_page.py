"""The page in headless Chromium: a picture is chosen, the answer read, and a new task appears."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.report_browser import Browser, absent
from tests.serving.helpers import Running
from tests.store.helpers import learn_more
from zeroforget.serving.gate import new_key
from zeroforget.store import open_model

pytestmark = pytest.mark.skipif(absent(), reason="Chromium and chromedriver are not installed")


class Visitor(Browser):
    """A browser at a server's page."""

    def go(self, running: Running) -> None:
        self._ask("POST", "/url", {"url": f"http://127.0.0.1:{running.port}/"})

    def visit(self, running: Running) -> None:
        self.go(running)
        self.wait("document.querySelectorAll('#tasks h3').length > 0")

    def choose(self, picture: Path) -> None:
        found = self._ask("POST", "/element", {"using": "css selector", "value": "#file"})
        self._ask("POST", f"/element/{next(iter(found.values()))}/value", {"text": str(picture)})

    def pick(self, task: str) -> None:
        self.run(f"const s = document.getElementById('task'); s.value = {json.dumps(task)}; s.onchange()")

    def answer(self) -> dict[str, Any]:
        """What the page says of the picture: the best class, and the bars."""
        self.wait("document.querySelector('#answer .best') && !document.querySelector('#answer[aria-busy]')")
        found: dict[str, Any] = self.run(
            "return {best: document.querySelector('#answer .best').textContent, "
            "bars: [...document.querySelectorAll('#answer .bars')].map(list => [...list.children].map(row => "
            "[row.children[0].textContent, row.children[1].textContent, row.querySelector('.fill').style.width]))}"
        )
        return found


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    with Visitor(tmp_path_factory.mktemp("visitor")) as browser:
        browser.look(1280, 900, dark=False)
        yield browser


def requests(visitor: Visitor) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in visitor.log("performance")]
    return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


def test_a_picture_is_chosen_the_answer_read_and_a_new_task_appears(visitor: Visitor, garden: Path, data: Path) -> None:
    picture, model = data / "middle" / "digit3" / "004.png", open_model(garden)
    with Running(garden) as running:
        requests(visitor)
        visitor.visit(running)
        visitor.pick("middle")
        visitor.choose(picture)
        said, expected = visitor.answer(), model.predict(picture, "middle", top=10)[0]
        assert said["best"] == expected.label
        assert [row[:2] for row in said["bars"][0]] == [[name, f"{100 * p:.1f} %"] for name, p in expected.classes]
        assert float(said["bars"][0][0][2].rstrip("%")) == pytest.approx(100 * expected.classes[0][1], abs=0.01)
        visitor.wait("[...document.querySelectorAll('.mark')].every(one => one.textContent == '✓ verifies')")
        assert visitor.run("return document.querySelectorAll('.proofs .good').length") == 3
        low, high = (f"{100 * bound:.0f}" for bound in model.tasks[0].interval)
        card = visitor.run("return document.querySelector('.task').textContent")
        assert f"of test pictures right (95 % interval: {low} to {high} %)" in card

        visitor.pick("")
        visitor.wait("document.querySelectorAll('#answer .bars').length == 2")
        guessed = model.predict(picture)[0]
        assert [row[0] for row in visitor.answer()["bars"][1]] == [name for name, _ in guessed.tasks]

        learn_more(model, data, "high")
        visitor.wait("document.querySelector('#task option[value=high]')")
        assert visitor.run("return document.querySelector('.task.new h3').textContent") == "high"
        visitor.pick("high")
        visitor.wait("document.querySelector('#answer .best').textContent.match(/digit[89]/)")
        assert visitor.answer()["best"] == model.predict(picture, "high")[0].label
        assert {url.split("/")[2] for url in requests(visitor) if url.startswith("http")} == {
            f"127.0.0.1:{running.port}"
        }
        assert not [entry for entry in visitor.log("browser") if entry["level"] == "SEVERE"]


def test_a_server_with_keys_asks_for_one_and_keeps_it_for_the_tab(
    visitor: Visitor, trained: Path, data: Path, tmp_path: Path
) -> None:
    picture = data / "low" / "digit1" / "002.png"
    file = tmp_path / "keys"
    key = new_key(file, "anna")
    shown = "!document.getElementById('locked').hidden"
    typed = "const k = document.getElementById('key'); k.value = {}; document.getElementById('open').click()"
    with Running(trained, key_file=file) as running:
        visitor.go(running)
        visitor.wait(shown)
        visitor.wait("document.getElementById('why').textContent.includes('until this tab is closed')")
        for wrong, told in (("nonsense", "opens nothing here"), ("\u0431", "one word of plain letters")):
            visitor.run(typed.format(json.dumps(wrong)))
            visitor.wait(f"document.getElementById('why').textContent.includes('{told}')")
        visitor.run(typed.format(json.dumps(key)))
        visitor.wait("document.querySelectorAll('#tasks h3').length == 2 && document.getElementById('locked').hidden")
        visitor.pick("low")
        visitor.choose(picture)
        assert visitor.answer()["best"] == open_model(trained).predict(picture, "low")[0].label
        visitor.visit(running)  # the same tab, loaded again
        assert not visitor.run(f"return {shown}")
        assert key not in visitor.run("return document.documentElement.outerHTML + document.cookie + location.href")


def test_what_is_no_picture_is_told(visitor: Visitor, running: Running, tmp_path: Path) -> None:
    (tmp_path / "not.png").write_bytes(b"no picture")
    visitor.visit(running)
    visitor.choose(tmp_path / "not.png")
    visitor.wait("document.querySelector('#answer .bad')")
    said = visitor.run("return document.querySelector('#answer .bad').textContent")
    assert said == "The upload is no picture of a format that is read here"


def test_the_keyboard_reaches_everything_and_everything_has_a_name(visitor: Visitor, running: Running) -> None:
    visitor.visit(running)
    reached = []
    for _ in range(4):
        visitor.press("\ue004")
        reached.append(visitor.run("return document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["file", "task", "SUMMARY", "SUMMARY"]
    visitor.run("before = ''; document.querySelector('.task').focusedBefore = true; return look()")  # shown anew
    assert visitor.run("return document.querySelector('.task').focusedBefore ?? null") is None
    focused = "return document.activeElement.closest('.task')?.querySelector('h3').textContent"
    assert visitor.run(focused) == "middle"
    tree = visitor.devtools("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in tree if node["role"]["value"] in {"combobox", "button", "DisclosureTriangle"}]
    assert len(controls) >= 4
    assert all(node["name"]["value"].strip() for node in controls)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it_in_light_and_dark(visitor: Visitor, running: Running, data: Path, dark: bool) -> None:
    visitor.look(390, 844, dark=dark)
    visitor.visit(running)
    visitor.choose(data / "low" / "digit0" / "001.png")
    visitor.answer()
    assert visitor.run("return document.documentElement.scrollWidth") <= 390
    paper, ink = (
        [int(part) for part in visitor.run(f"return getComputedStyle(document.body).{name}.match(/\\d+/g)")[:3]]
        for name in ("backgroundColor", "color")
    )
    assert (sum(paper) < sum(ink)) == dark
    visitor.look(1280, 900, dark=False)
