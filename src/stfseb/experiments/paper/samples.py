"""How many Monte Carlo samples at test time? The same trained models, evaluated with 1, 10 and 100."""

from __future__ import annotations

from stfseb.data.tasks import load_task
from stfseb.experiments.paper.plan import Asked, Plan, Variant, assemble, label_of, methods_of, tasks_of
from stfseb.experiments.paper.quantities import quantities
from stfseb.experiments.shifts import COUNTS

TASKS = ("mnist", "fmnist", "cifar10")


def plan(what: str, asked: Asked) -> Plan:
    """Return the plan: ST-FS-EB unless other methods are asked for, as ablations have them."""
    tasks = tasks_of(asked, TASKS)
    methods = methods_of(asked, ("stfseb",))
    variants = [
        Variant(
            f"{method}-{n}", f"{n}" if len(methods) == 1 else f"{label_of(method)}, {n}", method, view=f"samples/{n}"
        )
        for method in methods
        for n in COUNTS
    ]
    return assemble(
        what,
        "Monte Carlo samples at test time",
        asked,
        tasks,
        dict.fromkeys(tasks, variants),
        {name: quantities("acc", "ece", "nll", *(f"auroc/{ood}" for ood in load_task(name).ood)) for name in tasks},
        dict.fromkeys(tasks, ("samples",)),
        ablation=True,
        notes=(
            f"Method: {', '.join(map(label_of, methods))}. Models are trained and chosen as everywhere else.",
            f"Fewer than {COUNTS[-1]} samples: mean over up to ten disjoint groups of the {COUNTS[-1]}.",
        ),
    )
