"""The charts and what they show: descriptions that compile, colours that can be told apart, figures that are files."""

from __future__ import annotations

import io
import itertools
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.experiments.helpers import results
from tests.experiments.report_runs import GROWN, run, study
from zeroforget.experiments.report import charts, figures, write_figures
from zeroforget.experiments.report import grouping as gather
from zeroforget.experiments.report.growth import Drawing, Growth
from zeroforget.experiments.report.theme import METHODS_DARK, METHODS_LIGHT, resolve, theme

Colour = NDArray[np.float64]

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def linear(colour: str) -> Colour:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted(float(np.dot([0.2126, 0.7152, 0.0722], colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(colour: Colour) -> Colour:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(colour, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(np.maximum(xyz, 1e-9)), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Colours ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("hues", [METHODS_LIGHT, METHODS_DARK], ids=["light", "dark"])
def test_methods_are_told_apart_by_every_eye(hues: Sequence[str], sight: str) -> None:
    seen = [lab(SIGHT[sight] @ linear(hue)) for hue in hues]
    nearest = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))
    assert nearest > 15


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_lines_stand_out_from_the_paper(dark: bool) -> None:
    values = theme(dark=dark, births=10)
    for ground in ("paper", "panel"):
        for name in ("ink", "muted", "link", "good", "bad"):
            assert contrast(linear(values[name]), linear(values[ground])) >= 4.5, name
    for i in range(8):
        assert contrast(linear(values[f"method-{i}"]), linear(values["paper"])) >= 3
    assert all(contrast(linear(values[f"birth-{i}"]), linear(values["paper"])) >= 2 for i in range(10))


@pytest.mark.parametrize("dark", [False, True])
def test_figures_on_a_heat_map_are_readable_at_every_value(dark: bool) -> None:
    values = theme(dark=dark)
    stops = [np.array([int(values[f"heat-{i}"][j : j + 2], 16) for j in (1, 3, 5)]) for i in range(4)]
    for percent in range(101):
        place = min(percent / 100 * 3, 2.999)
        mixed = stops[int(place)] + (place % 1) * (stops[int(place) + 1] - stops[int(place)])
        cell = linear("#" + "".join(f"{round(float(part)):02x}" for part in mixed))
        ink = values["heat-ink-high" if percent > charts.HEAT_TURN else "heat-ink-low"]
        assert contrast(cell, linear(ink)) >= 4.4, percent


def test_a_method_keeps_its_colour_in_every_chart() -> None:
    style = charts.Style(("ewc", "tfm"))
    specs = [charts.described(charts.accuracy(style, 5, 0.0)), charts.described(charts.curves(style, "loss", 0.0))]
    scales = [layer["encoding"]["color"]["scale"] for spec in specs for layer in spec["layer"]]
    assert all(scale == scales[0] for scale in scales)
    assert resolve(scales[0], theme())["range"] == list(METHODS_LIGHT[:2])


def test_hues_that_repeat_differ_in_dashes_and_shapes() -> None:
    style = charts.Style(tuple(f"method {i}" for i in range(20)))
    shown = [style.method(channel).to_dict()["scale"]["range"] for channel in ("color", "shape", "strokeDash")]
    looks = zip(*shown, strict=True)
    assert len({str(look) for look in looks}) == 20


# What is drawn ---------------------------------------------------------------------------------------------------


def test_runs_of_one_method_with_other_options_are_told_apart() -> None:
    runs = [run("ewc", options={"strength": s, "alpha": 1}, seed=seed) for s in (10, 100) for seed in (0, 1)]
    (group,) = gather.groups([*runs, run("mine")])
    assert [entry.label for entry in group.entries] == ["EWC (strength=10)", "EWC (strength=100)", "mine"]
    assert [entry.seeds for entry in group.entries] == [[0, 1], [0, 1], [0]]


def test_experiments_do_not_mix() -> None:
    found = gather.groups([run("tfm"), run("tfm", network="vgg"), run("tfm", scenario="cifar100/10", tasks=3)])
    assert [(group.scenario, group.network) for group in found] == [
        ("digits/5", "lenet"),
        ("digits/5", "vgg"),
        ("cifar100/10", "lenet"),
    ]


def test_other_tasks_of_one_name_do_not_mix_either() -> None:
    found = gather.groups([run("tfm", tasks=2, names=["a", "b"]), run("ewc", tasks=2, names=["a", "c"])])
    assert [group.tasks for group in found] == [["a", "b"], ["a", "c"]]


def test_experiments_of_one_scenario_and_regimes_of_one_method_are_told_apart() -> None:
    one = run("tfm")
    found = gather.groups([one, replace(one, experiment="again")])
    assert [len(group.runs) for group in found] == [1, 1]
    (group,) = gather.groups([one, replace(one, regime=one.regime | {"lr": 0.1})])
    assert [entry.label for entry in group.entries] == ["TFM (regime.lr=0.05)", "TFM (regime.lr=0.1)"]


def seeds() -> gather.Group:
    """Two seeds of one method, the later one first and one of them named twice."""
    zero = results("ewc", 0, [[0.9], [0.6, 0.8], [0.3, 0.4, 0.7]])
    one = results("ewc", 1, [[0.7], [0.6, 0.6], [0.1, 0.2, 0.5]])
    (group,) = gather.groups([replace(one, parameters=[10, 20, 30]), zero, zero])
    return group


def test_rows_are_the_figures_of_the_matrix_averaged_over_seeds() -> None:
    group = seeds()
    (entry,) = group.entries
    assert entry.seeds == [0, 1]
    for k, values in enumerate(([80, 60, 20], [70, 30], [60])):
        rows = gather.of_task(group, k)
        assert [row["value"] for row in rows] == pytest.approx(values)
        assert [(row["after"], row["name"]) for row in rows] == [(t + 1, f"t{t + 1}") for t in range(k, 3)]
    cells = {(row["t"], row["k"]): row["value"] for row in gather.matrix(group, entry)}
    assert cells == pytest.approx({(1, 1): 80, (2, 1): 60, (2, 2): 70, (3, 1): 20, (3, 2): 30, (3, 3): 60})
    spread = 10 * 2**0.5  # of 0.9 and 0.7
    first = gather.averages(group)[0]
    assert (first["low"], first["value"], first["high"]) == pytest.approx((80 - spread, 80, 80 + spread))
    assert gather.lowest([[first], [{"value": 75.0}]]) == pytest.approx(80 - spread)
    assert gather.network_bytes(group) == 4 * 30


def test_proofs_are_of_earlier_tasks() -> None:
    group = seeds()
    group.entries[0].runs[0].unchanged[:] = [False, True, True]
    assert gather.proof(group.entries[0]) == (3, 4)


def test_averages_over_seeds() -> None:
    runs = [run("ewc", seed=seed, forgets=0.1) for seed in range(3)]
    (group,) = gather.groups(runs)
    last = gather.averages(group)[-1]
    values = [100 * r.average for r in runs]
    assert last["value"] == pytest.approx(np.mean(values))
    assert last["high"] - last["value"] == pytest.approx(np.std(values, ddof=1))
    assert last["after"] == 5


def test_no_overhead_has_no_place_on_a_logarithm() -> None:
    (group,) = gather.groups([run("finetuning"), run("ewc", bits=(64, 0))])
    assert gather.overheads(group, "inference") == []
    assert [row["value"] for row in gather.overheads(group, "training")] == [8.0, 16.0, 24.0, 32.0, 40.0]


def test_long_curves_are_thinned_but_keep_their_best_epoch() -> None:
    (group,) = gather.groups([run("tfm", length=500)])
    rows = gather.curves(group, 0, "val_loss")
    assert len(rows) <= gather.POINTS_PER_CURVE + 2
    log = group.runs[0].logs[0]
    assert [row["epoch"] - 1 for row in rows if row["kept"]] == [log["best"]]
    assert rows[-1]["epoch"] == len(log["epochs"])
    assert gather.curves(group, 0, "val_accuracy")[0]["value"] == 100 * log["epochs"][0]["val_accuracy"]


def test_infinite_losses_are_left_out() -> None:
    one = run("tfm")
    one.logs[0]["epochs"][3]["val_loss"] = float("inf")
    (group,) = gather.groups([one])
    assert len(gather.curves(group, 0, "val_loss")) == len(one.logs[0]["epochs"]) - 1


# Growth ----------------------------------------------------------------------------------------------------------


def test_growth_counts_what_the_papers_appendix_counts() -> None:
    """Figure S1: 8 features with 12 connections, then 5 with 24 new ones, then 5 with 36."""
    growth = Growth({"one": [2, 4, 6], "two": [6, 9, 12]}, ["1", "2", "3"])
    assert [growth.features(t) for t in range(3)] == [8, 5, 5]
    assert [growth.connections(t) for t in range(3)] == [12, 24, 36]


def test_small_layers_are_drawn_feature_by_feature() -> None:
    drawing = Drawing(Growth({"one": [2, 4, 6], "two": [6, 9, 12]}, ["1", "2", "3"]), "g")
    lines = [re.search(rf'id="gl{t}" d="([^"]*)"', drawing.panel(t)) for t in range(3)]
    assert [found[1].count("M") for found in lines if found] == [12, 24, 36]
    last = ET.fromstring(f"<svg>{drawing.panel(2)}</svg>")
    assert len(last.findall(".//g[@id='gd2']/circle")) == 5
    assert last.findall(".//g[@class='g-later']/circle") == []


def test_wide_layers_show_every_birth() -> None:
    growth = Growth({"fc": [4000, 4001, 4001, 4096]}, ["a", "b", "c", "d"])
    dots = growth.dots("fc")
    assert len(dots) <= 14
    assert set(dots) == {0, 1, 3}
    assert growth.scale() == "features that a dot stands for: 342 in fc"


def test_methods_that_grow_alike_share_a_drawing() -> None:
    (group,) = gather.groups([run("tfm", growth=GROWN), run("tfm-nofn", growth=GROWN), run("ewc")])
    assert [label for label, _ in gather.grown(group)] == ["TFM w/o FN, TFM"]


def test_a_panel_tells_what_its_task_added_and_how_wide_layers_are_then() -> None:
    drawing = Drawing(Growth({"one": [2, 4, 6], "two": [6, 9, 12]}, ["1", "2", "3"]), "g")
    assert drawing.told(1) == "5 new features, 24 new connections"
    for t, widths in enumerate((["2", "6"], ["4", "9"], ["6", "12"])):
        assert re.findall(r'class="g-count"[^>]*>([^<]*)<', drawing.panel(t)) == widths


def test_charts_are_read_as_they_are_meant() -> None:
    style = charts.Style(("tfm",))
    scale = charts.described(charts.accuracy(style, 5, 47.0))["layer"][1]["encoding"]["y"]["scale"]
    assert scale == {"domain": [40, 100]}
    heat = charts.described(charts.matrix(style, 3))["layer"][0]["encoding"]
    assert (heat["x"]["field"], heat["y"]["field"]) == ("k", "t")
    _, points = charts.described(charts.curves(style, "loss", 0.0))["layer"]
    assert points["transform"] == [{"filter": "datum.kept"}]
    bars = charts.described(charts.layers(style, ["z", "a"], 3))["encoding"]["y"]
    assert bars["sort"] == ["z", "a"]  # in the network's order


# Files -----------------------------------------------------------------------------------------------------------


def test_figures_are_what_they_claim(tmp_path: Path) -> None:
    runs = [run("tfm", tasks=3, growth={k: v[:3] for k, v in GROWN.items()}, bits=(900, 90)), run("ewc", tasks=3)]
    paths = write_figures(runs, tmp_path, ["svg", "png", "pdf"])
    kinds = {"accuracy", "tasks", "matrix-tfm", "matrix-ewc", "overhead-inference", "overhead-training", "growth-tfm"}
    kinds |= {"layers-tfm", "curves-val-accuracy", "curves-val-loss", "curves-loss"}
    assert {path.stem.removeprefix("digits-5-lenet-") for path in paths} == kinds
    assert len(paths) == 3 * len(kinds)
    for path in paths:
        data = path.read_bytes()
        if path.suffix == ".svg":
            assert ET.fromstring(data).tag.endswith("svg")
            assert b"theme(" not in data
            assert b"NaN" not in data
        elif path.suffix == ".png":
            image = Image.open(io.BytesIO(data)).convert("RGB")
            assert image.width > 400
            assert len(image.getcolors(1 << 20) or ()) > 10, f"{path.name} is empty"
        else:
            assert data.startswith(b"%PDF-")
            assert b"%%EOF" in data[-32:]


def test_every_method_is_named_in_the_figure() -> None:
    made = {figure.name: figure.svg for figure in figures.figures(study(1))}
    for label in ("Finetuning", "Joint", "EWC", "PackNet", "TFM w/o FN", "TFM"):
        assert f">{label}<" in made["digits-5-lenet-accuracy"]
    assert ">the network itself<" in made["digits-5-lenet-overhead-training"]


def test_figures_of_one_name_do_not_overwrite_each_other() -> None:
    one = run("tfm", tasks=2)
    names = [figure.name for figure in figures.figures([one, replace(one, experiment="again")])]
    assert len(names) == len(set(names)) > 8


def test_panels_stand_in_the_order_of_the_tasks() -> None:
    made = {f.name: f.svg for f in figures.figures([run("tfm", tasks=11, names=[*"kjihgfedcba"])])}
    heads = re.findall(r">(\d+) [a-k]<", made["digits-5-lenet-tasks"])
    assert heads == [str(number) for number in range(1, 12)]


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no figure format 'gif'; there are svg, png, pdf"):
        write_figures([run("tfm")], tmp_path, ["gif"])


def test_without_altair_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ValueError, match=r"need 'altair', the extra 'report' .* pip install altair vl-convert-python"):
        charts.accuracy(charts.Style(("tfm",)), 5, 0.0)
