"""The cards over a task's main table: of each quantity who is best, and where the project's own method stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stfseb.report.words import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stfseb.report.tables import Cell, Column, Table

_LEFT_OUT = ("ECE", "Brier")  # in the table; four cards are what one takes in


def cards_of(table: Table) -> list[dict[str, Any]]:
    """Return the cards: a title, the best value, lines on whose it is, and whether it is the project's own."""
    made = [_card(table, place, column) for place, column in enumerate(table.columns) if column.title not in _LEFT_OUT]
    return [card for card in made if card is not None]


def _card(table: Table, place: int, column: Column) -> dict[str, Any] | None:
    """Return a card, None where nothing is best; a reference row that leads is named as such, and who is next."""
    cells = [row[place] for row in table.cells]
    best = [i for i, cell in enumerate(cells) if cell.rank == 1]
    if not best:
        return None
    labels = [g.shown + (" (reference row)" if g.reference else "") for g in table.groups]
    lines = [listed(labels[i] for i in best)]
    named = set(best)
    if all(table.groups[i].reference for i in best):
        first = _best_method(table, cells, column)
        lines += [f"of the methods: {listed(labels[i] for i in first)} {cells[first[0]].text}"] if first else []
        named |= set(first)
    own = [i for i, g in enumerate(table.groups) if g.ours and i not in named and cells[i].text]
    lines += [f"{labels[i]} {cells[i].text}" for i in own[:1]]
    unit = f", {column.unit}" if column.unit else ", nats" if column.title == "NLL" else ""
    title = "accuracy" if column.title == "Accuracy" else column.title
    return {
        "title": f"{'Highest' if column.higher else 'Lowest'} {title}{unit}",
        "value": cells[best[0]].text,
        "lines": lines,
        "ours": any(table.groups[i].ours for i in best),
    }


def _best_method(table: Table, cells: Sequence[Cell], column: Column) -> list[int]:
    """Return the rows that are best among the methods, reference rows and what learnt nothing left out."""
    found = {
        i: round(cell.value, column.digits)
        for i, (group, cell) in enumerate(zip(table.groups, cells, strict=True))
        if cell.value is not None and not group.reference and not group.failed
    }
    top = (max if column.higher else min)(found.values(), default=None)
    return [i for i, value in found.items() if value == top]
