"""Where data come from and how they become tasks."""

from zeroforget.data.collection import Collection
from zeroforget.data.scenarios import scenario
from zeroforget.data.values import Preparation, Scenario, Split, Task

__all__ = ["Collection", "Preparation", "Scenario", "Split", "Task", "scenario"]
