"""The report: what it says, that no name can break it, and that a browser draws all of it without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.experiments.report_browser import Browser, absent
from tests.experiments.report_runs import GROWN, run, study
from zeroforget._version import __version__
from zeroforget.cli import app
from zeroforget.experiments.report import grouping as gather
from zeroforget.experiments.report import page, write_report
from zeroforget.experiments.report.page import cost_table, in_bytes, in_time, results_table, swatch

NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
HOSTILE = '</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">'
VOID = {"meta", "link", "input", "br"}


class Words(HTMLParser):
    """The page's text outside scripts and styles; fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)


def words(html: str) -> str:
    parser = Words()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert not [name for name in parser.attributes if name.startswith("on")]
    return " ".join(" ".join(parser.words).split())


# What it says ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def html() -> str:
    return page(study(), command="zeroforget report runs/digits", made=NOON)


def test_the_header_says_what_was_run_and_proved(html: str) -> None:
    text = words(html)
    assert "digits/5 · lenet" in text
    assert "12 (2 seeds: 0, 1)" in text
    assert "zeroforget report runs/digits" in text
    assert f"2026-05-04 12:00 UTC, version {__version__}" in text
    assert (
        "Run by zeroforget run digits.toml Report by zeroforget report runs/digits Ran on python 3.11.2, torch" in text
    )
    assert (
        "PackNet, TFM w/o FN, TFM : after the last task, every logit of the 4 earlier tasks is unchanged to the last "
        "bit, in each of 2 seeds" in text
    )
    assert "Finetuning, Joint, EWC : the logits of every earlier task changed" in text


def test_only_what_an_interval_carries_is_bold_and_upper_bounds_do_not_compete(html: str) -> None:
    table = html[html.index("<tbody>") : html.index("</tbody>")]
    bold = [words(row + "</tr>") for row in table.removeprefix("<tbody>").split("</tr>") if "<b>" in row]
    averages = {e: sum(r.average for r in study() if r.method == e) / 2 for e in ("joint", "tfm")}
    assert averages["joint"] > averages["tfm"]
    assert not bold  # two seeds carry no difference, and joint is no contestant
    assert f"{100 * averages['tfm']:.1f}" in table


def test_the_page_is_small_and_holds_its_library_once(html: str) -> None:
    assert len(html.encode()) < 1_100_000
    assert html.count("window.vegaEmbed=") == 1


def test_nothing_on_the_page_has_an_address(html: str) -> None:
    outside = re.sub(r"<script.*?</script>", "", html, flags=re.S)
    assert "http" not in re.sub(r'<meta http-equiv="[^"]*" content="[^"]*">', "", outside)
    assert re.findall(r'(?:src|href)="(?!#|data:,)[^"]*"', outside) == []


def test_names_cannot_break_out() -> None:
    names = [HOSTILE, "a & b", "<!--", "é \u2028 ☃", "'\""]
    runs = [run(HOSTILE, names=names, growth={HOSTILE: [1, 2, 3, 4, 5], "b": [2, 3, 4, 5, 6]}, scenario="<s>")]
    made = page(runs, command=HOSTILE)
    assert HOSTILE in words(made)
    data = json.loads(made.split('id="report">')[1].split("</script>")[0])
    assert any(HOSTILE in chart["description"] for chart in data["charts"].values())


def test_several_experiments_stand_on_one_page() -> None:
    made = page([run("tfm", growth=GROWN), run("tfm", network="vgg"), run("ewc", scenario="cifar100/10")])
    text = words(made)
    assert "3 experiments" in text
    assert "digits/5 · vgg" in text
    ids = re.findall(r' id="([^"]+)"', re.sub(r"<script(?! type=.application).*?</script>", "", made, flags=re.S))
    assert len(ids) == len(set(ids))


