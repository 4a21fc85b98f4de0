"""The docs' pictures and blocks: the figures of the results, in their places, and plain words where there are none."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fill_docs, pictures
from tests.experiments.helpers import results
from zeroforget.experiments import archive, overheads
from zeroforget.experiments.results import Results

SVG = "{http://www.w3.org/2000/svg}"


def runs(scenario: str = "digits/5") -> list[Results]:
    return [
        results("tfm", 0, [[0.96], [0.96, 0.9]], scenario),
        results("tfm", 1, [[0.94], [0.94, 0.92]], scenario),
        results("joint", 0, [[0.95], [0.99, 0.98]], scenario),
        results("finetuning", 0, [[0.97], [0.5, 0.91]], scenario),
    ]


def words(picture: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(picture).iter(f"{SVG}text")]


def dots(picture: str) -> list[tuple[float, float]]:
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in ET.fromstring(picture).iter(f"{SVG}circle")]


def test_averages_stand_best_first_and_further_right_the_better() -> None:
    picture = pictures.averages(runs())
    assert [word for word in words(picture) if word in ("TFM", "Joint", "Finetuning")] == ["Joint", "TFM", "Finetuning"]
    assert [word for word in words(picture) if re.fullmatch(r"[0-9.]+", word)] == ["98.5", "93.0", "70.5"]
    places = dots(picture)
    assert [x for x, _ in places] == sorted((x for x, _ in places), reverse=True)
    per_point = (places[0][0] - places[1][0]) / (98.5 - 93.0)
    assert (places[1][0] - places[2][0]) / (93.0 - 70.5) == pytest.approx(per_point, rel=0.01)
    assert "theirs" not in picture.split("</style>")[1]


def test_the_papers_figure_stands_beside_ours_where_it_has_one_for_as_many_tasks() -> None:
    ten = [[0.9] * t for t in range(1, 11)]
    like = [results(method, 0, ten, "tiny-imagenet/random") for method in ("tfm", "joint", "finetuning")]
    picture = pictures.averages(like)
    assert "the paper's figure" in words(picture)
    assert picture.split("</style>")[1].count('class="theirs"') == 4  # three methods and the legend
    assert "theirs" not in pictures.averages(runs("tiny-imagenet/random")).split("</style>")[1]  # of two tasks
    theirs = [fill_docs.headline([each]).splitlines()[-1].split(" | ")[3] for each in (like, runs(like[0].scenario))]
    assert theirs == ["56.0", "–"]  # of tab:tiny_imagenet_random


def test_courses_end_in_the_average_and_their_labels_do_not_overlap() -> None:
    close = [results(name, 0, [[0.9], [0.9, 0.9 + k / 1000]]) for k, name in enumerate(("tfm", "hat", "ewc", "lwf"))]
    picture = pictures.course(close)
    root = ET.fromstring(picture)
    labels = [t for t in root.iter(f"{SVG}text") if re.search(r" 90\.\d", t.text or "")]
    assert len(labels) == 4
    heights = sorted(float(label.attrib["y"]) for label in labels)
    assert all(b - a >= 15.9 for a, b in itertools.pairwise(heights))
    assert all(len((line.attrib["points"]).split()) == 2 for line in root.iter(f"{SVG}polyline"))


def test_a_method_that_waited_has_no_course() -> None:
    waiting = results("joint-scratch", 0, [[0.5], [0.9, 0.9]])
    waiting.logs[0]["stopped"] = "waits for task 2"
    picture = pictures.course([*runs(), waiting])
    assert not any("scratch" in word for word in words(picture))
    assert any("scratch" in word for word in words(pictures.averages([*runs(), waiting])))


def test_every_task_has_a_line_of_its_own_from_the_day_it_was_learned() -> None:
    picture = pictures.memory(runs())
    lines = [[tuple(map(float, p.split(","))) for p in each.attrib["points"].split()] for each in
             ET.fromstring(picture).iter(f"{SVG}polyline")]  # fmt: skip
    assert [len(each) for each in lines] == [2, 1, 2, 1]  # of two methods, the first task and the second
    (_, then), (_, now) = lines[2]
    assert now > then  # fine-tuning's first task falls, and y grows downwards
    assert "70.5 % on average after all 2 tasks" in words(picture)
    with pytest.raises(pictures.Lacking, match="lacks fine-tuning"):
        pictures.memory([run for run in runs() if run.method != "finetuning"])


def test_the_distance_is_that_of_the_best_of_both() -> None:
    picture = pictures.distance(runs())
    assert "5.5 points" in words(picture)
    with pytest.raises(pictures.Lacking, match="lacks joint training"):
        pictures.distance(runs()[:2])


def test_half_of_the_results_is_half_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results land one after another: what can be shown is shown, and the page says what is lacking."""
    monkeypatch.setattr(fill_docs, "ROOT", tmp_path)
    archive.save(runs()[:2], tmp_path / "results" / "some.json")
    page = "<!-- picture {} results/some.json -->\n<!-- end -->"
    assert "*No picture yet: `digits/5` lacks joint training.*" in fill_docs.filled(page.format("distance"))
    assert not fill_docs.drawn(page.format("distance"))
    assert "](pictures/some-averages.svg)" in fill_docs.filled(page.format("averages"))
    assert list(fill_docs.drawn(page.format("averages"))) == ["some-averages.svg"]


