"""What can be wrong with a model on disk; each is a ValueError that says what, where, and what to do."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be used as asked."""


class Damaged(ModelError):
    """A file of a model is not the one that was written."""

    def __init__(self, where: object, why: str) -> None:
        self.why = why
        super().__init__(
            f"{where} is damaged: {why}. Put back the file from a copy of this model; if it belongs to the newest "
            "task, 'zeroforget undo' takes that task back. Nothing was changed"
        )


class Newer(ModelError):
    """A file was written by a later version of this program."""


class Locked(ModelError):
    """Another process is changing the model."""


class Unreadable(ValueError):
    """A file is no picture that can be used."""


class TooManyPixels(Unreadable):
    """A picture is larger than is decoded."""
