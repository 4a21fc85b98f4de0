"""The model on disk: a folder that only ever gains files, each hashed, each task chained to the one before."""

from typing import TYPE_CHECKING

from zeroforget.files.imports import fetched

if TYPE_CHECKING:
    from zeroforget.store.errors import Damaged, Locked, ModelError, Newer, Unreadable
    from zeroforget.store.model import Model, Prediction, open_model
    from zeroforget.store.options import Options
    from zeroforget.store.schema import TaskFacts
    from zeroforget.store.verify import Report
    from zeroforget.store.writing import Watch

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

__getattr__ = fetched(
    __name__,
    {
        "zeroforget.store.errors": ["Damaged", "Locked", "ModelError", "Newer", "Unreadable"],
        "zeroforget.store.model": ["Model", "Prediction", "open_model"],
        "zeroforget.store.options": ["Options"],
        "zeroforget.store.schema": ["TaskFacts"],
        "zeroforget.store.verify": ["Report"],
        "zeroforget.store.writing": ["Watch"],
    },
)
