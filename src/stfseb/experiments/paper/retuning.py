"""The dof table with tau2 chosen anew for each dof: a fair comparison of tails, not of strengths.

For every dof, five values of tau2 around the one that ablations start from are tried with the first seed; the one with
the lowest validation NLL is run with all seeds. The choice is read from the records, so that it is the same whenever
and wherever the table is made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task
from stfseb.experiments.paper.ablations import DOFS, dof_key, dof_label
from stfseb.experiments.paper.ablations import plan as plan_at_fixed_tau
from stfseb.experiments.paper.plan import Asked, Plan, Variant, assemble, cell, task_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FACTORS = (0.01, 0.1, 1.0, 10.0, 100.0)
_NOTE = (
    "For each dof the tau2 with the lowest validation NLL of the first seed, of five from a hundredth of the "
    "one it starts from to a hundred times that."
)


def grid_plan(asked: Asked, dofs: Sequence[float] = DOFS) -> Plan:
    """Return the plan of the runs among which tau2 is chosen: these dofs, all tau2, first seed."""
    first = replace(asked, seeds=asked.seeds[:1])
    base = plan_at_fixed_tau("dof", first)
    variants = {task: [v for dof in dofs for v in _trials(task, dof)] for task in base.tasks}
    nothing: dict[str, tuple[str, ...]] = dict.fromkeys(base.tasks, ())
    return assemble(
        "dof-grid", "tau2 for each dof", first, base.tasks, variants, base.quantities, nothing, ablation=True
    )


def retuned_plan(asked: Asked, records: Mapping[str, Mapping[str, Any]], dofs: Sequence[float] = DOFS) -> Plan:
    """Return the dof table at the tau2 that the grid's records choose; cells without a complete grid have no runs."""
    base = plan_at_fixed_tau("dof", asked)
    first = replace(asked, seeds=asked.seeds[:1])
    variants: dict[str, list[Variant]] = {}
    chosen: dict[str, list[str]] = {}  # by task
    for task in base.tasks:
        variants[task] = []
        for dof in dofs:
            best = _best(task, dof, first, records)
            if best is not None:
                label = dof_label(dof)
                variants[task].append(Variant(dof_key(dof), label, "stfseb", best.settings))
                chosen.setdefault(task_label(task), []).append(f"{best.settings['tau2']:g} at {label}")
    return assemble(
        "dof-retuned",
        "Degrees of freedom, tau2 chosen anew for each",
        asked,
        base.tasks,
        variants,
        base.quantities,
        base.parts,
        ablation=True,
        notes=(_NOTE, *_said(chosen)),
    )


def _said(chosen: Mapping[str, Sequence[str]]) -> list[str]:
    """Name the choices, each task once."""
    words = [f"{task}: {', '.join(values)}" for task, values in chosen.items()]
    return [f"Chosen tau2: {'; '.join(words)} (dof)."] if words else []


def validation_nll(record: Mapping[str, Any]) -> float:
    """Return the validation NLL of the epoch that was kept."""
    kept = [e["validation_nll"] for e in record["history"] if e["epoch"] == record["best_epoch"]]
    return float(kept[0]) if kept else min(float(e["validation_nll"]) for e in record["history"])


def _trials(task: str, dof: float) -> list[Variant]:
    tau2 = float(load_task(task).start("stfseb").get("tau2", 100.0))
    return [
        Variant(f"{dof_key(dof)}-{f:g}", dof_label(dof), "stfseb", {"dof": dof, "tau2": _plain(tau2 * f)})
        for f in FACTORS
    ]


def _plain(value: float) -> float:
    """Round away what multiplication by a power of ten leaves: 0.30000000000000004 would be another run than 0.3."""
    return float(f"{value:.12g}")


def _best(task: str, dof: float, first: Asked, records: Mapping[str, Mapping[str, Any]]) -> Variant | None:
    scored = []
    for variant in _trials(task, dof):
        (job,) = cell(task, variant, first, ablation=True)
        if job.name not in records:
            return None
        scored.append((validation_nll(records[job.name]), variant))
    return min(scored, key=lambda pair: pair[0])[1]
