"""Tables and pictures in the docs, made from the committed results: `python -m benchmarks.fill_docs` writes them anew.

A block begins with one of these lines and ends with `<!-- end -->`; what stands between is written by this program:

    <!-- table results/NAME.json [--beside paper] [--against METHOD] -->   the table of accuracies, as of `table`
    <!-- headline results/NAME.json ... -->                 averages of TFM and its bounds, a row for each experiment
    <!-- choice results/TRANSFER.json results/NAME.json --> ours beside what else one might take: accuracy and bytes
    <!-- tuned results/NAME.json -->                        what each method's options were, and what was searched
    <!-- kept results/NAME.json -->                         what must be kept to serve all tasks, and to learn the next
    <!-- picture KIND results/NAME.json ... -->             averages, course, kept, ... see `benchmarks/pictures.py`
    <!-- overheads NETWORK TASKS -->                        a picture of what methods keep beside a network
    <!-- board results/NAME.json -->                        a row a method: accuracy, cost, seeds, commit, command
    <!-- steps results/NAME.json ... -->                    the time of a learning step, see `benchmarks/step_tables.py`
    <!-- epochs results/NAME.json -->                       the time of an epoch of the training loop
    <!-- searches results/NAME.json ... -->                 the time of growth searches
    <!-- recipes results/NAME.json -->                      recipes compared, see `benchmarks/recipes.py`
    <!-- ratios results/NAME.json -->                       what `make bench` measured
    <!-- shards results/NAME.json -->                       images a second, and what listing takes
    <!-- tasks results/NAME.json ... -->                    what a model of many tasks costs, see `benchmarks/tasks.py`
    <!-- hosts results/NAME.json -->                        what more hosts give, see `benchmarks/hosts.py`
    <!-- photos results/NAME.json ... -->                   a few dozen photos a class, see `benchmarks/photos.py`
    <!-- options learn -->                                  what may be chosen about learning a task

`--with=results/OTHER.json:METHOD` adds that method's runs, which must be of the same scenario, network and regime, to a
table, to what was tuned, or to a picture of one file. A file of results that is not there yet is said to be missing; no
figure is ever written by hand.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from benchmarks import photos, pictures, recipes, scaling_tables, step_tables
from zeroforget.cli.app import typed
from zeroforget.experiments import archive, formats, paper, tables
from zeroforget.experiments import costs as spending
from zeroforget.experiments.results import Results, mean
from zeroforget.store.options import described
from zeroforget.training import Regime

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"(<!-- (table|headline|choice|tuned|kept|board|picture|steps|epochs|searches|recipes|ratios|shards|tasks|hosts|"
    r"photos|options|overheads) "
    r"([^\n]+?) -->\n).*?(<!-- end -->)",
    re.DOTALL,
)
PICTURES = Path("docs", "pictures")
SEES_ALL = ("joint", "joint-scratch")
"""Rows that look at the images of past tasks."""


def filled(text: str, folder: str = "docs") -> str:
    """A page, which lies in this folder of the repository, with every block made anew."""
    beside = Path(os.path.relpath(PICTURES, folder)).as_posix()
    return BLOCK.sub(lambda match: f"{match[1]}{_body(match[2], match[3].split(), beside).strip()}\n{match[4]}", text)


def remade(page: Path) -> str:
    """What a page should say."""
    return filled(page.read_text(), str(page.parent.relative_to(ROOT)))


def drawn(text: str) -> dict[str, str]:
    """The pictures of a page: file name to SVG."""
    found: dict[str, str] = {}
    for match in BLOCK.finditer(text):
        kind, *words = match[3].split()
        names = _names(words)
        if match[2] == "overheads":
            found[_overheads(kind, words)] = pictures.overheads(kind, int(words[0]))
        if match[2] == "picture" and not _missing(names):
            with suppress(pictures.Lacking):  # the page says what
                found[_file(kind, names)] = _picture(kind, words)
    return found


def _names(words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith("results/")]


def _picture(kind: str, words: list[str]) -> str:
    first, *others = _names(words)
    return pictures.PICTURES[kind](_runs(first, words), *(archive.load(ROOT / name) for name in others))


def _overheads(network: str, words: list[str]) -> str:
    return f"overheads-{network}-{words[0]}.svg"


def _body(block: str, words: list[str], beside: str) -> str:
    if block == "options":
        return learn_options()
    if block == "overheads":
        said = f"What methods keep beside {words[0]} after each of {words[1]} tasks"
        return f"![{said}]({beside}/{_overheads(words[0], words[1:])})"
    names = _names(words)
    if missing := _missing(names):
        return _no_results(missing)
    measured = {
        "steps": step_tables.steps,
        "epochs": step_tables.epochs,
        "searches": step_tables.searches,
        "recipes": recipes.table,
        "ratios": step_tables.ratios,
        "shards": step_tables.shards,
        "tasks": scaling_tables.tasks,
        "hosts": scaling_tables.hosts,
        "photos": photos.page,
    }
    if block in measured:
        return measured[block]([ROOT / name for name in names])
    if block == "picture":
        try:
            title = re.search("<title>(.*?)</title>", _picture(words[0], words))
        except pictures.Lacking as lacking:
            return f"*No picture yet: {lacking}.*"
        return f"![{title[1] if title else words[0]}]({beside}/{_file(words[0], names)})"
    if block == "choice":
        return choice(json.loads((ROOT / names[0]).read_text()), archive.load(ROOT / names[1]))
    if block == "headline":
        return headline([archive.load(ROOT / name) for name in names])
    runs = _runs(names[0], words)
    if block == "tuned":
        return tuned(runs)
    if block == "kept":
        return kept(runs)
    if block == "board":
        return board(runs)
    asked = dict(pairwise(words))
    also, against = asked.get("--beside"), asked.get("--against")
    made = tables.tables(runs, beside_paper=also == "paper", published=also == "published", against=against)
    return formats.text(made, "markdown")


def _runs(name: str, words: list[str]) -> list[Results]:
    """Those of a file, and those of other experiments that would only be run again for it."""
    runs = archive.load(ROOT / name)
    found: list[Results] = []
    for source in (word.removeprefix("--with=") for word in words if word.startswith("--with=")):
        other, _, method = source.partition(":")
        found += [run for run in archive.load(ROOT / other) if run.method == method]
    for run in found:
        if _conditions(run) != _conditions(runs[0]):
            raise ValueError(f"{run.method} of {run.experiment} was not run as {name} was")
    return [*(replace(run, experiment=runs[0].experiment) for run in found), *runs]


def _conditions(run: Results) -> tuple[str, str, dict[str, Any]]:
    return run.scenario, run.network, asdict(Regime()) | run.regime


def _missing(names: Iterable[str]) -> list[str]:
    return [name for name in names if not (ROOT / name).exists()]


def _no_results(names: list[str]) -> str:
    """Plain words where figures will stand."""
    files = " and ".join(f"`experiments/{Path(name).stem}.toml`" for name in names)
    return f"*No results yet: {files} {'was' if len(names) == 1 else 'were'} not run to the end.*"


def _file(kind: str, names: list[str]) -> str:
    return "-".join([*(Path(name).stem for name in names), kind]) + ".svg"


def learn_options() -> str:
    """The options of `zeroforget learn` and `Model.learn`, from where they are declared."""
    rows = ["| on the command line | in Python | default | |", "|---|---|---|---|"]
    for each, hint in described():
        (_, option), default = get_args(typed(each, hint)[0]), "–" if each.default is None else f"`{each.default}`"
        rows.append(f"| `{option.default}` | `{each.name}` | {default} | {each.metadata['about']} |")
    return "\n".join(rows)


# In short ----------------------------------------------------------------------------------------------------------


def headline(files: list[list[Results]]) -> str:
    """Average accuracies: TFM and what it lost, the paper's, PackNet, fine-tuning and joint training.

    TFM is the row of that name; where an experiment has only variants of it, the best of them.
    """
    head = "| experiment | TFM | forgotten | TFM in the paper | PackNet | fine-tuning | joint, all data at once |"
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for runs in files:
        (table,) = tables.tables(runs)
        found = {row.method: row.average.accuracy for row in table.rows}
        ours = max((name for name in found if name.startswith("tfm")), key=lambda name: (name == "tfm", found[name]))
        lost = 100 * max(0.0, -min(min(run.forgetting) for run in runs if run.method == ours))
        printed = paper.comparable(runs[0].scenario, len(runs[0].tasks)) if ours == "tfm" else None
        theirs = printed.row("tfm") if printed else None
        others = (found.get(name) for name in ("packnet", "finetuning", "joint-scratch"))
        cells = (found[ours], lost, theirs and theirs.average, *others)
        figures = " | ".join("–" if cell is None else f"{cell:.1f}" for cell in cells)
        lines.append(f"| `{runs[0].experiment}` | {figures} |")
    return "\n".join(lines)


def choice(transfer: dict[str, Any], runs: list[Results]) -> str:
    """What an adopted network reaches on new tasks, and one that learns all tasks itself, with the bytes it takes."""
    parts = [each for run in transfer["runs"] if "adopted" in run for each in run["contestants"]]
    costs = {cost.method: cost for cost in spending.costs(runs).rows}
    ours = max((name for name in costs if name.startswith("tfm")), key=lambda name: costs[name].average)
    rows = (
        ("**zeroforget** (TFM)", "growth 5 %", ours),
        ("adapters of low rank, as many bytes", "adapters, bytes as growth 5 %", ""),
        ("a fine-tuned copy for each task", "fine-tuning a copy", ""),
        ("PackNet's masks", "", "packnet"),
        ("one network, fine-tuned again and again", "", "finetuning"),
        ("one network, all tasks' images at once", "", "joint-scratch"),
    )
    lines = ["| | adopted ResNet-18 | stored a task | ten tasks | stored for all |", "|---|--:|--:|--:|--:|"]
    for title, added, method in rows:
        tasks = [task for each in parts if each["name"] == added for task in each["tasks"]]
        one = [f"{100 * statistics.mean(task['accuracy'] for task in tasks):.1f} %"] if tasks else ["–"]
        one += [f"{statistics.mean(task['bytes'] for task in tasks) / 1e6:.1f} MB"] if tasks else ["–"]
        cost = costs.get(method)
        ten = [f"{cost.average:.1f} %", spending.size(cost.everything)] if cost else ["–", "–"]
        lines.append(f"| {title} | {' | '.join(one + ten)} |")
    return "\n".join(lines)


# What was tuned ----------------------------------------------------------------------------------------------------


def tuned(runs: list[Results]) -> str:
    """One row a method: its options, the rate and trade-off that were found, epochs and time of a run."""
    head = "| Method | options | found by the search | trainings tried | epochs kept | minutes |"
    lines = [head, "| --- | --- | --- | ---: | ---: | ---: |"]
    for group in tables.by_method(runs):
        first = group[0]
        options = ", ".join(f"{name} {_short(value)}" for name, value in first.options.items()) or "–"
        epochs = sum(sum(run.epochs) for run in group) / len(group)
        minutes = sum(sum(run.seconds) for run in group) / len(group) / 60
        title = tables.TITLES.get(first.method, first.method)
        found, tried = _found(group)
        lines.append(f"| {title} | {options} | {found} | {tried or '–'} | {epochs:.0f} | {minutes:.1f} |")
    return "\n".join(lines)


def _found(group: list[Results]) -> tuple[str, int]:
    """The values that the searches came to, and how many trainings they took, over tasks and seeds."""
    notes: list[dict[str, Any]] = [
        log["notes"]["hyperparameters"] for run in group for log in run.logs if "hyperparameters" in log["notes"]
    ]
    tried = sum(len(note["trials"]) for note in notes if len(note["trials"]) > 1)
    values = [note["value"] for note in notes if note["value"] is not None]
    if not values:
        return "–", tried
    low, high = min(values), max(values)
    option = next(note["option"] for note in notes if note["option"] is not None)
    return f"{option} {_short(low)}" + ("" if low == high else f" to {_short(high)}"), tried


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "[" + ", ".join(map(_short, value)) + "]" if isinstance(value, list) else str(value)


# What is kept ------------------------------------------------------------------------------------------------------


def kept(runs: list[Results]) -> str:
    """One row a method: its average, its network, what stays beside it, and how many tasks kept every bit."""
    head = "| Method | Avg. | network | beside it, to serve | beside it, to learn | tasks with every bit kept |"
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: |"]
    (table,) = tables.tables(runs)
    averages = {row.method: row.average.accuracy for row in table.rows}
    for cost in spending.costs(runs).rows:
        network, serving, learning = map(spending.size, (32 * cost.parameters, cost.inference, cost.training))
        sizes = f"{network} | {serving} | {'all images' if cost.method in SEES_ALL else learning}"
        title = tables.TITLES.get(cost.method, cost.method)
        lines.append(f"| {title} | {averages[cost.method]:.1f} | {sizes} | {round(cost.kept, 1):g} of {cost.tasks} |")
    return "\n".join(lines)


# The leaderboard ---------------------------------------------------------------------------------------------------


def board(runs: list[Results]) -> str:
    """One row a method, the best average first, with all that it takes to run it again."""
    head = (
        "| Method | Avg. | forgotten | transfer | all kept | packed | training | an answer | seeds | commit | command |"
    )
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- | --- |"]
    (table,) = tables.tables(runs)
    costs = {cost.method: cost for cost in spending.costs(runs).rows}
    groups = {group[0].method: group for group in tables.by_method(runs)}
    for row in sorted(table.rows, key=lambda row: -row.average.accuracy):
        group, cost = groups[row.method], costs[row.method]
        lost = [100 * mean(run.forgetting) for run in group] if all(group[0].trained) else []
        commits = dict.fromkeys(str(run.environment.get("commit") or "–")[:7] for run in group)
        commands = dict.fromkeys(str(run.environment.get("command") or "–") for run in group)
        cells = (
            row.title,
            str(row.average),
            tables.signed(mean(lost)) if lost else "–",
            "–" if cost.transfer is None else tables.signed(cost.transfer),
            spending.size(cost.everything),
            "–" if cost.packed is None else spending.size(cost.packed),
            spending.count(cost.learning),
            spending.count(cost.answer),
            ", ".join(str(run.seed) for run in group),
            " ".join(commits),
            "<br>".join(f"`{command}`" for command in commands),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Pages -------------------------------------------------------------------------------------------------------------


def pages() -> list[Path]:
    """Every page of ours."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "results").glob("*.md")),
    ]


def main() -> None:
    """Write the pages and pictures that differ."""
    for page in pages():
        wanted = {page: remade(page)}
        wanted |= {ROOT / PICTURES / name: svg for name, svg in drawn(page.read_text()).items()}
        for path, content in wanted.items():
            if not path.exists() or path.read_text() != content:
                path.parent.mkdir(exist_ok=True)
                path.write_text(content)
                print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
