"""Continual learning without forgetting: networks that grow a task at a time and prove that nothing changed."""

from typing import TYPE_CHECKING

from zeroforget._version import __version__
from zeroforget.files.imports import fetched

if TYPE_CHECKING:
    from zeroforget.axes.find import CannotGrow
    from zeroforget.data import Preparation, Scenario, Split, Task, scenario
    from zeroforget.growing.births import State
    from zeroforget.growing.network import GrowingNetwork
    from zeroforget.methods import Method
    from zeroforget.proving.grow import adopt, grow
    from zeroforget.store import Model, ModelError, Prediction, Report, TaskFacts
    from zeroforget.store import open_model as open  # noqa: A004
    from zeroforget.training import Diverged, Fit, FitLog, Regime
    from zeroforget.training.fit_network import fit

__all__ = [
    "CannotGrow",
    "Diverged",
    "Fit",
    "FitLog",
    "GrowingNetwork",
    "Method",
    "Model",
    "ModelError",
    "Prediction",
    "Preparation",
    "Regime",
    "Report",
    "Scenario",
    "Split",
    "State",
    "Task",
    "TaskFacts",
    "__version__",
    "adopt",
    "fit",
    "grow",
    "open",
    "scenario",
]

__getattr__ = fetched(
    __name__,
    {
        "zeroforget.axes.find": ["CannotGrow"],
        "zeroforget.proving.grow": ["adopt", "grow"],
        "zeroforget.growing.births": ["State"],
        "zeroforget.growing.network": ["GrowingNetwork"],
        "zeroforget.data": ["Preparation", "Scenario", "Split", "Task", "scenario"],
        "zeroforget.methods": ["Method"],
        "zeroforget.store": ["Model", "ModelError", "Prediction", "Report", "TaskFacts", "open_model as open"],
        "zeroforget.training": ["Diverged", "Fit", "FitLog", "Regime"],
        "zeroforget.training.fit_network": ["fit"],
    },
)


def __dir__() -> list[str]:
    return __all__
