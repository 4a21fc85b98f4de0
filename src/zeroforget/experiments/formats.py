"""Tables as text for the terminal, Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich.text import Text

from zeroforget.experiments.tables import BASELINES, Row, Table


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


def terminal(table: Table) -> Text:
    """Columns set apart by blanks, the best in bold. Never folded, so that a pipe gets whole lines."""
    lines = [table.header, *table.lines()]
    widths = [max(len(line[c]) for line in lines) for c in range(len(table.header))]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    text = Text()
    text.append(f"{table.title}\n", style="bold")
    text.append(_padded(table.header, widths) + "\n" + rule + "\n")
    for row, line in zip(table.rows, table.lines(), strict=True):
        padded = _padded(line, widths)
        text.append(padded[: len(padded) - widths[-1]], style="dim" if row.source == "paper" else "")
        text.append(padded[len(padded) - widths[-1] :] + "\n", style="bold" if row.average.best else "")
    for note in table.notes:
        text.append(note + "\n", style="dim")
    return text


def _padded(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = line
    return "  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))])


def plain(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Any rows of text, columns set apart by blanks."""
    widths = [max(len(line[c]) for line in [header, *rows]) for c in range(len(header))]
    return "\n".join(_padded(line, widths) for line in [header, *rows])


def markdown(table: Table) -> str:
    """A pipe table."""
    lines = [f"**{table.title}**", "", _pipes(table.header), _pipes(["---", *["---:"] * (len(table.header) - 1)])]
    for row, line in zip(table.rows, table.lines(), strict=True):
        average = f"**{line[-1]}**" if row.average.best else line[-1]
        lines.append(_pipes([*(_escape_pipes(cell.strip()) for cell in line[:-1]), average]))
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
    title, *middle, average = (_tex(cell) for cell in table.header)
    lines = [
        "% \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'c' * (columns - 1)}}}",
        "\\toprule",
        f"\\multicolumn{{{columns}}}{{c}}{{\\textbf{{{_tex(table.title)}}}}} \\\\",
        " & ".join([title, *middle, average]) + " \\\\",
        "\\midrule",
    ]
    before: Row | None = None
    for row, line in zip(table.rows, table.lines(), strict=True):
        if before is not None and (before.method in BASELINES) and row.method not in BASELINES:
            lines.append("\\midrule")
        *cells, last = (_tex(cell) for cell in line)
        if row.source == "paper":
            cells[0] = f"\\quad {cells[0].strip()}"
        lines.append(" & ".join([*cells, f"\\textbf{{{last}}}" if row.average.best else last]) + " \\\\")
        before = row
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _tex(text: str) -> str:
    for plain_sign, sign in (("\\", "\\textbackslash "), ("&", "\\&"), ("%", "\\%"), ("_", "\\_"), ("#", "\\#")):
        text = text.replace(plain_sign, sign)
    return text.replace(" ± ", " $\\pm$ ").replace("·", "$\\cdot$").replace("(-", "($-$").replace("(+", "($+$")


def to_csv(tables: Sequence[Table]) -> str:
    """One line for each method and task, with full precision; the average is the task 'average'."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "method", "source", "seeds", "task", "accuracy", "forgetting", "std"])
    for table in tables:
        for row in table.rows:
            for task, cell in zip((*table.tasks, "average"), (*row.cells, row.average), strict=True):
                figures = (cell.accuracy, cell.forgetting, cell.spread)
                texts = ["" if figure is None else f"{figure:.6g}" for figure in figures]
                writer.writerow([table.title, row.method, row.source, row.seeds, task, *texts])
    return out.getvalue()
