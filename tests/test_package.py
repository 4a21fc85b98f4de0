"""The package as a whole: its public names, which way its imports point, and what its texts show."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from torch import nn

import zeroforget
from zeroforget.cli.app import ORDER

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "zeroforget"

LAYERS = [
    {"files", "progress", "tracking", "processes", "_version"},
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
        "Model",
        "ModelError",
        "Prediction",
        "Preparation",
        "Regime",
        "Report",
        "Scenario",
        "Split",
        "State",
        "Task",
        "TaskFacts",
        "__version__",
        "adopt",
        "fit",
        "grow",
        "open",
        "scenario",
    ]
    assert all(hasattr(zeroforget, name) for name in zeroforget.__all__)


def test_help_answers_without_loading_torch() -> None:
    code = "import sys, zeroforget.cli; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, "importing the command line loads torch"


def test_help_loads_nothing_that_it_does_not_need() -> None:
    """Of two fifths of a second, `rich` with its Markdown took three parts of four."""
    code = "import sys; sys.argv[1:] = ['--help']; import atexit\n"
    unneeded = {"rich", "numpy", "PIL", "asyncio"}
    code += f"atexit.register(lambda: print(sorted({unneeded} & set(sys.modules)), file=sys.stderr))\n"
    code += "from zeroforget.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "A model in a folder:" in done.stdout
    assert re.findall(r"^  ([a-z]+)  ", done.stdout, re.MULTILINE) == list(ORDER)


def test_a_small_network_is_watched_without_loading_torchs_compiler() -> None:
    """It would take a second of each command."""
    code = "import sys, torch\nfrom zeroforget.axes.find import find_axes\n"
    code += "net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())\n"
    code += "find_axes(net, torch.zeros(2, 1, 8, 8), hollowed=False)\n"
    code += "sys.exit('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_nothing_but_its_names() -> None:
    code = "import sys; before = set(sys.modules); import zeroforget; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("zeroforget")}
    assert ours == {"zeroforget", "zeroforget._version", "zeroforget.files", "zeroforget.files.imports"}
    assert not {"torch", "numpy", "rich", "typer"} & set(done.stdout.split())


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


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Each module of the package by its dotted name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = ("zeroforget", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def modules_imported(tree: ast.Module, known: Collection[str]) -> set[str]:
    """The modules of this package that a module imports, in its functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in whole} & set(known)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & set(known)
    return found


def circles(arrows: Mapping[str, set[str]]) -> set[str]:
    """Those of which arrows lead back to themselves."""
    left = dict(arrows)
    while dead := [name for name, others in left.items() if not others & set(left)]:
        for name in dead:
            del left[name]
    while fed := [name for name in left if not any(name in others for others in left.values())]:
        for name in fed:
            del left[name]
    return set(left)


def test_no_two_modules_import_each_other_not_even_in_a_function() -> None:
    known = trees()
    arrows = {name: modules_imported(tree, known) - {name} for name, tree in known.items()}
    assert not circles(arrows)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}, "this test would not notice"


def test_files_and_functions_are_short_enough_to_read() -> None:
    long = {}
    for path in SOURCE.rglob("*.py"):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix()
        if (lines := text.count("\n")) > 500:
            long[name] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{name}: {node.name} is too long"
    assert not long


def test_the_loop_reads_as_one_text() -> None:
    assert len((SOURCE / "training" / "epochs.py").read_text(encoding="utf-8").splitlines()) <= 300


def test_no_two_classes_have_one_name() -> None:
    """Those of the server's answers aside, which are named as its clients know them."""
    homes: dict[str, list[str]] = {}
    for module, tree in trees().items():
        for node in tree.body if module != "zeroforget.serving.schemas" else []:
            if isinstance(node, ast.ClassDef) and not is_private(node.name):
                homes.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attributes_made(tree: ast.Module) -> set[str]:
    """The private attributes that a module's classes have: what is set on an object, and what a class body holds."""
    found = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        for part in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(part.name)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
            elif isinstance(part, ast.Assign):
                found |= {target.id for target in part.targets if isinstance(target, ast.Name)}
    return {name for name in found if is_private(name)} - set(vars(nn.Module()))  # those are torch's to name


def strangers(package: str, tree: ast.Module, makers: Mapping[str, set[str]]) -> Iterator[str]:
    """Private names of other packages of ours that a module of `package` uses."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zeroforget."):
            modules |= {a.asname or a.name for a in node.names if f"{node.module}.{a.name}" in trees()}
            if (node.module or "").split(".")[1] != package:
                yield from (alias.name for alias in node.names if is_private(alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owners = makers.get(node.attr, set())
            of_a_module = isinstance(node.value, ast.Name) and node.value.id in modules
            if package not in owners and (owners or of_a_module):
                yield f"{ast.unparse(node)}, line {node.lineno}"


def test_no_package_uses_private_names_of_another() -> None:
    """Neither what begins with an underscore in its modules, nor such attributes of its objects."""
    makers: dict[str, set[str]] = {}
    known = {name: tree for name, tree in trees().items() if name.count(".") > 0}
    for name, tree in known.items():
        for attribute in attributes_made(tree):
            makers.setdefault(attribute, set()).add(name.split(".")[1])
    for name, tree in known.items():
        assert not list(strangers(name.split(".")[1], tree, makers)), name
    bad = "from zeroforget.growing import network\nfrom zeroforget.axes.find import _keep\nnetwork._key\nnet._births"
    found = list(strangers("store", ast.parse(bad), makers))
    assert found == ["_keep", "network._key, line 3", "net._births, line 4"], "this test would not notice"


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
        [sys.executable, "-m", "zeroforget", "demo"], capture_output=True, text=True, check=False, timeout=1800
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
    from benchmarks.fill_docs import pages, remade

    for page in pages():
        assert remade(page) == page.read_text(), f"{page.name} is out of date: python -m benchmarks.fill_docs"


def test_the_page_of_architectures_comes_from_the_committed_results(tmp_path: Path) -> None:
    from benchmarks.zoo_docs import write

    write(tmp_path / "page.md", ROOT / "benchmarks" / "results" / "zoo.json")
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "architectures.md").read_text()


def test_files_that_the_page_of_internals_names_are_there() -> None:
    text = (ROOT / "docs" / "internals.md").read_text()
    named = re.findall(r"`([\w/.-]+\.(?:py|toml))`(?!, new)", text)
    assert len(named) > 20
    for name in named:
        assert (SOURCE / name).exists() or [*SOURCE.glob(f"*/{name}")], f"docs/internals.md names {name}"


def test_links_between_our_pages_lead_somewhere(tmp_path: Path) -> None:
    writer = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    writer["write"](tmp_path / "generated")  # pages that are made with the site and lie in no checkout
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                there = (page.parent / target).exists() or (tmp_path / target).exists()
                assert there, f"{page.name} links to {target}"


def test_locks_hashes_and_lasting_writes_have_one_module_each() -> None:
    homes = {"hashlib": "hashes.py", "fcntl": "locks.py", "filelock": "locks.py"}
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in set(names) & set(homes):
                assert path == SOURCE / "files" / homes[name], f"{path.name} imports {name}"
            if isinstance(node, ast.Attribute) and node.attr == "fsync":
                assert path == SOURCE / "files" / "atomic.py", f"{path.name} syncs by itself"
