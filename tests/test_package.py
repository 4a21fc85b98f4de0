"""The package as a whole: its public names, which way its imports point, and what its texts show."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zeroforget

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "zeroforget"

LAYERS = [
    {"files", "_version"},
    {"operators", "nets", "data"},
    {"axes"},
    {"growing"},
    {"proving"},
    {"training"},
    {"methods"},
    {"experiments", "store"},
    {"serving"},
    {"cli"},
]
"""From those who know least to those who know most: a package imports itself and those above it in this list."""

MAY_IMPORT = {
    part: {part} | {lower for layer in LAYERS[:place] for lower in layer}
    for place, layer in enumerate(LAYERS)
    for part in layer
}


def test_the_public_names_are_these() -> None:
    assert sorted(zeroforget.__all__) == [
        "CannotGrow",
        "Diverged",
        "Fit",
        "FitLog",
        "GrowingNetwork",
        "Method",
        "Preparation",
        "Regime",
        "Scenario",
        "Split",
        "State",
        "Task",
        "__version__",
        "adopt",
        "grow",
        "open",
        "scenario",
    ]
    assert all(hasattr(zeroforget, name) for name in zeroforget.__all__)


def test_help_answers_without_loading_torch() -> None:
    code = "import sys, zeroforget.cli; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, "importing the command line loads torch"


def test_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [*SOURCE.rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = {name for text in texts for name in re.findall(r"zeroforget\[(\w+)\]", text.read_text(encoding="utf-8"))}
    assert "serve" in named <= set(extras)


def imports(path: Path) -> set[str]:
    """The parts of this package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; arrows are easier to see in full"
            names = [node.module or ""]
            if node.module == "zeroforget":
                names = [f"zeroforget.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("zeroforget.")}
    return found


def test_import_arrows_point_one_way() -> None:
    parts = {p.name for p in SOURCE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert parts <= set(MAY_IMPORT)
    for part in parts:
        for file in (SOURCE / part).rglob("*.py"):
            assert imports(file) <= MAY_IMPORT[part], f"{file.relative_to(SOURCE)} imports {imports(file)}"


def test_growing_networks_import_nothing_but_torch_and_the_standard_library() -> None:
    for file in [
        file for part in ("operators", "axes", "growing", "proving", "nets") for file in (SOURCE / part).glob("*.py")
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.split(".")[0]
                # Triton comes with the torch that has CUDA.
                own = {"torch", "zeroforget"} | ({"triton"} if file.name.startswith("triton") else set())
                assert top in own | sys.stdlib_module_names, f"{file.name} imports {name}"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_lines_of_python_in_the_readme_run_and_print_what_it_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    code = blocks(readme, "python")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 16
    script = tmp_path / "readme.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in readme
    assert "True" in done.stdout


def test_the_demo_prints_what_the_readme_shows() -> None:
    """All figures of its table and its proof, from a run of the real command."""
    readme = (ROOT / "README.md").read_text()
    shown = next(block for block in blocks(readme, "text") if "digits/5" in block)
    done = subprocess.run(
        [sys.executable, "-m", "zeroforget", "demo"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    printed = re.sub(r"\s+", " ", done.stdout)
    for line in shown.strip().splitlines():
        # A processor of another kind rounds otherwise, so fine-tuning's figures may differ there: words must not.
        if line.startswith(("features", "convolutions", "hidden", "all", "tfm", "finetuning")):
            assert re.sub(r"\s+", " ", line) in printed, line
    assert "proved: logits of all 4 earlier tasks are bit-equal" in printed


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs/design.md"])
def test_the_texts_are_there(name: str) -> None:
    assert len((ROOT / name).read_text()) > 300


def test_tables_in_the_docs_come_from_the_committed_results() -> None:
    from benchmarks.fill_docs import filled, pages

    for page in pages():
        text = page.read_text()
        assert filled(text) == text, f"{page.name} is out of date: python -m benchmarks.fill_docs"


def test_the_page_of_architectures_comes_from_the_committed_results(tmp_path: Path) -> None:
    from benchmarks.zoo_docs import write

    write(tmp_path / "page.md", ROOT / "benchmarks" / "results" / "zoo.json")
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "architectures.md").read_text()


def test_links_between_our_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