def test_the_headline_has_tfm_or_the_best_of_its_variants_and_what_it_lost() -> None:
    early, joint = results("tfm-early", 0, [[0.9], [0.85, 0.95]]), results("joint-scratch", 0, [[0.5], [0.96, 0.98]])
    late, plain = results("tfm-late", 0, [[0.9], [0.9, 0.8]]), results("tfm", 0, [[0.8], [0.8, 0.8]])
    packed = results("packnet", 0, [[0.6], [0.6, 0.8]])
    variants, named = fill_docs.headline([[early, late, packed, joint], [early, plain, joint]]).splitlines()[-2:]
    assert variants.endswith("| 90.0 | 5.0 | – | 70.0 | – | 97.0 |")
    assert named.endswith("| 80.0 | 0.0 | – | – | – | 97.0 |")


def test_what_is_kept_counts_the_network_what_stays_beside_it_and_the_tasks_that_did_not_move() -> None:
    still, moved = results("packnet", 0, [[0.8], [0.8, 0.9]]), results("lwf", 0, [[0.8], [0.7, 0.9]])
    still = replace(
        still,
        parameters=[1000, 2000],
        overhead=[{"training": 0, "inference": 0}, {"training": 80_000, "inference": 16_000}],
    )
    moved = replace(moved, unchanged=[False, True])
    rows = fill_docs.kept([moved, still, results("joint", 0, [[0.9], [0.9, 0.9]])]).splitlines()[2:]
    assert "| PackNet | 85.0 | 8.0 kB | 2.0 kB | 10.0 kB | 2 of 2 |" in rows
    assert [row.split(" | ")[-1] for row in rows if row.startswith("| LwF")] == ["1 of 2 |"]
    assert [row.split(" | ")[-2] for row in rows if row.startswith("| Joint")] == ["all images"]


def test_runs_of_another_experiment_stand_in_a_table_if_they_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_docs, "ROOT", tmp_path)
    base, changed = results("tfm", 0, [[0.8], [0.8, 0.9]]), results("fn-all", 0, [[0.7], [0.7, 0.9]])
    archive.save(
        [replace(base, experiment="first"), results("ewc", 0, [[0.6], [0.5, 0.7]])], tmp_path / "results/a.json"
    )
    archive.save([replace(changed, experiment="second")], tmp_path / "results/b.json")
    for block in ("table", "tuned", "picture averages"):
        page = f"<!-- {block} results/b.json --with=results/a.json:tfm -->\n<!-- end -->"
        made = fill_docs.filled(page)
        shown = made if "picture" not in block else " ".join(words(fill_docs.drawn(page)["b-averages.svg"]))
        assert "fn-all" in shown
        assert "TFM" in shown
        assert "EWC" not in shown
    archive.save([replace(changed, regime={"lr": 0.5})], tmp_path / "results/b.json")
    with pytest.raises(ValueError, match="was not run as"):
        fill_docs.filled(page)


def test_no_figure_where_there_are_no_results() -> None:
    blocks = ("table results/none.json --beside paper", "tuned results/none.json", "picture averages results/none.json")
    for block in blocks:
        page = f"before\n<!-- {block} -->\nan old figure 99.9\n<!-- end -->\nafter\n"
        made = fill_docs.filled(page)
        assert "*No results yet: `experiments/none.toml` was not run to the end.*" in made
        assert "99.9" not in made
        assert not fill_docs.drawn(page)
        assert fill_docs.filled(made) == made


def test_what_was_tuned_is_told() -> None:
    run = results("ewc", 0, [[0.9], [0.9, 0.9]])
    run.options.update(strength=1e5)
    trials = [{"name": f"value-{k}", "lr": 0.05, "value": 1e5 / 4**k, "accuracy": 0.9} for k in range(3)]
    found = {"lr": 0.05, "option": "strength", "value": 6250.0, "finetuning": 0.9, "trials": trials}
    run.logs[1]["notes"]["hyperparameters"] = found
    row = fill_docs.tuned([run]).splitlines()[-1]
    assert row.startswith("| EWC | strength 1e+05 | strength 6.25e+03 | 3 | 0 |")


@pytest.mark.parametrize("page", fill_docs.pages(), ids=lambda page: page.name)
def test_committed_pictures_are_those_of_the_committed_results(page: Path) -> None:
    for name, picture in fill_docs.drawn(page.read_text()).items():
        assert (fill_docs.ROOT / fill_docs.PICTURES / name).read_text() == picture, "run python -m benchmarks.fill_docs"


def test_overheads_are_drawn_as_they_are_counted() -> None:
    picture = pictures.overheads("lenet", 3)
    found = {cost.method: cost.training[-1] / 8 for cost in overheads.costs("lenet", 3, methods=pictures.OVERHEADS)}
    for title, method in (("EWC", "ewc"), ("TFM", "tfm")):
        assert f"{title} {float(f'{found[method]:.2g}') / 1e3:g} kB" in picture
    assert picture.count("<polyline") == len(pictures.OVERHEADS)


def test_a_narrow_scale_of_costs_has_marks_too() -> None:
    assert pictures._ticks(pictures.Scale(7.48, 7.58, 0, 100)) == [32e6, 34e6, 36e6, 38e6]
    assert pictures._ticks(pictures.Scale(6.1, 7.9, 0, 100)) == [2e6, 5e6, 1e7, 2e7, 5e7]
