"""Tables of runs: mean and deviation over seeds, best bold and second underlined, in four formats.

Marks follow the printed digits, so that numbers that read the same carry the same mark; they rank means and
are no claim of significance.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stfseb.report.chance import notes_of
from stfseb.report.records import (
    SHARED,
    Group,
    Record,
    Spread,
    by_task,
    groups,
    ood_families,
    shared_device,
    spread,
    title_of,
)
from stfseb.report.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import RenderableType

LONG = 24  # characters that the name of a row has on one line


@dataclass(frozen=True)
class Column:
    """One quantity: how to read it from a record, how to print it and which direction is better."""

    title: str
    value: Callable[[Record], float | None]
    higher: bool | None = None  # None: no direction, no marks
    scale: float = 1.0
    digits: int = 3
    unit: str = ""

    @property
    def heading(self) -> str:
        """The title with its unit and an arrow towards the better."""
        arrow = {True: " ↑", False: " ↓", None: ""}[self.higher]
        return f"{self.title}{', ' + self.unit if self.unit else ''}{arrow}"


@dataclass(frozen=True)
class Cell:
    """A printed number; `rank` is 1 for the best, 2 for the second, 0 for the rest."""

    text: str
    value: float | None
    rank: int = 0


@dataclass(frozen=True)
class Table:
    """A task's methods against quantities."""

    name: str
    title: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    cells: tuple[tuple[Cell, ...], ...]
    own_notes: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What a reader must know beside the numbers."""
        counts = sorted({len(g.records) for g in self.groups})
        if counts == [1]:
            lines = ["One seed a method: differences of the size of seed noise mean nothing."]
        else:
            seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            lines = [f"Mean ± sample standard deviation over {seeds} seeds."]
        if any(cell.rank for row in self.cells for cell in row):
            lines.append("Best mean bold, second underlined; arrows point to the better direction.")
        for group in self.groups:
            lines += notes_of(group.label, group.records, "included in the mean")
        return [*lines, *self.own_notes]

    def cut(self, most: int) -> Table:
        """Return the table with its first rows alone."""
        return replace(self, groups=self.groups[:most], cells=self.cells[:most])

    def labels(self) -> list[str]:
        """Return the row names, marked where runs learnt nothing."""
        return [g.shown for g in self.groups]

    def to_markdown(self) -> str:
        """Return a Markdown table with its title and notes."""
        marks = {0: "{}", 1: "**{}**", 2: "<ins>{}</ins>"}
        lines = [f"### {escape_markdown(self.title)}", ""]
        lines.append("| Method | " + " | ".join(escape_markdown(c.heading) for c in self.columns) + " |")
        lines.append("|:--|" + "--:|" * len(self.columns))
        for label, row in zip(self.labels(), self.cells, strict=True):
            cells = [marks[c.rank].format(c.text) if c.text else "" for c in row]
            lines.append(f"| {escape_markdown(label)} | " + " | ".join(cells) + " |")
        return "\n".join([*lines, "", *(escape_markdown(note) + "  " for note in self.notes)]) + "\n"

    def to_latex(self) -> str:
        """Return a LaTeX table for the booktabs package."""
        marks = {0: "{}", 1: "\\textbf{{{}}}", 2: "\\underline{{{}}}"}
        head = " & ".join(escape_latex(c.heading) for c in self.columns)
        lines = ["\\begin{table}", "  \\centering", f"  \\caption{{{escape_latex(self.title)}. "]
        lines[-1] += " ".join(escape_latex(note) for note in self.notes) + "}"
        lines += [f"  \\begin{{tabular}}{{l{'r' * len(self.columns)}}}", "    \\toprule"]
        lines += [f"    Method & {head} \\\\", "    \\midrule"]
        for label, row in zip(self.labels(), self.cells, strict=True):
            cells = [marks[c.rank].format(escape_latex(c.text)) if c.text else "--" for c in row]
            lines.append(f"    {escape_latex(label)} & " + " & ".join(cells) + " \\\\")
        lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
        return "\n".join(lines) + "\n"

    def to_html(self) -> str:
        """Return an HTML table whose cells carry their value for sorting."""
        heads = "".join(_head(c.heading, "num") for c in self.columns)
        marks = {0: "{}", 1: "<strong>{}</strong>", 2: "<u>{}</u>"}
        rows = []
        for group, label, row in zip(self.groups, self.labels(), self.cells, strict=True):
            cells = "".join(
                f'<td class="num" data-value="{"" if c.value is None else repr(c.value)}">'
                f"{marks[c.rank].format(html.escape(c.text)) if c.text else '–'}</td>"
                for c in row
            )
            own = ' class="ours"' if group.ours else ""
            rows.append(f"<tr{own}>{row_head(label)}{cells}</tr>")
        return (
            f'<table class="sortable"><caption>{html.escape(self.title)}</caption>'
            f"<thead><tr>{_head('Method', '')}{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        )

    def to_rich(self, width: int = 100) -> RenderableType:
        """Return the table for a terminal; columns that do not fit in `width` go into further tables below."""
        from rich import box
        from rich.console import Group as Stack
        from rich.table import Table as RichTable
        from rich.text import Text

        styles = {0: "", 1: "bold", 2: "underline"}
        first = max([len("Method"), *map(len, self.labels())])
        parts: list[RenderableType] = []
        for chunk in _fit(self, width - first - 3):
            title = None if parts else Text(self.title, style="bold")
            table = RichTable(
                box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left"
            )
            table.add_column("Method", no_wrap=True)
            for i in chunk:
                table.add_column(Text(_short(self.columns[i])), justify="right", no_wrap=True)
            for group, label, row in zip(self.groups, self.labels(), self.cells, strict=True):
                cells = [Text(row[i].text or "–", style=styles[row[i].rank]) for i in chunk]
                table.add_row(Text(label, style="bold" if group.ours else ""), *cells)
            parts.append(table)
        parts.extend(Text(note, style="dim") for note in self.notes)
        return Stack(*parts)


def main_table(records: Sequence[Record]) -> Table:
    """Return the table people look at first: how good, how honest, how well unfamiliar images stand out."""
    columns = [
        Column("Accuracy", _metric("acc"), True, 100, 2, "%"),
        Column("NLL", _metric("nll"), False),
        Column("ECE", _metric("ece"), False),
        Column("Brier", _metric("brier"), False),
    ]
    for name, sets in ood_families(records).items():
        columns.append(Column(f"AUROC {name}", _mean_metric("auroc", sets), True, 100, 2, "%"))
    table = build("main", title_of(records), records, columns)
    return replace(table, own_notes=reference_notes(g.label for g in table.groups if g.reference))


def reference_notes(labels: Iterable[str]) -> tuple[str, ...]:
    """Say which rows are references; nothing where none is."""
    names = list(dict.fromkeys(labels))
    if not names:
        return ()
    rows = "a reference row" if len(names) == 1 else "reference rows"
    return (f"{listed(names)}: {rows}, beside the methods that are compared.",)


def ood_table(records: Sequence[Record], name: str, sets: Sequence[str]) -> Table:
    """Return every detection number for one unfamiliar set, or for the mean over a family of them."""
    columns = []
    for score, suffix in (("MSP", ""), ("entropy", "/entropy"), ("MI", "/mutual_information")):
        for kind, title, higher in (("auroc", "AUROC", True), ("aupr", "AUPR", True), ("fpr95", "FPR95", False)):
            value = _mean_metric(kind, [s + suffix for s in sets])
            columns.append(Column(f"{title} {score}", value, higher, 100, 2, "%"))
    return build(f"ood-{name}", f"{title_of(records)}: {name}", records, columns)


def cost_table(records: Sequence[Record]) -> Table:
    """Return what training cost: time, memory, epochs; times of runs that shared a card are not ranked."""
    shared = shared_device(records)
    better = None if shared else False
    columns = [
        Column("Training", lambda r: r.get("seconds"), better, 1, 1, "s"),
        Column("An epoch", lambda r: r.get("seconds_per_epoch"), better, 1, 2, "s"),
        Column("Peak memory", lambda r: r.get("peak_memory_mb"), False, 1, 0, "MB"),
        Column("Epochs", lambda r: len(r.get("history") or []) or None, None, 1, 0),
        Column("Best epoch", lambda r: r.get("best_epoch"), None, 1, 0),
    ]
    table = build("cost", f"{title_of(records)}: cost of training", records, columns)
    return replace(table, own_notes=(SHARED,)) if shared else table


def tables(records: Sequence[Record]) -> list[Table]:
    """Return all tables, task by task: the main one, the detection scores of each unfamiliar set, the cost."""
    found = []
    for members in by_task(records).values():
        details = [ood_table(members, name, sets) for name, sets in ood_families(members).items()]
        found += [main_table(members), *details, cost_table(members)]
    return found


def build(name: str, title: str, records: Sequence[Record], columns: Sequence[Column]) -> Table:
    """Return the table of `columns` for the records of one task, without the columns that no run has."""
    rows = groups(records)
    spreads = [[spread([c.value(r) for r in g.records]) for g in rows] for c in columns]
    kept = [i for i, found in enumerate(spreads) if any(s is not None for s in found)]
    by_column = [_cells(columns[i], spreads[i], [g.failed for g in rows]) for i in kept]
    cells = tuple(tuple(column[j] for column in by_column) for j in range(len(rows)))
    return Table(name, title, tuple(columns[i] for i in kept), tuple(rows), cells)


def _cells(column: Column, spreads: Sequence[Spread | None], failed: Sequence[bool]) -> list[Cell]:
    """Return a column's cells with their ranks; rows of runs that learnt nothing have none."""
    printed = [None if s is None else round(s.mean * column.scale, column.digits) for s in spreads]
    standing = {p for p, out in zip(printed, failed, strict=True) if p is not None and not out}
    values = sorted(standing, reverse=bool(column.higher))
    marked = column.higher is not None and len(values) > 1  # nothing is best where nothing differs
    cells = []
    for found, shown, out in zip(spreads, printed, failed, strict=True):
        if found is None or shown is None:
            cells.append(Cell("", None))
            continue
        text = f"{shown:.{column.digits}f}"
        if found.std is not None:
            text += f" ± {found.std * column.scale:.{column.digits}f}"
        place = 0 if out else values.index(shown) + 1
        rank = place if marked and place <= 2 else 0
        cells.append(Cell(text, found.mean * column.scale, rank))
    return cells


