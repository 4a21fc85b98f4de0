"""Continual learning without forgetting: networks that grow a task at a time and prove that nothing changed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroforget._version import __version__

if TYPE_CHECKING:
    from zeroforget.axes.find import CannotGrow
    from zeroforget.data import Preparation, Scenario, Split, Task, scenario
    from zeroforget.growing.births import State
    from zeroforget.growing.network import GrowingNetwork
    from zeroforget.methods import Method
    from zeroforget.proving.adopt import adopt
    from zeroforget.proving.grow import grow
    from zeroforget.store import open_model as open  # noqa: A004
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
    "adopt",
    "grow",
    "open",
    "scenario",
]

_HOMES = {
    "zeroforget.proving.adopt": ["adopt"],
    "zeroforget.axes.find": ["CannotGrow"],
    "zeroforget.proving.grow": ["grow"],
    "zeroforget.growing.births": ["State"],
    "zeroforget.growing.network": ["GrowingNetwork"],
    "zeroforget.data": ["Preparation", "Scenario", "Split", "Task", "scenario"],
    "zeroforget.methods": ["Method"],
    "zeroforget.store": ["open"],
    "zeroforget.training": ["Diverged", "Fit", "FitLog", "Regime"],
}


def __getattr__(name: str) -> Any:
    """Public names are fetched when they are first used, so that the command line answers without loading torch."""
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(home), "open_model" if name == "open" else name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'zeroforget' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
