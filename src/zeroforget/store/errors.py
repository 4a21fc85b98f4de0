"""What can be wrong with a model on disk; each is a ValueError that says what, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroforget.files.json_fields import FieldError
from zeroforget.files.text import WrongOption


class ModelError(ValueError):
    """A model cannot be used as asked; the message says why, and what to do.

    Example:
        >>> import zeroforget
        >>> try:
        ...     zeroforget.open("garden").dense("birds")
        ... except zeroforget.ModelError as error:
        ...     print(error)
        there is no model in garden; 'zeroforget learn garden PICTURES --task NAME' makes one
    """


class BadOption(ModelError, WrongOption):
    """An option of learning has a value that it cannot have."""


class Damaged(ModelError):
    """A file of a model is not the one that was written."""

    def __init__(self, where: object, why: str) -> None:
        self.why, self.found = why, f"{where} is damaged: {why}"
        super().__init__(
            f"{self.found}. Put back the file from a copy of this model; if it belongs to the newest "
            "task, 'zeroforget undo' takes that task back. Nothing was changed"
        )


@contextmanager
def damage_told() -> Iterator[None]:
    """Inside, a file or a field that is not what it should be is damage to a model."""
    try:
        yield
    except FieldError as error:
        raise Damaged(error.where, error.why) from None


class Newer(ModelError):
    """A file was written by a later version of this program."""


class Locked(ModelError):
    """Another process is changing the model."""


class Unreadable(ValueError):
    """A file is no picture that can be used."""


class TooManyPixels(Unreadable):
    """A picture is larger than is decoded."""
