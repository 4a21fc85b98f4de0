"""What we depend on: every package pinned, known by its hashes, and of a licence that is written down."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
APART = {"torch", "pytest-timeout"}
"""Builds of torch differ by machine, so it has a version and no hash; `make` does without the other."""


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def pinned() -> dict[str, str]:
    lines = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {plain(name): version.strip() for name, version in lines}


def locked() -> dict[str, tuple[str, int]]:
    """Package → version and number of hashes."""
    parts = re.split(r"\n(?=[a-z])", (ROOT / "requirements.lock").read_text())
    found = ((re.match(r"([\w.-]+)==([^\s;]+)", part), part.count("--hash=sha256:")) for part in parts)
    return {plain(match[1]): (match[2], hashes) for match, hashes in found if match}


def test_every_pinned_package_is_locked_with_its_hashes() -> None:
    held = locked()
    for name, version in pinned().items():
        if name not in APART:
            assert name in held, f"{name} is not in requirements.lock"
            assert held[name][0] == version, name
            assert held[name][1] > 0, f"{name} has no hash"


def test_each_version_of_python_that_is_named_is_tested() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', workflow) == named
    assert f'requires-python = ">={named[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_every_package_has_a_licence_that_is_written_down() -> None:
    listed = dict(re.findall(r"^\| (\S+) \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.MULTILINE))
    assert {plain(name) for name in listed} >= set(pinned())
    assert not [name for name, licence in listed.items() if "not told" in licence or "AGPL" in licence]


@pytest.mark.soak
def test_no_weakness_of_a_pinned_package_is_known() -> None:
    """By pip-audit, where it is installed and reaches an index of advisories; skipped, and said so, elsewhere."""
    if importlib.util.find_spec("pip_audit") is None:
        pytest.skip("not audited: pip-audit is not installed")
    words = [sys.executable, "-m", "pip_audit", "-r", "constraints.txt", "--no-deps", "--disable-pip", "-f", "json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        pytest.skip(f"not audited: no index of advisories could be reached ({done.stderr.strip()[-200:]})")
    assert len(found) > 50
    assert not {one["name"]: one["vulns"] for one in found if one.get("vulns")}
