"""The page on data says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from zeroforget.data import named_plans, scenario
from zeroforget.data.sources import SOURCES

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def cells(name: str) -> list[str]:
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_table_of_data_sets_is_the_codes() -> None:
    for name, source in SOURCES.items():
        row = cells(name)
        assert row[3:6] == [f"{count:,}" for count in (source.classes, source.train, source.test)]
        assert all(folder.strip("`") in str(source.folders) for folder in re.findall(r"`[^`]+`", row[2]))
        sums = {archive.checksum.partition(":")[0] for archive in source.archives if archive.checksum}
        assert all(algorithm in row[6] for algorithm in sums)
        assert name == "digits" or source.home in row[1]


def test_the_table_of_scenarios_is_the_codes() -> None:
    for name, plan in named_plans().items():
        ways = plan.sizes or plan.groups
        tasks = len(ways) if ways else plan.tasks or len(plan.data)
        classes = sum(SOURCES[part].classes for part in plan.data)
        assert cells(name)[1:3] == [str(tasks), f"{classes:,}"]


def test_the_examples_run() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code) == 1
    lines = [line for line in code[0].splitlines() if line.startswith("scenario(")]
    made = [eval(line, {"scenario": scenario}) for line in lines]
    assert [len(each.tasks) for each in made] == [5, 4, 2, 5]
