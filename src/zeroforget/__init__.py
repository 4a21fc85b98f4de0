"""Continual learning without forgetting: networks that grow a task at a time and prove that nothing changed."""

from zeroforget._version import __version__
from zeroforget.core.axes import CannotGrow
from zeroforget.core.grow import grow
from zeroforget.core.masks import State
from zeroforget.core.network import GrowingNetwork
from zeroforget.data import Preparation, Scenario, Split, Task, scenario
from zeroforget.methods import Method
from zeroforget.training import Diverged, Fit, FitLog, Regime

__all__ = [
    "CannotGrow",
    "Diverged",
    "Fit",
    "FitLog",
    "GrowingNetwork",
    "Method",
    "Preparation",
    "Regime",
    "Scenario",
    "Split",
    "State",
    "Task",
    "__version__",
    "grow",
    "scenario",
]
