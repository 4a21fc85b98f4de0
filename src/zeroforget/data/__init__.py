"""Where data come from and how they become tasks."""

from zeroforget.data.collection import Collection, DataError, OnRead
from zeroforget.data.loading import load, load_folder
from zeroforget.data.scenarios import Plan, missing, named_plans, plan, scenario, whole_task
from zeroforget.data.values import Preparation, Scenario, Split, Task

__all__ = [
    "Collection",
    "DataError",
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
