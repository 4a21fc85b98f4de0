"""docs/serving.md says what is so: the paths, the refusals and the limits."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.serving.helpers import Client
from zeroforget.serving import Settings
from zeroforget.serving.app import REFUSALS
from zeroforget.serving.catalog import Catalog
from zeroforget.serving.settings import MEBI
from zeroforget.store.verify import verify

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def test_every_path_and_every_refusal_is_listed(client: Client) -> None:
    listed = set(re.findall(r"^\| `(?:GET|POST) (/[a-z.]*)", TEXT, re.MULTILINE))
    assert listed == {*client.ask("/openapi.json").json["paths"], "/", "/openapi.json"}
    assert {int(status) for status in re.findall(r"^\| (4\d\d|5\d\d) \|", TEXT, re.MULTILINE)} == set(REFUSALS)


def test_the_answer_that_is_shown_is_that_of_the_tutorials_model() -> None:
    day = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    shown = re.search(r'^\{"task":"odd","model":"(\w+)","classes":\[(.*)\]\}$', TEXT, re.MULTILINE)
    assert shown is not None
    assert f"model {shown[1]}\n" in day, "write both anew: python -m tests.cli.tutorial"
    first, second = (json.loads(one) for one in re.findall(r"\{.*?\}", shown[2]))
    percent = [f"{100 * one['probability']:.1f}" for one in (first, second)]
    line = f"000.png  {first['class']}  {percent[0]} %  {second['class']} {percent[1]} %"
    assert f"photos/odd/digit-7/{line}" in day


def test_the_limits_are_those_of_the_settings() -> None:
    usual = Settings()
    assert f"`--upload` ({usual.upload // MEBI} MiB)" in TEXT
    assert f"`--pixels` ({usual.pixels // 1_000_000} million" in TEXT
    assert f"`--queue` ({usual.queue}) requests are waiting, or {usual.uploads // MEBI} MiB of pictures" in TEXT
    assert f"`--memory` ({usual.memory // MEBI} MiB" in TEXT
    assert f"(`--batch`, {usual.batch} at most)" in TEXT
    assert f"within {usual.upload_seconds:g} seconds" in TEXT


def test_damage_is_noticed_when_the_page_says(garden: Path) -> None:
    usual, said = Settings(), " ".join(TEXT.split())
    assert (usual.poll_seconds, usual.verify_seconds) == (1, 3600)
    assert "looks at the folder every second (`--poll`)" in said
    assert "any other file is noticed when the model is verified" in said
    assert "is verified: at the start, after every change and every hour" in said
    served, low = Catalog(garden, poll_seconds=60, verify_seconds=60), garden / "tasks" / "001-low"
    for name in ("born.safetensors", "probe.safetensors"):
        (low / name).write_bytes(b"damaged")
        served.look()
        assert served.trouble is None
        assert not verify(served.folder, {}).holds
    assert "another `task.json` is noticed at the next look" in said
    (low / "task.json").write_text("damaged")
    served.look()
    assert "task.json is damaged" in str(served.trouble)
