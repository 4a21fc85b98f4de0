"""Paths that people give: empty ones are refused, and nothing is written over what is something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeroforget.files.paths import as_path, in_the_way


def is_ours(path: Path) -> bool:
    return path.read_text() == "ours"


def test_a_path_stays_as_it_was_given() -> None:
    assert as_path("~/x") == Path("~/x")
    assert as_path(Path("a") / "b") == Path("a/b")
    for error in (ValueError, OSError):
        with pytest.raises(error, match=r"^a path is empty; name a file or a folder, or \. for the current folder$"):
            as_path("", error)


@pytest.mark.parametrize("content", [None, "", "ours"])
def test_nothing_is_in_the_way_of_a_new_file_or_its_like(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "out").write_text(content)
    assert in_the_way(tmp_path / "out", "table", is_ours) is None


def test_anything_else_is_in_the_way(tmp_path: Path) -> None:
    letter, pipe = tmp_path / "letter", tmp_path / "pipe"
    letter.write_text("theirs")
    remedy = "name another file, or remove it first"
    assert in_the_way(letter, "table", is_ours) == f"{letter} is there and is no table of zeroforget's; {remedy}"

    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    assert in_the_way(letter, "table", closed) == f"{letter} is there and cannot be read (Permission denied); {remedy}"
    os.mkfifo(pipe)
    assert (
        in_the_way(pipe, "table", is_ours) == f"{pipe} is no regular file, and would be replaced by one; name another"
    )
