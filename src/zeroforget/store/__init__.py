"""The model on disk: a folder that only ever gains files, each hashed, each task chained to the one before."""

from zeroforget.store.errors import Damaged, Locked, ModelError, Newer, Unreadable
from zeroforget.store.model import Model, Prediction, open_model
from zeroforget.store.options import Options, Watch
from zeroforget.store.schema import TaskFacts
from zeroforget.store.verify import Report

__all__ = [
    "Damaged",
    "Locked",
    "Model",
    "ModelError",
    "Newer",
    "Options",
    "Prediction",
    "Report",
    "TaskFacts",
    "Unreadable",
    "Watch",
    "open_model",
]
