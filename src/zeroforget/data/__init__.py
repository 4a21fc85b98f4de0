"""Where data come from and how they become tasks."""

from zeroforget.data.values import Preparation, Scenario, Split, Task

__all__ = ["Preparation", "Scenario", "Split", "Task"]
