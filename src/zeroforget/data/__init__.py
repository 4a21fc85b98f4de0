"""Where data come from and how they become tasks."""

from typing import TYPE_CHECKING

from zeroforget.files.imports import fetched

if TYPE_CHECKING:
    from zeroforget.data.loading import load, load_folder
    from zeroforget.data.scenarios import Plan, missing, named_plans, plan, scenario, whole_task
    from zeroforget.data.values import Collection, DataError, Images, OnRead, Preparation, Scenario, Split, Task

__all__ = [
    "Collection",
    "DataError",
    "Images",
    "OnRead",
    "Plan",
    "Preparation",
    "Scenario",
    "Split",
    "Task",
    "load",
    "load_folder",
    "missing",
    "named_plans",
    "plan",
    "scenario",
    "whole_task",
]

__getattr__ = fetched(
    __name__,
    {
        "zeroforget.data.loading": ["load", "load_folder"],
        "zeroforget.data.scenarios": ["Plan", "missing", "named_plans", "plan", "scenario", "whole_task"],
        "zeroforget.data.values": [
            "Collection",
            "DataError",
            "Images",
            "OnRead",
            "Preparation",
            "Scenario",
            "Split",
            "Task",
        ],
    },
)
