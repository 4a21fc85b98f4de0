"""Before a release: build it, look into it, install it where nothing else is, and run it: `make release-check`.

The version stands in `src/zeroforget/_version.py` and nowhere else but in `CITATION.cff`, which is compared.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
IN_WHEEL = (
    "zeroforget/py.typed",
    "zeroforget/nets/compact.safetensors",
    "zeroforget/serving/page.html",
    "zeroforget/data/tiny_semantic.tsv",
    "zeroforget/experiments/paper.json",
    "zeroforget/experiments/report/page.css",
)
IN_SDIST = ("README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "pyproject.toml", "tests/test_package.py")


def version() -> str:
    """As the package has it."""
    found = re.search(r'__version__ = "(.+)"', (ROOT / "src" / "zeroforget" / "_version.py").read_text())
    assert found, "src/zeroforget/_version.py says no version"
    return found[1]


def check_texts() -> None:
    """What must agree before anything is built."""
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != version():
        raise SystemExit(f"CITATION.cff has version {cited and cited[1]}; the package has {version()}")


def build() -> tuple[Path, Path]:
    """The wheel, made from the sdist, and the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT], check=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """All that is needed is there, and nothing that is not."""
    if f"-{version()}-" not in wheel.name:
        raise SystemExit(f"{wheel.name} is not of version {version()}")
    names = set(zipfile.ZipFile(wheel).namelist())
    lacking = [name for name in IN_WHEEL if name not in names]
    strangers = [name for name in names if not name.startswith(("zeroforget/", f"zeroforget-{version()}.dist-info/"))]
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    lacking += [name for name in IN_SDIST if name not in inside]
    if lacking or strangers:
        raise SystemExit(f"lacking: {', '.join(lacking) or 'nothing'}; too much: {', '.join(strangers) or 'nothing'}")
    for file in (wheel, sdist):
        print(f"{file.name}: {file.stat().st_size:,} bytes")


def try_out(wheel: Path) -> None:
    """Install the wheel in a fresh environment, with the pinned versions, and run the demo from another folder."""
    with tempfile.TemporaryDirectory() as place:
        venv.create(Path(place, "env"), with_pip=True)
        python = Path(place, "env", "bin", "python")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

        def run(*words: object) -> str:
            texts = [str(word) for word in words]
            return subprocess.run(texts, cwd=place, env=clean, check=True, capture_output=True, text=True).stdout

        install = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
        run(*install, "torch")
        run(*install, wheel)
        where = run(python, "-c", "import zeroforget; print(zeroforget.__file__)").strip()
        if not where.startswith(place):
            raise SystemExit(f"the fresh environment imports {where}")
        command = python.parent / "zeroforget"
        if run(command, "--version").strip() != f"zeroforget {version()}":
            raise SystemExit("the installed command tells another version")
        shown = run(command, "demo")
        if "proved: logits of all 4 earlier tasks are bit-equal" not in " ".join(shown.split()):
            raise SystemExit(f"the demo proved nothing:\n{shown}")
        print("installed in a fresh environment; the demo ran and proved that nothing was forgotten")


def main() -> None:
    """All of it, or the first thing that is wrong."""
    check_texts()
    wheel, sdist = build()
    check_contents(wheel, sdist)
    try_out(wheel)


if __name__ == "__main__":
    main()
