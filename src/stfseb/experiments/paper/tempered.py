"""The two main tables after one temperature: the same trained models, p^(1/T), normalised, in place of p.

The search of this project compares trials after one temperature, fitted on the validation images, so that a method
is not preferred for the sharpness of its outputs, which one number mends. Here all methods get that number alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stfseb.data.tasks import load_task
from stfseb.experiments.paper.plan import Asked, Plan, Variant, assemble, label_of, methods_of, tasks_of
from stfseb.experiments.paper.quantities import quantities

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOTE = (
    "One temperature T a run minimises the NLL of the validation images; no test image is looked at. Above 1: the "
    "network was too sure of itself."
)
CORRUPTED = "Corrupted images were not evaluated with a temperature: their rows are among the raw ones alone."


def corrupted_note(tasks: Sequence[str]) -> tuple[str, ...]:
    """Return what is to be said where one of the tasks has corrupted images."""
    return (CORRUPTED,) if any(load_task(name).shifts.corruption is not None for name in tasks) else ()


def plan(what: str, asked: Asked) -> Plan:
    """Return the plan: the runs of table 1, evaluated after one temperature each."""
    tasks = tasks_of(asked)
    variants = [Variant(key, label_of(key), key, view="temperature") for key in methods_of(asked)]
    found = {
        name: quantities("acc", "ece", "nll", *(f"auroc/{ood}" for ood in load_task(name).ood), "temperature")
        for name in tasks
    }
    return assemble(
        what,
        "Tables 1 and 2 after one temperature",
        asked,
        tasks,
        dict.fromkeys(tasks, variants),
        found,
        dict.fromkeys(tasks, ("temperature",)),
        notes=(_NOTE, *corrupted_note(tasks)),
    )
