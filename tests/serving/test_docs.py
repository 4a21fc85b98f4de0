"""docs/serving.md says what is so: the paths, the refusals and the limits."""

from __future__ import annotations

import re
from pathlib import Path

from tests.serving.helpers import Client
from zeroforget.serving import Settings
from zeroforget.serving.app import REFUSALS
from zeroforget.serving.settings import MEBI

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def test_every_path_and_every_refusal_is_listed(client: Client) -> None:
    listed = set(re.findall(r"^\| `(?:GET|POST) (/[a-z.]*)", TEXT, re.MULTILINE))
    assert listed == {*client.ask("/openapi.json").json["paths"], "/", "/openapi.json"}
    assert {int(status) for status in re.findall(r"^\| (4\d\d|5\d\d) \|", TEXT, re.MULTILINE)} == set(REFUSALS)


def test_the_limits_are_those_of_the_settings() -> None:
    usual = Settings()
    assert f"`--upload` ({usual.upload // MEBI} MiB)" in TEXT
    assert f"`--pixels` ({usual.pixels // 1_000_000} million" in TEXT
    assert f"`--queue` ({usual.queue}) requests are waiting, or {usual.uploads // MEBI} MiB of pictures" in TEXT
    assert f"`--memory` ({usual.memory // MEBI} MiB" in TEXT
    assert f"(`--batch`, {usual.batch} at most)" in TEXT
    assert f"within {usual.upload_seconds:g} seconds" in TEXT
