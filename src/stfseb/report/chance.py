"""Runs that learnt nothing: their validation NLL is that of guessing, however few their epochs were.

Training warns of a collapse after some epochs alone, since a network may need a few to begin; a table must not call
one best that has not begun. Whoever shows runs marks these with a dagger, names them, and ranks no row that is
mostly made of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stfseb.data.tasks import load_task, task_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stfseb.report.records import Record

_MARGIN = 0.01  # nats below log L that still count as chance, as in training


def learnt_nothing(record: Record) -> bool:
    """Tell whether a run collapsed to a constant prediction, or ended no better than guessing."""
    if record.get("collapsed"):
        return True
    nll, guessing = _kept_nll(record), _guessing(record)
    return nll is not None and guessing is not None and nll >= guessing - _MARGIN


def mostly(fallen: int, count: int) -> bool:
    """Tell whether a mean over `count` runs is one of runs that learnt nothing: then it is not ranked."""
    return fallen > 0 and 2 * fallen >= count


def notes_of(label: str, records: Sequence[Record], counted: str) -> list[str]:
    """Name the runs of a row that learnt nothing, in a line; nothing where all learnt.

    `counted` says what a mean over these and others is, for example "included in the mean".
    """
    fallen = [r for r in records if learnt_nothing(r)]
    if not fallen:
        return []
    who = "the only run" if len(records) == 1 else f"{len(fallen)} of {len(records)} runs"
    ends = [] if len(records) == 1 else [counted]
    ends += ["not ranked"] if mostly(len(fallen), len(records)) else []
    seeds = ", ".join(str(r.get("seed", 0)) for r in fallen)
    if all(r.get("collapsed") for r in fallen):
        return [f"† {label}: {who} collapsed to a constant prediction (seed {seeds}); {' and '.join(ends)}."]
    verb = " is" if len(records) == 1 else ""
    remedy = "Train longer, or see what its settings do."
    return [f"† {label}: {who}{verb} at chance (seed {seeds}: {_figures(fallen)}); {' and '.join(ends)}. {remedy}"]


def _figures(fallen: Sequence[Record]) -> str:
    found = sorted(nll for r in fallen if (nll := _kept_nll(r)) is not None)
    low, high = f"{found[0]:.3f}", f"{found[-1]:.3f}"
    guessing = next(g for r in fallen if (g := _guessing(r)) is not None)
    kind = "validation NLL" if any(r.get("history") for r in fallen) else "NLL"
    return f"{kind} {low if low == high else f'{low} to {high}'}, guessing gives {guessing:.3f}"


def _kept_nll(record: Record) -> float | None:
    """Return the validation NLL of the epoch that was kept, of records without epochs the test images'."""
    epochs = [e["validation_nll"] for e in record.get("history") or [] if e.get("validation_nll") is not None]
    finite = [float(value) for value in epochs if math.isfinite(value)]
    value = min(finite) if finite else record["metrics"].get("nll")
    return None if value is None else float(value)


def _guessing(record: Record) -> float | None:
    """Return the NLL of equal probabilities, None where the number of classes is not known or is one."""
    classes = record.get("classes")
    if classes is None and record["task"] in task_names():
        classes = load_task(record["task"]).classes
    return math.log(classes) if classes and classes > 1 else None
