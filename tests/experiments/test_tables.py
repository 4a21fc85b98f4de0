"""The tables, letter by letter."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from tests.experiments.helpers import results
from zeroforget.experiments import formats
from zeroforget.experiments.costs import COSTS, costs, size
from zeroforget.experiments.results import Results, load_runs
from zeroforget.experiments.tables import Cell, Table, averages, paired, signed, tables

LACKING = "Not every method has a finished run with each seed (0, 1): mine_own lacks 0."


def runs() -> list[Results]:
    return [
        results("tfm", 0, [[0.96], [0.96, 0.9]]),
        results("joint", 0, [[0.95], [0.99, 0.98]]),
        results("finetuning", 0, [[0.97], [0.5, 0.91]]),
        results("tfm", 1, [[0.94], [0.94, 0.92]]),
        results("joint", 1, [[0.95], [0.97, 0.98]]),
        results("finetuning", 1, [[0.97], [0.6, 0.95]]),
        results("mine_own", 1, [[0.97], [0.9699, 0.5]]),
    ]


def test_terminal() -> None:
    (table,) = tables(runs())
    assert formats.terminal(table).plain == (
        "digits/5 · small\n"
        "Method                      t1                t2        Avg.\n"
        "────────────────────────────────────────────────────────────\n"
        "Finetuning  55.0 ± 7.1 (-42.0)  93.0 ± 2.8 (0.0)  74.0 ± 4.9\n"
        "Joint        98.0 ± 1.4 (+3.0)  98.0 ± 0.0 (0.0)  98.0 ± 0.7\n"
        "TFM           95.0 ± 1.4 (0.0)  91.0 ± 1.4 (0.0)  93.0 ± 0.0\n"
        "mine_own           97.0 (-0.0)        50.0 (0.0)        73.5\n"
        f"{LACKING}\n"
    )
    assert bold(table) == ["digits/5 · small"]  # over two seeds TFM's lead may be chance
    assert bold(tables(carried())[0]) == ["digits/5 · small", "93.0 ± 1.4"]


def bold(table: Table) -> list[str]:
    text = formats.terminal(table)
    return [text.plain[s.start : s.end].strip() for s in text.spans if s.style == "bold"]


def carried() -> list[Results]:
    """Seeds differ by two points, methods by ten in each seed: a lead that the interval carries."""
    figures = [("tfm", 0, 0.94), ("tfm", 1, 0.92), ("ewc", 0, 0.84), ("ewc", 1, 0.8201)]
    return [results(method, seed, [[figure]]) for method, seed, figure in figures]


def test_markdown() -> None:
    (table,) = tables(runs())
    assert formats.markdown(table) == (
        "**digits/5 · small**\n"
        "\n"
        "| Method | t1 | t2 | Avg. |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| Finetuning | 55.0 ± 7.1 (-42.0) | 93.0 ± 2.8 (0.0) | 74.0 ± 4.9 |\n"
        "| Joint | 98.0 ± 1.4 (+3.0) | 98.0 ± 0.0 (0.0) | 98.0 ± 0.7 |\n"
        "| TFM | 95.0 ± 1.4 (0.0) | 91.0 ± 1.4 (0.0) | 93.0 ± 0.0 |\n"
        "| mine_own | 97.0 (-0.0) | 50.0 (0.0) | 73.5 |\n"
        "\n"
        f"{LACKING}\n"
    )


def test_latex() -> None:
    (table,) = tables(runs())
    assert formats.latex(table) == (
        "% \\usepackage{booktabs}\n"
        "\\begin{tabular}{lccc}\n"
        "\\toprule\n"
        "\\multicolumn{4}{c}{\\textbf{digits/5 $\\cdot$ small}} \\\\\n"
        "Method & t1 & t2 & Avg. \\\\\n"
        "\\midrule\n"
        "Finetuning & 55.0 $\\pm$ 7.1 ($-$42.0) & 93.0 $\\pm$ 2.8 (0.0) & 74.0 $\\pm$ 4.9 \\\\\n"
        "Joint & 98.0 $\\pm$ 1.4 ($+$3.0) & 98.0 $\\pm$ 0.0 (0.0) & 98.0 $\\pm$ 0.7 \\\\\n"
        "\\midrule\n"
        "TFM & 95.0 $\\pm$ 1.4 (0.0) & 91.0 $\\pm$ 1.4 (0.0) & 93.0 $\\pm$ 0.0 \\\\\n"
        "mine\\_own & 97.0 ($-$0.0) & 50.0 (0.0) & 73.5 \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
        f"% {LACKING}\n"
    )


def test_csv_has_a_line_for_each_figure() -> None:
    rows = list(csv.DictReader(io.StringIO(formats.to_csv(tables(runs())))))
    assert len(rows) == 4 * 3
    assert rows[0] == {
        "table": "digits/5 · small",
        "method": "finetuning",
        "source": "ours",
        "seeds": "2",
        "column": "t1",
        "accuracy": "55",
        "forgetting": "-42",
        "std": "7.07107",
    }
    assert [r["column"] for r in rows[:3]] == ["t1", "t2", "Avg."]
    assert rows[2]["forgetting"] == ""


def test_beside_the_paper() -> None:
    tiny = [[0.5] * (t + 1) for t in range(10)]
    made = [results(m, 0, tiny, scenario="tiny-imagenet/large-first") for m in ("tfm", "si", "freezing")]
    (table,) = tables(made, beside_paper=True)
    assert [(r.method, r.source) for r in table.rows] == [
        ("freezing", "ours"),
        ("freezing", "paper"),
        ("si", "ours"),
        ("tfm", "ours"),
        ("tfm", "paper"),
    ]
    assert table.header[-1] == "Avg. (2+)"
    theirs = table.rows[-1]
    assert str(theirs.cells[0]) == "49.9 (0.0)"
    assert str(theirs.average) == "73.3"
    assert theirs.average.best
    assert "tab:tiny_large_task" in table.notes[0]
    assert "  the paper" in formats.terminal(table).plain
    assert "\\quad the paper &" in formats.latex(table)
    assert "| the paper |" in formats.markdown(table)
    assert ",tfm,paper,1,Avg. (2+),73.3,," in formats.to_csv([table])


def test_a_scenario_that_the_paper_lacks_says_so() -> None:
    (table,) = tables(runs(), beside_paper=True)
    assert table.notes == (LACKING, "The paper has no table for digits/5.")


def test_a_scenario_that_was_cut_otherwise_stands_alone() -> None:
    few = [[0.5] * (t + 1) for t in range(3)]
    (table,) = tables([results("tfm", 0, few, scenario="tiny-imagenet/large-first")], beside_paper=True)
    assert table.notes == ("The paper's table for tiny-imagenet/large-first has 10 tasks, not 3.",)
    assert table.header[-1] == "Avg."
    assert [(r.source, str(r.average)) for r in table.rows] == [("ours", "50.0")]
    assert "the paper |" not in formats.markdown(table)


def test_methods_that_learned_other_tasks_cannot_share_a_table() -> None:
    with pytest.raises(ValueError, match=r"'tfm' and 'ewc' did not learn the same tasks of digits/5 \(t1, t2; t1\)"):
        tables([results("tfm"), results("ewc", accuracy=[[1.0]])])


def test_a_sign_that_parts_columns_is_escaped() -> None:
    made = Results.from_dict(results(accuracy=[[1.0]]).to_dict() | {"tasks": [{"name": "a|b", "classes": 2}]})
    assert "| Method | a\\|b | Avg. |" in formats.markdown(*tables([made]))


def test_the_larger_first_task_is_left_out_of_its_average() -> None:
    accuracy = [[1.0] + [0.5] * t for t in range(10)]
    (table,) = tables([results("tfm", 0, accuracy, scenario="tiny-imagenet/large-first")])
    assert table.rows[0].average.accuracy == 50.0


def test_scenarios_are_tables_of_their_own() -> None:
    assert [t.title for t in tables([results(), results(scenario="birds/4")])] == [
        "digits/5 · small",
        "birds/4 · small",
    ]


def test_experiments_and_networks_are_tables_of_their_own() -> None:
    one = results()
    made = tables([one, replace(one, experiment="again"), replace(one, network="lenet"), results("tfm")])
    assert [(table.title, len(table.rows)) for table in made] == [
        ("digits/5 · small", 2),
        ("again: digits/5 · small", 1),
        ("digits/5 · lenet", 1),
    ]


def test_runs_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        results(name).save(tmp_path / name)
    assert [each.method for each in load_runs([tmp_path])] == ["a", "b", "c"]
    assert [each.method for each in load_runs([tmp_path / "c", tmp_path / "b"])] == ["c", "b"]


def waited(method: str) -> Results:
    """As joint training from scratch leaves it: the first task was learned with the second."""
    values = results(method, accuracy=[[0.1], [0.9, 0.8]]).to_dict()
    values["logs"][0] |= {"stopped": "waits for task 2"}
    return Results.from_dict(values)


def test_a_task_that_waited_has_nothing_to_forget() -> None:
    (table,) = tables([waited("joint-scratch")])
    assert [str(cell) for cell in table.rows[0].entries] == ["90.0", "80.0 (0.0)", "85.0"]


def test_runs_that_cannot_share_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="method 'finetuning' is there twice on digits/5 with seed 0; give one run"):
        tables([results(seed=1), results(), results()])
    named = Results.from_dict(results().to_dict() | {"experiment": "short"})
    with pytest.raises(ValueError, match="'finetuning' of the experiment 'short' is there twice"):
        tables([named, named])
    other = Results.from_dict(results(seed=1).to_dict() | {"options": {"a": 1}})
    with pytest.raises(ValueError, match="differ in their options"):
        tables([results(), other])


def test_an_option_that_is_newer_than_a_run_had_its_default_there() -> None:
    old = results("tfm", 0)
    old = Results.from_dict(old.to_dict() | {"options": {"start": 0.4}, "regime": {"lr": 0.1}})

    def newer(**values: object) -> Results:
        return Results.from_dict(old.to_dict() | {"seed": 1} | values)

    (table,) = tables([old, newer(options={"start": 0.4, "early": None, "search": []}, regime={"lr": 0.1, "mixup": 0})])
    assert table.rows[0].seeds == 2
    with pytest.raises(ValueError, match=r"differ in their options: \{'start': 0.4\} and .*'early': 0.7"):
        tables([old, newer(options={"start": 0.4, "early": 0.7})])
    with pytest.raises(ValueError, match="differ in their regime"):
        tables([old, newer(regime={"lr": 0.1, "mixup": 0.5})])
    own = Results.from_dict(old.to_dict() | {"method": "mine"})
    with pytest.raises(ValueError, match="differ in their options"):
        tables([own, Results.from_dict(own.to_dict() | {"seed": 1, "options": {"start": 0.4, "new": 1}})])


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.0"), (-0.0, "0.0"), (-20.34, "-20.3"), (1.44, "+1.4"), (-0.01, "-0.0")]
)
def test_forgetting_is_signed_as_in_the_paper(value: float, text: str) -> None:
    assert signed(value) == text


def test_bold_is_what_the_interval_carries() -> None:
    assert str(Cell(50.0)) == "50.0"
    assert [r.average.best for r in tables(carried())[0].rows] == [False, True]
    one = [each for each in carried() if each.seed == 0]
    assert not any(r.average.best for r in tables(one)[0].rows), "one seed carries nothing"
    unpaired = [each for each in carried() if (each.method, each.seed) != ("ewc", 1)]
    assert not any(r.average.best for r in tables(unpaired)[0].rows)
    near = [*carried(), results("si", 0, [[0.93]]), results("si", 1, [[0.925]])]
    assert not any(r.average.best for r in tables(near)[0].rows), "SI is level with TFM"


def test_the_best_of_one_is_not_bold_and_upper_bounds_do_not_compete() -> None:
    bounds = [results(method, seed, [[1.0]]) for method in ("joint", "joint-scratch", "alone") for seed in (0, 1)]
    low, lower = ([each for each in carried() if each.method == method] for method in ("tfm", "ewc"))
    for runs, best in ((low, []), ([*bounds, *low], []), ([*bounds, *low, *lower], ["tfm"])):
        (table,) = tables(runs)
        assert [row.method for row in table.rows if row.average.best] == best


def test_against_a_row_tells_the_paired_difference_and_its_interval() -> None:
    (table,) = tables(carried(), against="ewc")
    assert table.header == ("Method", "t1", "Avg.", "less EWC")
    ewc, tfm = table.lines()
    assert ewc[-1] == ""
    # 10.0 and 9.99: mean 9.995, deviation 0.00707, 12.706 · 0.00707 / √2 to each side.
    assert tfm[-1] == "+10.0 [+9.9, +10.1]"
    found = paired({0: 94.0, 1: 92.0, 2: 7.0}, {1: 82.01, 0: 84.0})
    assert found is not None
    assert (found.mean, found.reach, found.pairs) == (pytest.approx(9.995), pytest.approx(0.0635, abs=1e-4), 2)
    assert str(paired({0: 1.0}, {0: 3.5})) == "-2.5"
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert "| TFM | 93.0 ± 1.4 (0.0) | **93.0 ± 1.4** | +10.0 [+9.9, +10.1] |" in formats.markdown(table)
    assert "less EWC" in formats.latex(table)
    assert formats.terminal(table).plain.count("+10.0 [+9.9, +10.1]") == 1
    with pytest.raises(ValueError, match="no run of 'ewk' to compare with; did you mean 'ewc'"):
        tables(carried(), against="ewk")


def test_others_figures_stand_below_ours() -> None:
    runs = [results(method, scenario="cifar100/10") for method in ("wsn", "tfm")]
    (table,) = tables(runs, published=True)
    lines = [(line[0].strip(), line[-1]) for line in table.lines()]
    assert ("published, capacity 99 %", "76.4") in lines
    assert lines.index(("published, capacity 99 %", "76.4")) == [title for title, _ in lines].index("WSN") + 1
    assert lines[-1] == ("Joint, from scratch, published", "79.8")
    assert table.lines()[-1][1] == "–"
    assert table.notes[-1].startswith("Published: Kang et al., 2022")
    (table,) = tables([results("tfm")], published=True)
    assert table.notes[-1] == "No other paper's figures are kept for digits/5."
    assert "nan" not in formats.to_csv(tables(runs, published=True))


def test_seeds_that_draw_the_scenario_share_a_row() -> None:
    def drawn(method: str, seed: int, order: int) -> Results:
        made = results(method, seed)
        return replace(made, setup={"scenario": {"name": "digits/5", "order": order}})

    (table,) = tables([drawn("tfm", 0, 0), drawn("tfm", 1, 1), drawn("ewc", 0, 0), drawn("ewc", 1, 1)])
    assert table.notes == ()
    with pytest.raises(ValueError, match="differ in their scenario"):
        tables([drawn("tfm", 0, 0), drawn("tfm", 1, 5)])


def test_averages_have_a_column_for_each_scenario_and_the_best_of_each_in_bold() -> None:
    names = ["tiny-imagenet/random", "tiny-imagenet/semantic", "tiny-imagenet/large-first"]
    good, bad = [[0.5] * (t + 1) for t in range(10)], [[0.25] * (t + 1) for t in range(10)]
    seeds = (0, 1)
    made = [results("hat", s, good if name == names[0] else bad, scenario=name) for name in names for s in seeds]
    made += [results("tfm", s, bad if name == names[0] else good, scenario=name) for name in names for s in seeds]
    made += [results("joint-scratch", s, good, scenario=names[0]) for s in seeds]  # not on the others
    made += [results("ewc", s, bad, scenario=names[0]) for s in seeds]
    table = averages(made, beside_paper=True)
    assert table.columns == tuple(f"{name} · small" for name in names)
    assert [(r.method, r.source) for r in table.rows] == [
        ("hat", "ours"),
        ("hat", "paper"),
        ("tfm", "ours"),
        ("tfm", "paper"),
    ]
    assert [[str(c) for c in r.entries] for r in table.rows] == [
        ["50.0 ± 0.0", "25.0 ± 0.0", "25.0 ± 0.0"],
        ["54.2", "44.0", "66.5"],
        ["25.0 ± 0.0", "50.0 ± 0.0", "50.0 ± 0.0"],
        ["56.0", "45.3", "73.3"],
    ]
    assert [[c.best for c in r.entries] for r in table.rows if r.source == "ours"] == [
        [True, False, False],
        [False, True, True],
    ]
    assert "| TFM | 25.0 ± 0.0 | **50.0 ± 0.0** | **50.0 ± 0.0** |" in formats.markdown(table)
    assert table.notes[0] == "Not run on every scenario: Joint, from scratch; EWC."


def test_averages_are_of_methods_that_ran_everywhere_and_repeat_no_note() -> None:
    names = ["tiny-imagenet/random", "tiny-imagenet/semantic", "digits/5"]
    made = [
        results(method, 0, scenario=name)
        for method in ("tfm", "ewc")
        for name in names
        if (method, name) != ("ewc", names[2])
    ]
    made += [results("tfm", 1, scenario=name) for name in names[:2]]
    table = averages(made)
    assert [(row.method, row.seeds) for row in table.rows] == [("tfm", 2)]
    assert not any(cell.best for cell in table.rows[0].entries)  # nobody to compare with
    assert table.notes == (
        "Not run on every scenario: EWC.",
        "Not every method has a finished run with each seed (0, 1): EWC lacks 1.",
    )


def spent(method: str, seed: int, last: float = 0.8) -> Results:
    """A run whose figures differ from task to task."""
    values = results(method, seed, [[0.9], [0.9, last]]).to_dict()
    values |= {"parameters": [100, 300], "seconds": [1.0, 2.5], "unchanged": [seed == 0, True]}
    values["overhead"] = [{"training": 80, "inference": 8}, {"training": 160 + 80 * seed, "inference": 16}]
    for log, count in zip(values["logs"], (3, 4), strict=True):
        log["epochs"] = [{}] * count
    return Results.from_dict(values)


def test_costs_are_those_after_the_last_task_and_means_over_seeds() -> None:
    alone = [results("alone", seed, [[0.9], [0.9, figure]]) for seed, figure in ((0, 0.5), (1, 0.9))]
    table = costs([spent("tfm", 0), spent("tfm", 1), *alone])
    cost = table.rows[0]
    assert (cost.parameters, cost.training, cost.inference) == (300, 200, 16)
    assert (cost.epochs, cost.seconds, cost.kept, cost.tasks) == (7, 3.5, 1.5, 2)
    assert cost.transfer == pytest.approx((30 - 10) / 2)  # each seed beside its own
    assert formats.costs_text([costs([spent("tfm", 0)])], "latex").splitlines() == [
        "\\begin{tabular}{l" + "r" * 13 + "}",
        "\\toprule",
        "\\multicolumn{14}{c}{\\textbf{digits/5 $\\cdot$ small}} \\\\",
        "Method & parameters & overhead training & inference & epochs kept & seconds & bits kept & transfer & Avg. "
        "& network & all kept & packed & training operations & operations of an answer \\\\",
        "\\midrule",
        "TFM & 300 & 20 B & 2 B & 7 & 3.5 & 2 of 2 tasks & – & 85.0 & 1.2 kB & 1.2 kB & – & – & – \\\\",
        "\\bottomrule",
        "\\end{tabular}",
    ]


def test_costs_and_forward_transfer() -> None:
    made = [
        results("tfm", accuracy=[[0.9], [0.9, 0.8]]),
        results("alone", accuracy=[[0.9], [0.9, 0.7]]),
    ]
    assert [dict(zip(COSTS[:8], row[:8], strict=True)) for row in (each.cells for each in costs(made).rows)] == [
        {
            "Method": "TFM",
            "parameters": "10",
            "overhead training": "0 B",
            "inference": "0 B",
            "epochs kept": "0",
            "seconds": "2.0",
            "bits kept": "2 of 2 tasks",
            "transfer": "+10.0",
        },
        {
            "Method": "alone",
            "parameters": "10",
            "overhead training": "0 B",
            "inference": "0 B",
            "epochs kept": "0",
            "seconds": "2.0",
            "bits kept": "2 of 2 tasks",
            "transfer": "–",
        },
    ]


def test_forward_transfer_is_of_later_tasks_that_were_learned_in_their_turn() -> None:
    one = [results("tfm", accuracy=[[0.9]]), results("alone", accuracy=[[0.9]])]
    waited = results("joint").to_dict()
    waited["logs"][0] |= {"stopped": "waits for task 2"}
    for made in (one, [Results.from_dict(waited), results("alone")]):
        assert [row.transfer for row in costs(made).rows] == [None, None]


def test_sizes_are_bytes() -> None:
    assert [size(b) for b in (0, 8, 8000, 8 * 28_500_000, 8e10)] == ["0 B", "1 B", "1.0 kB", "28.5 MB", "10.0 GB"]
    assert [size(8 * n) for n in (999.4, 999.6, 999_940, 999_960)] == ["999 B", "1.0 kB", "999.9 kB", "1.0 MB"]


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match="no table format 'html'"):
        formats.text(tables(runs()), "html")


def test_seeds_that_learned_other_tasks_cannot_share_a_row() -> None:
    one, other = results("ewc", 0), results("ewc", 1)
    other.tasks[0]["name"] = "another"
    with pytest.raises(ValueError, match="with seeds 0 and 1 differ in their tasks"):
        tables([one, other])
