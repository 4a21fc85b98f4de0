"""The one training loop, its regime, and evaluation."""

from typing import TYPE_CHECKING

from zeroforget.files.imports import fetched

if TYPE_CHECKING:
    from zeroforget.progress import Progress
    from zeroforget.training.evaluate import accuracy, logits
    from zeroforget.training.fit import Fit
    from zeroforget.training.learner import Diverged, Learner
    from zeroforget.training.log import FitLog
    from zeroforget.training.regime import Regime

__all__ = ["Diverged", "Fit", "FitLog", "Learner", "Progress", "Regime", "accuracy", "logits"]

__getattr__ = fetched(
    __name__,
    {
        "zeroforget.progress": ["Progress"],
        "zeroforget.training.evaluate": ["accuracy", "logits"],
        "zeroforget.training.fit": ["Fit"],
        "zeroforget.training.learner": ["Diverged", "Learner"],
        "zeroforget.training.log": ["FitLog"],
        "zeroforget.training.regime": ["Regime"],
    },
)