def table_rows(html: str) -> list[list[str]]:
    """The cells of a table's body, as text."""
    rows = html[html.index("<tbody>") : html.index("</tbody>")].split("<tr>")[1:]
    return [[words(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_tables_tell_what_was_lost_and_what_it_cost() -> None:
    made = run("ewc", tasks=3, bits=(0, 8000), forgets=0.1), run("ewc", tasks=3, seed=1, bits=(0, 8000), forgets=0.1)
    for each, factor in zip(made, (1, 3), strict=True):
        each.accuracy[:] = [[0.9], [0.7, 0.8], [0.5, 0.8, 0.6]]
        each.overhead[0]["training"] = 16_000 * factor  # more than later on
        each.parameters[:] = [100, 200, 1000 * factor]
        each.seconds[:] = [1.0, 70.0, 29.0]
        for log in each.logs:
            log["epochs"] = log["epochs"][:4]
    made[0].unchanged[:] = [False, True, True]
    (group,) = gather.groups(made)
    (figures,) = table_rows(results_table(group, ["EWC"]))
    assert figures == ["EWC", "50.0 ± 0.0 (-40.0)", "80.0 ± 0.0 (0.0)", "60.0 ± 0.0 (0.0)", "63.3 ± 0.0"]
    (cost,) = table_rows(cost_table(group, ["EWC"]))
    assert cost == ["EWC", "1 of 4", "2,000", "3 kB", "4 kB", "12", "1 min 40 s"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "none"),
        (0.5, "0.5 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1e3, "1 kB"),
        (1234567.0, "1.23 MB"),
        (1e9, "1 GB"),
        (2.5e14, "250 TB"),
    ],
)
def test_bytes_have_the_unit_that_reads_best(size: float, text: str) -> None:
    assert in_bytes(size) == text


def test_times_have_the_units_that_read_best() -> None:
    times = [in_time(seconds) for seconds in (0.04, 59.94, 59.96, 61.4, 3599.6, 3725.0)]
    assert times == ["0.0 s", "59.9 s", "1 min 0 s", "1 min 1 s", "1 h 0 min", "1 h 2 min"]


def test_what_moved_is_counted_and_what_held_comes_first() -> None:
    part, none, held = run("ewc", forgets=0.1), run("finetuning", forgets=0.1), run("tfm")
    part.unchanged[:] = [True, False, True, True, True]
    part.environment["command"] = "zeroforget run again.toml"
    text = words(page([part, none, held]))
    told = ["TFM : after the last task", "EWC : logits changed in 1 of 4 checks", "Finetuning : the logits of every"]
    assert sorted(told, key=text.index)[0] == told[0]
    assert "Run by zeroforget run digits.toml Run by zeroforget run again.toml" in text


def test_every_chart_has_the_figures_of_its_own_task_and_method() -> None:
    runs = [
        run("ewc", tasks=2, forgets=0.2, bits=(64, 0)),
        run("tfm", tasks=2, bits=(8, 8), growth={"a": [1, 2], "b": [3, 5]}),
    ]
    made = page(runs)
    data = json.loads(made.split('id="report">')[1].split("</script>")[0])
    charts = {chart["description"]: chart["data"] for chart in data["charts"].values()}

    def values(begin: str) -> list[float]:
        (found,) = [data for said, data in charts.items() if said.startswith(begin)]
        return [float(value) for value in found["value"]]

    def rounded(*figures: float) -> list[float]:
        return [pytest.approx(100 * figure, rel=1e-4) for figure in figures]

    ewc, tfm = runs
    (overall,) = [said for said in charts if "average accuracy" in said]
    assert f"At the end: EWC {100 * ewc.average:.1f} %; TFM {100 * tfm.average:.1f} %" in overall
    for k in range(2):
        seen = [each.accuracy[t][k] for each in runs for t in range(k, 2)]
        assert values(f"Line chart: accuracy on task {k + 1}") == rounded(*seen)
        epochs = [epoch["val_accuracy"] for each in runs for epoch in each.logs[k]["epochs"]]
        assert values(f"Line chart: validation accuracy (%) over the epochs of task {k + 1}") == rounded(*epochs)
    for each, label in ((ewc, "EWC"), (tfm, "TFM")):
        assert values(f"Heat map: accuracy of {label}") == rounded(*(cell for row in each.accuracy for cell in row))
    assert values("Line chart in log scale: memory kept beside the network to serve every task") == [1.0, 2.0]
    assert "No overhead, so not drawn: EWC." in words(made)
    assert made.count(f"{swatch(1)} TFM<") == 2  # in either table, as in the charts
    added = table_rows(made[made.index('aria-label="Growth of TFM"') :])
    assert [row[1:] for row in added] == [["4", "3", "4"], ["3", "7", "7"]]


def test_a_method_that_waits_for_later_tasks_has_no_figures_before() -> None:
    """What an untrained network answers is no result, and would squeeze all others into the top of a chart."""
    waits, tfm = run("joint", tasks=3), run("tfm", tasks=3)
    for t in range(2):
        waits.logs[t] |= {"epochs": [], "best": -1, "stopped": "waits for task 3"}
        waits.accuracy[t][:] = [0.05] * (t + 1)
    (group,) = gather.groups([waits, tfm])
    joint, other = group.entries
    assert [(row["method"], row["after"]) for row in gather.averages(group)] == [
        ("Joint", 3), ("TFM", 1), ("TFM", 2), ("TFM", 3),
    ]  # fmt: skip
    assert [row["after"] for row in gather.of_task(group, 1) if row["method"] == "Joint"] == [3]
    assert [(row["t"], row["k"]) for row in gather.matrix(group, joint)] == [(3, 1), (3, 2), (3, 3)]
    assert len(gather.matrix(group, other)) == 6
    told = "Drawn from where its training begins, for it waits for later tasks: Joint."
    assert told in words(page([waits, tfm]))
    assert "for it waits" not in words(page([tfm]))


def test_a_single_task_has_nothing_to_prove() -> None:
    assert "TFM : not checked" in words(page([run("tfm", tasks=1)]))


def test_seeds_that_a_method_lacks_are_told() -> None:
    told = words(page([run("tfm"), run("tfm", seed=1), run("ewc")]))
    assert "(mean over seeds ± one standard deviation)" in told
    assert "Not every method has a finished run with each seed (0, 1): EWC lacks 1." in told


def test_a_report_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one finished run"):
        page([])


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_reads_folders_and_writes_page_and_figures(tmp_path: Path) -> None:
    for results in (run("tfm", tasks=2), run("ewc", tasks=2)):
        results.save(tmp_path / "runs" / results.method)
    out, folder = tmp_path / "made" / "report.html", tmp_path / "figures"
    arguments = ["report", str(tmp_path / "runs"), "-o", str(out), "--figures", str(folder), "--format", "svg, pdf"]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    assert "2 runs" in answer.output
    assert "EWC" in words(out.read_text())
    assert {path.suffix for path in folder.iterdir()} == {".svg", ".pdf"}


def test_the_command_refuses_a_format_before_it_works(tmp_path: Path) -> None:
    run("tfm", tasks=2).save(tmp_path / "run")
    out = tmp_path / "report.html"
    answer = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(out), "--figures", "f", "--format", "gif"])
    assert isinstance(answer.exception, ValueError)
    assert not out.exists()


