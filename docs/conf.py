"""The pages as a site: `make docs`. What can be told by the program is told by it: see `docs/generate.py`."""

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import generate  # noqa: E402

from zeroforget import __version__  # noqa: E402

project = "zeroforget"
author = "the zeroforget developers"
copyright = author  # noqa: A001
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["generate.py"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
default_role = "code"  # docstrings put one backtick around code
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = False  # it reads source that `learn` does not have: its options are added
nitpicky = False  # torch's own pages are not at hand
html_theme = "furo"
html_title = f"zeroforget {__version__}"
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
suppress_warnings = ["misc.highlighting_failure"]  # what a terminal shows is not always code

generate.write(HERE / "generated", run="ZEROFORGET_DOCS_UNRUN" not in os.environ)  # notebooks take half a minute

COLON = "\ue000"


def setup(app: Any) -> None:
    """Keep napoleon from taking what stands before a colon for a type: an attribute's type is in its annotation."""

    def hide(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        if what in ("attribute", "property", "data"):
            lines[:] = [line.replace(":", COLON) for line in lines]

    def show(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = [line.replace(COLON, ":") for line in lines]

    app.connect("autodoc-process-docstring", hide, priority=400)
    app.connect("autodoc-process-docstring", show, priority=600)
