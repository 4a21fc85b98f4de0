"""The one training loop, its regime, and evaluation."""

from zeroforget.progress import Progress
from zeroforget.training.evaluate import accuracy, logits
from zeroforget.training.fit import Fit
from zeroforget.training.learner import Diverged, Learner
from zeroforget.training.log import FitLog
from zeroforget.training.regime import Regime

__all__ = ["Diverged", "Fit", "FitLog", "Learner", "Progress", "Regime", "accuracy", "logits"]
