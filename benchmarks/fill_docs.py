"""Tables in the docs, made from the committed results: `python -m benchmarks.fill_docs` writes them anew.

A block begins with `<!-- table results/NAME.json [--beside paper] -->` and ends with `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from zeroforget.experiments import archive, formats, tables

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- table (\S+)( --beside paper)? -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page with every block made anew."""

    def made(match: re.Match[str]) -> str:
        results = archive.load(ROOT / match[2])
        body = formats.text(tables.tables(results, beside_paper=bool(match[3])), "markdown")
        return f"{match[1]}{body.strip()}\n{match[4]}"

    return BLOCK.sub(made, text)


def pages() -> list[Path]:
    """Every page of ours."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """Write the pages whose tables differ."""
    for page in pages():
        text = page.read_text()
        if filled(text) != text:
            page.write_text(filled(text))
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
