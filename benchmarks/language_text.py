"""Text for a small language model: the fortunes of six languages, as Debian packages them.

apt-get download fortunes fortunes-min fortunes-de fortunes-es fortunes-it fortunes-pl fortunes-cs
for each in *.deb; do dpkg -x $each DIR; done
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PACKAGES = "fortunes, fortunes-min, fortunes-de, fortunes-es, fortunes-it, fortunes-pl and fortunes-cs"
TOPICS = ("computers", "definitions", "men-women", "people", "politics", "science", "songs-poems", "work")
OTHERS = (
    "art",
    "cookie",
    "education",
    "food",
    "law",
    "linux",
    "literature",
    "miscellaneous",
    "perl",
    "sports",
    "wisdom",
)
LANGUAGES = ("en", "cs", "de", "es", "it", "pl")
WINDOW = 64
"""Bytes that the network reads at once."""


@dataclass(frozen=True)
class Text:
    """A task: pieces of text, and of each one its class; or none, where the next byte is the class."""

    name: str
    classes: int
    parts: dict[str, tuple[Tensor, Tensor | None]]
    """train, val or test → the bytes of each class as one row, or of all text; where the rows end."""

    def batch(self, part: str, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Windows from anywhere, and the answer wanted at each place."""
        text, ends = self.parts[part]
        if ends is None:
            start = torch.randint(len(text) - WINDOW, (count, 1), generator=draw)
            whole = text[start + torch.arange(WINDOW + 1)].long()
            return whole[:, :-1], whole[:, 1:].flatten()
        labels = torch.randint(self.classes, (count,), generator=draw)
        first = torch.cat([ends.new_zeros(1), ends])[labels]
        room = ends[labels] - first - WINDOW
        start = first + (torch.rand(count, generator=draw) * room).long()
        words = text[start[:, None] + torch.arange(WINDOW)].long()
        return words, labels.repeat_interleave(WINDOW)


def fortunes(file: Path) -> list[str]:
    """All sayings in a file, each on one line."""
    text = re.sub(".\b", "", file.read_text(encoding="utf-8", errors="replace"))
    return [line for saying in re.split(r"^%.*$", text, flags=re.M) if (line := " ".join(saying.split()))]


def split(sayings: list[str]) -> dict[str, bytes]:
    """Every tenth saying is for tests, the one after it for validation."""
    parts: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for number, saying in enumerate(sayings):
        parts[{0: "test", 1: "val"}.get(number % 10, "train")].append(saying)
    return {part: "\n".join(found).encode() for part, found in parts.items()}


def read(root: Path) -> list[Text]:
    """English, then German, both byte by byte; which of six languages; which of eight topics."""
    folder = next(iter(sorted(root.glob("**/games/fortunes"))), root)
    topics = [split(fortunes(folder / name)) for name in TOPICS]
    others = [split(fortunes(folder / name)) for name in OTHERS]
    foreign = [split(_all(folder / language)) for language in LANGUAGES[1:]]
    english = {part: b"\n".join(each[part] for each in (*topics, *others)) for part in ("train", "val", "test")}
    return [
        _running("english", english),
        _running("german", foreign[LANGUAGES[1:].index("de")]),
        _sorted("language", [english, *foreign]),
        _sorted("topic", topics),
    ]


def _all(folder: Path) -> list[str]:
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.suffix not in {".dat", ".u8"})
    return [saying for file in files for saying in fortunes(file)]


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _running(name: str, parts: dict[str, bytes]) -> Text:
    return Text(name, 256, {part: (_bytes(text), None) for part, text in parts.items()})


def _sorted(name: str, classes: list[dict[str, bytes]]) -> Text:
    parts: dict[str, tuple[Tensor, Tensor | None]] = {}
    for part in ("train", "val", "test"):
        rows = [each[part] for each in classes]
        parts[part] = (_bytes(b"".join(rows)), torch.tensor([len(row) for row in rows]).cumsum(0))
    return Text(name, len(classes), parts)