# In a browser ----------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(absent(), reason="Chromium and chromedriver are not installed")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a small study, as a file."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([r for r in study() if r.method != "packnet"], path, made=NOON)
    return path


def show(browser: Browser, path: Path, width: int = 1280) -> None:
    browser.look(width, 900, dark=False)
    for kind in ("browser", "performance"):
        browser.log(kind)
    browser.open(path)
    browser.wait("document.body.dataset.ready === 'yes'")


def requests(browser: Browser) -> list[str]:
    """Those of our pages: a browser that has just started looks for icons of pages of its own."""
    sent = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    asked = [event["params"] for event in sent if event["method"] == "Network.requestWillBeSent"]
    return [each["request"]["url"] for each in asked if not each["documentURL"].startswith("chrome:")]


@needs_browser
def test_every_chart_is_drawn_and_nothing_is_fetched(browser: Browser, plain: Path) -> None:
    show(browser, plain)
    charts = browser.run(
        """return [...document.querySelectorAll('.chart')].map((box) => {
          const svg = box.querySelector('svg');
          const marks = svg.querySelectorAll('.mark-line path, .mark-rect path, .mark-symbol path');
          const size = svg.getBoundingClientRect();
          return [box.dataset.drawn, marks.length, size.width, size.height, box.getAttribute('aria-label') ?? '',
                  svg.textContent.length];
        })"""
    )
    assert len(charts) == 1 + 5 + 5 + 2 + 1 + 5
    for drawn, marks, width, height, name, text in charts:
        assert drawn == "yes"
        assert marks > 3
        assert width > 150
        assert height > 60
        assert len(name) > 20
        assert text > 10
    assert [entry["message"] for entry in browser.log("browser")] == []
    assert requests(browser) == [plain.as_uri()]


@needs_browser
def test_the_page_itself_forbids_requests(browser: Browser, plain: Path) -> None:
    show(browser, plain)
    browser.run("new Image().src = 'http://127.0.0.1:9/spy.png'")
    said = " ".join(entry["message"] for entry in browser.log("browser"))
    assert "spy.png" in said
    assert "Content Security Policy" in said


