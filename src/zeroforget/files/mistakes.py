"""Mistakes in what people choose: a word that is not known, an option whose value cannot be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """For the message about a word that is not known: the one that was probably meant, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


class WrongOption(ValueError):
    """The value of an option is not one that it can have. Whoever tells it may name the option as it was typed."""

    def __init__(self, option: str, what: str) -> None:
        super().__init__(f"{option} {what}")
        self.option, self.what = option, what
