"""A table of results with the paper's figure under ours and the runs behind every cell, in five formats."""

from __future__ import annotations

import html
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from stfseb.report.chance import mostly
from stfseb.report.tables import LONG, escape_latex, escape_markdown, heading_html, in_width, row_head

if TYPE_CHECKING:
    from rich.console import RenderableType


_SEEDS = re.compile(r"\d+ seeds")
MISSING = ("no data", "failed", "not run", "not measured", "not alone", "–", "—")  # in place of a number


@dataclass(frozen=True)
class Cell:
    """One number over seeds, or why there is none; `rank` is 1 for the best, 2 for the second, 0 for the rest."""

    text: str
    value: float | None = None
    std: float | None = None
    median: float | None = None
    seeds: tuple[int, ...] = ()
    collapsed: tuple[int, ...] = ()
    runs: tuple[str, ...] = ()
    rank: int = 0
    below: tuple[str, ...] = ()  # smaller lines: how many seeds, the median of collapsed ones, the paper's figure
    paper: tuple[float, float | None] | None = None
    paper_deviations: float | None = None  # ours minus the paper's, in the paper's standard deviations
    quoted: bool = False  # a figure of the paper, which has no runs of ours behind it
    apart: bool = False  # measured otherwise than its neighbours: shown, and not compared with them

    @property
    def failed(self) -> bool:
        """Whether so many of its runs learnt nothing that it is not ranked."""
        return mostly(len(self.collapsed), len(self.seeds))

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data; that it stands apart only where it does."""
        data = asdict(self)
        return data if self.apart else {key: value for key, value in data.items() if key != "apart"}


@dataclass(frozen=True)
class Grid:
    """Rows with one or two headings against columns; cells of a row, or of a column, are compared."""

    name: str
    title: str
    stubs: tuple[str, ...]  # what the headings of rows are
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    cells: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    own: str = ""  # the heading of a column, or of a row, that is the project's method
    sortable: bool = False  # every column has one unit

    @property
    def empty(self) -> bool:
        """Tell whether no cell has a number."""
        return all(cell.value is None for row in self.cells for cell in row)

    def seeds_once(self) -> Grid:
        """Return the table without lines "5 seeds" under its numbers, where all are the same, but in a note."""
        lines = {line for row in self.cells for cell in row for line in cell.below if _SEEDS.fullmatch(line)}
        if len(lines) != 1:
            return self
        cells = [[replace(c, below=tuple(x for x in c.below if x not in lines)) for c in row] for row in self.cells]
        said = f"Differences are over {lines.pop()}."
        return replace(self, cells=tuple(map(tuple, cells)), notes=(*self.notes, said))

    def rows_with_runs(self) -> Grid:
        """Return the table without the rows of which nothing was run; a note names them."""
        there = [i for i, row in enumerate(self.cells) if any(cell.runs or cell.quoted for cell in row)]
        left_out = [" ".join(row) for i, row in enumerate(self.rows) if i not in there]
        notes = (*self.notes, f"Not run yet: {'; '.join(left_out)}.") if left_out else self.notes
        rows, cells = tuple(self.rows[i] for i in there), tuple(self.cells[i] for i in there)
        return replace(self, rows=rows, cells=cells, notes=notes)

    def runs(self) -> dict[str, tuple[str, ...]]:
        """Return the runs behind the cells; neighbours made from the same runs are named together."""
        found: dict[tuple[str, ...], list[str]] = {}
        for stub, row in zip(self.rows, self.cells, strict=True):
            for column, cell in zip(self.columns, row, strict=True):
                if cell.runs:
                    found.setdefault(cell.runs, []).append(f"{' '.join(stub)}, {column}")
        return {"; ".join(places): runs for runs, places in found.items()}

    def to_json(self) -> dict[str, Any]:
        """Return everything, every cell with the ids of its runs."""
        rows = []
        for stub, row in zip(self.rows, self.cells, strict=True):
            cells = {column: cell.to_json() for column, cell in zip(self.columns, row, strict=True)}
            rows.append({**dict(zip(self.stubs, stub, strict=True)), "cells": cells})
        return {"name": self.name, "title": self.title, "columns": list(self.columns), "rows": rows} | {
            "notes": list(self.notes)
        }

    def to_markdown(self) -> str:
        """Return a Markdown table with its title and notes; the second line of a cell follows a line break."""
        marks = {0: "{}", 1: "**{}**", 2: "<ins>{}</ins>"}
        lines = [f"### {escape_markdown(self.title)}", ""]
        lines.append("| " + " | ".join(escape_markdown(c) for c in (*self.stubs, *self.columns)) + " |")
        lines.append("|" + ":--|" * len(self.stubs) + "--:|" * len(self.columns))
        for stub, row in zip(self.rows, self.cells, strict=True):
            cells = [
                "<br>".join(
                    [marks[c.rank].format(c.text), *(f"<small>{escape_markdown(line)}</small>" for line in c.below)]
                )
                for c in row
            ]
            lines.append("| " + " | ".join([*map(escape_markdown, stub), *cells]) + " |")
        return "\n".join([*lines, "", *(escape_markdown(note) + "  " for note in self.notes)]) + "\n"

    def to_latex(self) -> str:
        """Return a LaTeX table for the booktabs package; second lines stand in rows of their own, in small type."""
        marks = {0: "{}", 1: "\\textbf{{{}}}", 2: "\\underline{{{}}}"}
        lines = ["\\begin{table}", "  \\centering", f"  \\caption{{{escape_latex(self.title)}. "]
        lines[-1] += " ".join(escape_latex(note) for note in self.notes) + "}"
        lines += [f"  \\begin{{tabular}}{{{'l' * len(self.stubs)}{'r' * len(self.columns)}}}", "    \\toprule"]
        lines += ["    " + " & ".join(map(escape_latex, (*self.stubs, *self.columns))) + " \\\\", "    \\midrule"]
        for stub, row in zip(self.rows, self.cells, strict=True):
            cells = [marks[c.rank].format(escape_latex(c.text)) for c in row]
            lines.append("    " + " & ".join([*map(escape_latex, stub), *cells]) + " \\\\")
            for place in range(max(len(c.below) for c in row)):
                lower = [c.below[place] if place < len(c.below) else "" for c in row]
                small = [f"{{\\scriptsize {escape_latex(line)}}}" if line else "" for line in lower]
                lines.append("    " + " & ".join([*[""] * len(stub), *small]) + " \\\\")
        lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
        return "\n".join(lines) + "\n"

    def to_html(self) -> str:
        """Return an HTML table; cells carry their value for sorting and their runs as a tooltip."""
        heads = ""
        for place, word in enumerate(self.stubs):
            kind = ' class="stub"' if place else ""
            heads += f'<th scope="col"{kind}><button type="button">{heading_html(word)}</button></th>'
        for place, column in enumerate(self.columns):
            words = heading_html(column)
            own = " ours" if column == self.own else ""
            numbers = any(row[place].value is not None for row in self.cells)  # words have no order
            inner = f'<button type="button">{words}</button>' if self.sortable and numbers else words
            heads += f'<th scope="col" class="num{own}">{inner}</th>'
        rows = []
        for stub, row in zip(self.rows, self.cells, strict=True):
            names = row_head(stub[0], ", ".join(stub[1:]))
            names += "".join(f'<td class="stub">{html.escape(word)}</td>' for word in stub[1:])
            cells = "".join(self._html_cell(c, column) for c, column in zip(row, self.columns, strict=True))
            own = ' class="ours"' if stub[0] == self.own else ""
            rows.append(f"<tr{own}>{names}{cells}</tr>")
        return (
            f'<table class="sortable grid"><caption>{html.escape(self.title)}</caption>'
            f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        )

    def _html_cell(self, cell: Cell, column: str) -> str:
        marks = {0: "{}", 1: "<strong>{}</strong>", 2: "<u>{}</u>"}
        value = "" if cell.value is None else repr(cell.value)
        runs = f' title="{html.escape("runs: " + ", ".join(cell.runs))}"' if cell.runs else ""
        kind = "num" + (" ours" if column == self.own else "") + (" none" if cell.text in MISSING else "")
        kind += " long" if len(cell.text) > LONG else ""
        below = "".join(f"<small>{html.escape(line)}</small>" for line in cell.below)
        text = html.escape(cell.text)
        if len(cell.text) > LONG:  # settings: it may break between them, not inside one
            text = ", ".join(f'<span class="whole">{part}</span>' for part in text.split(", "))
        text = marks[cell.rank].format(text)
        return f'<td class="{kind}" data-value="{value}"{runs}>{text}{below}</td>'

    def to_rich(self, width: int = 100) -> RenderableType:
        """Return the table for a terminal; columns that do not fit in `width` go into further tables below."""
        from rich import box
        from rich.console import Group as Stack
        from rich.table import Table
        from rich.text import Text

        styles = {0: "", 1: "bold", 2: "underline"}
        stub_width = sum(max(map(len, names)) + 2 for names in zip(self.stubs, *self.rows, strict=True))
        parts: list[RenderableType] = []
        for chunk in self._fit(width - stub_width):
            title = None if parts else Text(self.title, style="bold")
            table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
            for word in self.stubs:
                table.add_column(Text(word), no_wrap=True)
            for i in chunk:
                table.add_column(
                    Text(self.columns[i], style="bold" if self.columns[i] == self.own else ""), justify="right"
                )
            for stub, row in zip(self.rows, self.cells, strict=True):
                cells = []
                for i in chunk:
                    text = Text(row[i].text, style=styles[row[i].rank])
                    for line in row[i].below:
                        text.append(f"\n{line}", style="dim not bold not underline")
                    cells.append(text)
                table.add_row(*(Text(word, style="bold" if stub[0] == self.own else "") for word in stub), *cells)
            parts.append(table)
        parts.extend(Text(note, style="dim") for note in self.notes)
        return Stack(*parts)

    def _fit(self, width: int) -> list[list[int]]:
        needs = []
        for i, column in enumerate(self.columns):
            texts = [text for row in self.cells for text in (row[i].text, *row[i].below)]
            needs.append(max([min(len(column), 16), *map(len, texts)]) + 2)
        return in_width(needs, width)
