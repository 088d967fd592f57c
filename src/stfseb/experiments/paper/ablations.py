"""ST-FS-EB with one setting changed: degrees of freedom, number of context points, source of the context."""

from __future__ import annotations

import math
from dataclasses import replace

from stfseb.data.tasks import load_task
from stfseb.experiments.paper.plan import Asked, Plan, Variant, assemble_with_aurocs, task_label, tasks_of

DOFS = (2.1, 3.0, 5.0, 10.0, 20.0, math.inf)
NUMBERS = (32, 64, 128)
TITLES = {
    "dof": "Degrees of freedom, at a fixed tau",
    "context-number": "Number of context points",
    "context-source": "Source of the context points",
}
_NOTES = {
    "dof": (
        (
            "At a fixed tau the dof also changes how strong the function prior is: at small c the penalty is "
            "(dof + N_c)/(dof - 2) times the Gaussian's."
        ),
    ),
    "context-number": ("Dof, sigma and tau are the same, whatever the number: the prior of more points is stronger.",),
    "context-source": (
        (
            "Auxiliary: the task's context set, which is a kind of outlier exposure. Train: the training images, "
            "as they are. None: the function term is left out. Dof, sigma and tau are the same, chosen for the "
            "auxiliary set."
        ),
    ),
}


def variants(what: str) -> list[Variant]:
    """Return the columns of an ablation."""
    if what == "dof":
        return [Variant(dof_key(dof), dof_label(dof), "stfseb", {"dof": dof}) for dof in DOFS]
    if what == "context-number":
        return [Variant(str(n), f"{n} points", "stfseb", {"num_context": n}) for n in NUMBERS]
    return [
        Variant("auxiliary", "auxiliary", "stfseb"),
        Variant("train", "train", "stfseb", {"context_copies": 0}, context="train"),
        # The images are not used; "train" is there on every machine.
        Variant("none", "none", "stfseb", {"functional_scale": 0, "context_copies": 0}, context="train"),
    ]


def plan(what: str, asked: Asked) -> Plan:
    """Return the plan of an ablation; the method is ST-FS-EB whatever methods were asked for."""
    if what == "context-source":
        asked = replace(asked, context=None)  # each column chooses its own
    tasks = tasks_of(asked)
    notes: tuple[str, ...] = _NOTES[what]
    if what == "dof":
        own = [f"{task_label(name)} {dof_label(float(load_task(name).start('stfseb')['dof']))}" for name in tasks]
        notes = (*notes, f"Sigma and tau are those that were chosen with dof {', '.join(own)}.")
    keys = ("acc", "ece", "nll") if what == "context-source" else ("acc", "nll")
    return assemble_with_aurocs(
        what, TITLES[what], asked, tasks, lambda _: variants(what), keys, notes=notes, ablation=True
    )


def dof_key(dof: float) -> str:
    """Return the column of a dof, as the paper's numbers name it."""
    return f"{dof:g}"


def dof_label(dof: float) -> str:
    """Return the heading of a dof."""
    return "Gaussian" if math.isinf(dof) else f"{dof:g}"
