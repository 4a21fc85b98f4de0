"""Tables as text for the terminal, Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from zeroforget.experiments.costs import COSTS, Cost, CostTable
from zeroforget.experiments.disk import beginning
from zeroforget.experiments.tables import BASELINES, Row, Table
from zeroforget.files.text import safe_cell

CSV = ("table", "method", "source", "seeds", "column", "accuracy", "forgetting", "std")
BOOKTABS = "% \\usepackage{booktabs}"
RULE = "─"


def text(tables: Sequence[Table], style: str) -> str:
    """All tables in one of the styles: terminal (without bold), markdown, latex, csv."""
    if style == "csv":
        return to_csv(tables)
    if style == "markdown":
        return "\n".join(markdown(table) for table in tables)
    if style == "latex":
        return "\n".join(latex(table) for table in tables)
    if style == "terminal":
        return "\n".join(terminal(table).plain for table in tables)
    raise ValueError(f"no table format '{style}'; there are terminal, markdown, latex and csv")


def is_table(path: Path) -> bool:
    """Whether a file begins as `text` does, in any of its styles."""
    first, _, third, fourth, *_ = [*beginning(path).splitlines(), *[""] * 4]
    return (
        first == ",".join(CSV)
        or first == BOOKTABS
        or (first.startswith("**") and fourth.startswith("| --- | ---:"))
        or (third != "" and set(third) == {RULE})
    )


def terminal(table: Table) -> Text:
    """Columns set apart by blanks, the best in bold. Never folded, so that a pipe gets whole lines."""
    lines = [table.header, *table.lines()]
    widths = [max(len(line[c]) for line in lines) for c in range(len(table.header))]
    rule = RULE * (sum(widths) + 2 * (len(widths) - 1))
    text = Text()
    text.append(f"{table.title}\n", style="bold")
    text.append(_padded(table.header, widths) + "\n" + rule + "\n")
    for row, line in zip(table.rows, table.lines(), strict=True):
        text.append(line[0].ljust(widths[0]), style="dim" if row.source == "paper" else "")
        for bold, words, width in zip(_bold(table, row), line[1:], widths[1:], strict=True):
            text.append("  " + words.rjust(width), style="bold" if bold else "")
        text.append("\n")
    for note in table.notes:
        text.append(note + "\n", style="dim")
    return text


def _bold(table: Table, row: Row) -> list[bool]:
    """Which of a row's texts are bold: the best of a column, none of the words behind them."""
    return [*(cell.best for cell in row.entries), *(False for _ in table.more)]


def _padded(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = line
    return "  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))])


def plain(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Any rows of text, columns set apart by blanks."""
    widths = [max(len(line[c]) for line in [header, *rows]) for c in range(len(header))]
    return "\n".join(_padded(line, widths) for line in [header, *rows])


def markdown(table: Table) -> str:
    """A pipe table."""
    header = list(map(_escape_pipes, table.header))
    lines = [f"**{table.title}**", "", _pipes(header), _pipes(["---", *["---:"] * (len(header) - 1)])]
    for row, line in zip(table.rows, table.lines(), strict=True):
        cells = [f"**{words}**" if bold else words for bold, words in zip(_bold(table, row), line[1:], strict=True)]
        lines.append(_pipes([_escape_pipes(line[0].strip()), *cells]))
    for note in table.notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape_pipes(cell: str) -> str:
    return cell.replace("|", "\\|")


def latex(table: Table) -> str:
    """A tabular with booktabs' rules; baselines stand apart as in the paper."""
    columns = len(table.header)
    lines = [
        BOOKTABS,
        f"\\begin{{tabular}}{{l{'c' * (columns - 1)}}}",
        "\\toprule",
        f"\\multicolumn{{{columns}}}{{c}}{{\\textbf{{{_tex(table.title)}}}}} \\\\",
        " & ".join(map(_tex, table.header)) + " \\\\",
        "\\midrule",
    ]
    before: Row | None = None
    for row, line in zip(table.rows, table.lines(), strict=True):
        if before is not None and (before.method in BASELINES) and row.method not in BASELINES:
            lines.append("\\midrule")
        pairs = zip(_bold(table, row), line[1:], strict=True)
        cells = [f"\\textbf{{{_tex(words)}}}" if bold else _tex(words) for bold, words in pairs]
        title = _tex(row.title) if row.source == "ours" else f"\\quad {_tex(row.title.strip())}"
        lines.append(" & ".join([title, *cells]) + " \\\\")
        before = row
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _tex(text: str) -> str:
    for plain_sign, sign in (("\\", "\\textbackslash "), ("&", "\\&"), ("%", "\\%"), ("_", "\\_"), ("#", "\\#")):
        text = text.replace(plain_sign, sign)
    return text.replace(" ± ", " $\\pm$ ").replace("·", "$\\cdot$").replace("(-", "($-$").replace("(+", "($+$")


def to_csv(tables: Sequence[Table]) -> str:
    """One line for each method and column, with full precision."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV)
    for table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.entries, strict=True):
                figures = (cell.accuracy, cell.forgetting, cell.spread)
                texts = ["" if figure is None or figure != figure else f"{figure:.6g}" for figure in figures]
                names = map(safe_cell, (table.title, row.method, row.source))
                writer.writerow([*names, row.seeds, safe_cell(column), *texts])
    return out.getvalue()


# Costs -------------------------------------------------------------------------------------------------------------


def costs_text(tables: Sequence[CostTable], style: str) -> str:
    """Tables of costs in one of the same styles."""
    if style == "csv":
        return _costs_csv(tables)
    one = {"markdown": _costs_markdown, "latex": _costs_latex}.get(style, _costs_plain)
    return "\n".join(one(table) for table in tables)


def _costs_plain(table: CostTable) -> str:
    notes = "".join(f"{note}\n" for note in table.notes)
    return f"{table.title}\n{plain(COSTS, [row.cells for row in table.rows])}\n{notes}"


def _costs_markdown(table: CostTable) -> str:
    lines = [f"**{table.title}**", "", _pipes(COSTS), _pipes(["---", *["---:"] * (len(COSTS) - 1)])]
    lines += [_pipes(list(map(_escape_pipes, row.cells))) for row in table.rows]
    lines += [line for note in table.notes for line in ("", note)]
    return "\n".join(lines) + "\n"


def _costs_latex(table: CostTable) -> str:
    columns = len(COSTS)
    lines = [
        f"\\begin{{tabular}}{{l{'r' * (columns - 1)}}}",
        "\\toprule",
        f"\\multicolumn{{{columns}}}{{c}}{{\\textbf{{{_tex(table.title)}}}}} \\\\",
        *(" & ".join(map(_tex, line)) + " \\\\" for line in [COSTS, *(row.cells for row in table.rows)]),
        "\\bottomrule",
        "\\end{tabular}",
        *(f"% {note}" for note in table.notes),
    ]
    lines.insert(4, "\\midrule")
    return "\n".join(lines) + "\n"


def _costs_csv(tables: Sequence[CostTable]) -> str:
    """One line for each method, with full precision; overhead in bits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", *(field.name for field in dataclasses.fields(Cost))])
    for table in tables:
        for row in table.rows:
            figures = dataclasses.astuple(row)
            texts = ["" if figure is None else f"{figure:.10g}" for figure in figures[1:]]
            writer.writerow([safe_cell(table.title), safe_cell(figures[0]), *texts])
    return out.getvalue()
