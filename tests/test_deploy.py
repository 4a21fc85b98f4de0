"""The files in deploy/: what they start exists, and what they promise of safety is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.container_check import CONTAINERFILE, MIRROR, ROOT, copy, read
from zeroforget.cli import app

DEPLOY = ROOT / "deploy"


def options(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def known() -> set[str]:
    return set(re.findall(r"--[\w-]+", CliRunner().invoke(app, ["serve", "--help"]).output))


def test_the_container_file_is_read_as_it_is_meant(tmp_path: Path) -> None:
    image = read(CONTAINERFILE.read_text())
    assert image.user == "10001"
    assert image.env["OMP_NUM_THREADS"] == "2"
    assert image.start_seconds == 60
    assert image.health[0] == "python"
    assert image.entry[:4] == ["python", "-m", "zeroforget", "serve"]
    assert options(image.entry) <= known()
    assert f":{image.entry[image.entry.index('--own-port') + 1]}/health" in image.health[2]
    for word, rest in image.steps:
        for source in rest.split()[:-1] if word == "COPY" else []:
            assert (ROOT / source).exists(), source
    copy(ROOT / "deploy", tmp_path / "deploy", False)
    copy(ROOT / "LICENSE", tmp_path, True)
    assert (tmp_path / "deploy" / "Containerfile").exists()
    assert (tmp_path / "LICENSE").exists()
    with pytest.raises(ValueError, match="ONBUILD is not known here"):
        read("FROM x\nONBUILD RUN y\n")


def test_what_systemd_starts_exists_and_has_no_rights() -> None:
    text = (DEPLOY / "zeroforget.service").read_text()
    started = re.search(r"^ExecStart=(.+)$", text, re.MULTILINE)
    assert started
    assert options(started[1].split()) <= known()
    for line in ("NoNewPrivileges=yes", "DynamicUser=yes", "ProtectSystem=strict", "CapabilityBoundingSet="):
        assert f"\n{line}\n" in text
    if shutil.which("systemd-analyze"):
        words = ["systemd-analyze", "verify", "--man=no", DEPLOY / "zeroforget.service"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "Unknown" not in done.stderr
        assert "Failed to parse" not in done.stderr


def test_the_example_for_kubernetes_fits_the_container() -> None:
    yaml = pytest.importorskip("yaml")
    image = read(CONTAINERFILE.read_text())
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert options(container["args"]) <= known()
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert str(ports["http"]) == image.entry[image.entry.index("--port") + 1]
    assert str(ports["own"]) == image.entry[image.entry.index("--own-port") + 1]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "own"}
    assert str(spec["securityContext"]["runAsUser"]) == image.user
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    volumes = {one["name"] for one in spec["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert service["spec"]["ports"][0]["targetPort"] in ports
    assert spec["terminationGracePeriodSeconds"] > 45  # the end of a server is bounded so


@pytest.mark.soak
def test_the_container_is_built_and_healthy_without_an_engine(tmp_path: Path) -> None:
    """Where that can be: as root, with debootstrap, unshare, Debian's packages and an index of Python's."""
    root = os.environ.get("ZEROFORGET_CLEAN_ROOT", "")
    if getattr(os, "geteuid", lambda: 1)() != 0 or shutil.which("unshare") is None:
        pytest.skip("not built: that takes root and unshare")
    if not root and shutil.which("debootstrap") is None:
        pytest.skip("not built: debootstrap is not installed")
    try:
        if not root:
            urllib.request.urlopen(f"{MIRROR}/dists/bookworm/Release", timeout=10).close()
    except OSError as error:
        pytest.skip(f"not built: {MIRROR} cannot be reached ({error})")
    given = os.environ.get("ZEROFORGET_CONTAINER_CHECK", "").split()
    words = [sys.executable, "-m", "tools.container_check", "--root", root or str(tmp_path / "root"), *given]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["within_start_period"]
    assert (seen["user"], seen["writable"], seen["exit"]) == ("10001", ["/tmp"], 0)
