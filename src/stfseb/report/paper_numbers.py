"""What the paper printed, with its errata: figures to set beside ours, never to stand in for a missing one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Printed:
    """A printed cell, its misprint mended: mean and sample standard deviation over ten seeds, and what to know."""

    mean: float
    std: float | None
    note: str = ""

    def deviations(self, ours: float) -> float | None:
        """Return how far ours lies above, in the paper's standard deviations; None where it printed none, or 0."""
        return (ours - self.mean) / self.std if self.std else None


@cache
def numbers() -> dict[str, Any]:
    """Return the whole file."""
    found: dict[str, Any] = json.loads((files("stfseb.report") / "paper_numbers.json").read_text(encoding="utf-8"))
    return found


def printed(table: str, task: str, quantity: str, column: str) -> Printed | None:
    """Return the paper's cell, None where it has none. `table` is as `stfseb paper` names it."""
    cell = numbers()["tables"].get(table, {}).get(task, {}).get(quantity, {}).get(column)
    if cell is None:
        return None
    about = [e["note"] for e in numbers()["errata"] if (e["table"], e["task"], e["quantity"]) == (table, task, quantity)
             and e["column"] in (None, column)]  # fmt: skip
    return Printed(cell[0], cell[1], "; ".join(about))


def errata(table: str, tasks: tuple[str, ...]) -> list[str]:
    """Return what is to be said of the paper's table as a whole, for the tasks shown."""
    return [
        e["note"]
        for e in numbers()["errata"]
        if e["table"] == table and e["quantity"] is None and (e["task"] is None or e["task"] in tasks)
    ]