def _metric(key: str) -> Callable[[Record], float | None]:
    return lambda record: record["metrics"].get(key)


def _mean_metric(kind: str, sets: Sequence[str]) -> Callable[[Record], float | None]:
    """Read the mean over sets, None unless the record has them all."""

    def value(record: Record) -> float | None:
        found = [record["metrics"].get(f"{kind}/{name}") for name in sets]
        return None if None in found else sum(found) / len(found)

    return value


def _fit(table: Table, width: int) -> list[list[int]]:
    headings = [max(map(len, _short(column).split("\n"))) for column in table.columns]
    return in_width([max([h, *(len(row[i].text) for row in table.cells)]) + 2 for i, h in enumerate(headings)], width)


def in_width(needs: Sequence[int], width: int) -> list[list[int]]:
    """Return the columns, which need so many characters each, in groups that fit beside each other."""
    chunks: list[list[int]] = [[]]
    used = 0
    for i, need in enumerate(needs):
        if used + need > width and chunks[-1]:
            chunks.append([])
            used = 0
        chunks[-1].append(i)
        used += need
    return chunks


def _short(column: Column) -> str:
    """Break a heading before the name of the set, so that columns stay as narrow as their numbers."""
    kind, _, _name = column.title.partition(" ")
    rest = column.heading.removeprefix(kind).lstrip(" ,")
    return f"{kind}\n{rest}" if len(column.heading) > 12 else column.heading


