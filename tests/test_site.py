"""The pages as a site: built without a warning, and opened in a browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.report_browser import Browser, absent

pytest.importorskip("furo")
ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(absent(), reason="needs chromium and chromedriver")
def test_the_site_is_built_without_warnings_and_opens(tmp_path: Path) -> None:
    """Sphinx checks the links between pages and the headings that they name; the notebooks have tests of their own."""
    words = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "-q", ROOT / "docs", tmp_path / "site"]
    unrun = os.environ | {"ZEROFORGET_DOCS_UNRUN": "1"}
    done = subprocess.run([*words, "-d", tmp_path / "trees"], env=unrun, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Browser(tmp_path) as browser:
        browser.look(1280, 900, dark=False)
        browser.open(tmp_path / "site" / "index.html")
        captions = browser.run("return [...document.querySelectorAll('.sidebar-tree .caption')].map(p => p.innerText)")
        assert [caption.lower() for caption in captions] == [
            *("tutorials", "how to", "reference", "explanation", "results")
        ]
        pages = browser.run("return [...document.querySelectorAll('.sidebar-tree a')].map(a => a.href.split('#')[0])")
        assert len(pages) > 20
        assert all(Path(page.removeprefix("file://")).is_file() for page in pages)
        assert browser.run("return document.querySelector('article img').naturalWidth") > 0
        browser.open(tmp_path / "site" / "generated" / "api.html")
        assert browser.run("return !!document.getElementById('zeroforget.grow')")
        browser.look(390, 800, dark=True)
        assert browser.run("return document.documentElement.scrollWidth") <= 390, "the page is wider than a phone"
        said = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
        asked = [one["params"]["request"]["url"] for one in said if one["method"] == "Network.requestWillBeSent"]
        assert asked
        assert not [url for url in asked if not url.startswith(("file:", "data:", "chrome:"))]
        assert not [entry for entry in browser.log("browser") if entry["level"] == "SEVERE"]