@needs_browser
def test_the_page_never_scrolls_sideways(browser: Browser, tmp_path: Path) -> None:
    names = ["a task with a rather long name, as people give", "x" * 60, "c", "d", "e"]
    wide = {f"layer{i}.conv": [10, 11, 12, 13, 14] for i in range(30)}
    write_report([run("tfm", names=names, growth=wide), run("m" * 50, names=names)], tmp_path / "wide.html")
    for width in (320, 390, 1280):
        show(browser, tmp_path / "wide.html", width)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        beyond = browser.run(
            """return [...document.querySelectorAll('.chart svg')]
              .filter((svg) => svg.getBoundingClientRect().right > innerWidth + 1).length"""
        )
        assert beyond == 0


@needs_browser
def test_dark_mode_changes_page_and_charts_while_it_is_open(browser: Browser, plain: Path) -> None:
    show(browser, plain)
    colours = """
      const line = document.querySelector('.mark-line path');
      return [getComputedStyle(document.body).backgroundColor, getComputedStyle(line).stroke]"""
    light = browser.run(colours)
    browser.look(1280, 900, dark=True)
    browser.wait(f"getComputedStyle(document.body).backgroundColor !== '{light[0]}'")
    browser.settle()  # the page hears of the theme after its style has changed, and draws anew
    browser.wait("document.body.dataset.ready === 'yes'")
    dark = browser.run(colours)
    assert light == ["rgb(255, 255, 255)", "rgb(49, 110, 164)"]
    assert dark == ["rgb(21, 24, 29)", "rgb(110, 175, 245)"]


@needs_browser
def test_a_method_is_hidden_and_a_curve_chosen_by_keyboard(browser: Browser, plain: Path) -> None:
    show(browser, plain)
    lines = "return document.querySelector('.chart').querySelectorAll('.mark-line path').length"
    assert browser.run(lines) == 5
    browser.run("document.querySelector('.key button').focus()")
    browser.press("\ue00d")  # space
    browser.wait("document.body.dataset.ready === 'yes'")
    assert browser.run(lines) == 4
    assert browser.run("return document.querySelector('.key button').getAttribute('aria-pressed')") == "false"
    browser.run("document.querySelector('input[data-quantity]').focus()")
    browser.press("\ue014")  # right arrow
    browser.wait("document.body.dataset.ready === 'yes'")
    label = "return document.querySelector('[data-curves]').getAttribute('aria-label')"
    assert browser.run(label).startswith("Line chart: validation loss")
    assert browser.log("browser") == []


@needs_browser
def test_changes_one_upon_the_other_end_in_the_last_one(browser: Browser, plain: Path) -> None:
    show(browser, plain)
    browser.run("for (let i = 0; i < 5; i++) document.querySelector('.key button').click()")
    browser.wait("document.body.dataset.ready === 'yes'")
    each = "return [...document.querySelectorAll('.chart')].map((one) => one.querySelectorAll('svg').length)"
    assert set(browser.run(each)) == {1}
    assert browser.run("return document.querySelector('.chart').querySelectorAll('.mark-line path').length") == 4
    assert browser.log("browser") == []


@needs_browser
def test_all_that_scrolls_or_acts_is_reached_by_tab(browser: Browser, plain: Path) -> None:
    show(browser, plain, 390)
    unreachable = browser.run(
        """return [...document.querySelectorAll('main *')].filter((node) =>
          node.scrollWidth > node.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(node).overflowX)
          && node.tabIndex < 0 && !node.querySelector('button')).map((node) => node.className)"""
    )
    assert unreachable == []
    browser.press("\ue004")  # tab
    assert browser.run("return document.activeElement.textContent") == "Skip to the results"


@needs_browser
def test_a_point_tells_its_figures(browser: Browser, plain: Path) -> None:
    show(browser, plain)
    browser.run("document.querySelector('.chart').scrollIntoView({block: 'center'})")
    browser.settle()  # scrolling hides what is shown
    x, y = browser.run(
        """const at = document.querySelector('.mark-symbol path').getBoundingClientRect();
           return [at.x + at.width / 2, at.y + at.height / 2]"""
    )
    browser.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.wait("!document.getElementById('tip').hidden")
    assert "accuracy (%)" in browser.run("return document.getElementById('tip').textContent")


@needs_browser
def test_names_do_not_become_code(browser: Browser, tmp_path: Path) -> None:
    runs = [run(HOSTILE, names=[HOSTILE, "</svg>", "<!--", "d", "e"], growth=GROWN)]
    write_report(runs, tmp_path / "report.html")
    show(browser, tmp_path / "report.html")
    assert browser.run("return [window.broken ?? null, document.querySelectorAll('img').length]") == [None, 0]
    assert browser.run("return document.querySelector('.key button').textContent") == HOSTILE
    assert browser.log("browser") == []