def _head(text: str, kind: str) -> str:
    return f'<th scope="col" class="{kind}"><button type="button">{heading_html(text)}</button></th>'


def row_head(label: str, more: str = "") -> str:
    """Return a row's name for HTML; a long one, such as a method with its settings, may take several lines.

    `more` stands in columns of its own, and on a narrow screen, which would scroll them away, under the name.
    """
    kind = ' class="long"' if len(label) > LONG else ""
    below = f'<small class="narrow">{html.escape(more)}</small>' if more else ""
    return f'<th scope="row"{kind}>{html.escape(label)}{below}</th>'


def heading_html(text: str) -> str:
    """Return a heading that breaks neither before its arrow nor inside a name with hyphens."""
    kept = html.escape(text).replace(" ↑", "\u00a0↑").replace(" ↓", "\u00a0↓")
    return " ".join(f'<span class="whole">{word}</span>' if "-" in word else word for word in kept.split(" "))


def escape_markdown(text: str) -> str:
    """Return text that Markdown prints as it is."""
    for mark in "\\`*_[]<>|#":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints as it is."""
    special = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
    special |= {c: "\\" + c for c in "&%$#_{}"}
    special |= {
        "±": "$\\pm$",
        "↑": "$\\uparrow$",
        "↓": "$\\downarrow$",
        "†": "$\\dagger$",
        "–": "--",
        "−": "$-$",
        "‡": "$\\ddagger$",
    }
    special |= {"<": "\\textless{}", ">": "\\textgreater{}"}
    return " ".join("".join(special.get(c, c) for c in text).split())
