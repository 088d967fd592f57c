"""The premise: are trained weights, and outputs at context images, heavier tailed than a Gaussian?"""

from __future__ import annotations

from stfseb.experiments.paper.plan import Asked, Plan, Variant, assemble, label_of, methods_of, tasks_of
from stfseb.experiments.paper.quantities import quantities

TASKS = ("mnist", "fmnist", "cifar10")
METHODS = ("stfseb", "mcdropout", "map")
_NOTE = (
    "The inverse of the degrees of freedom of a Student's t with location zero, fitted by maximum likelihood: 0 is a "
    "Gaussian, 1 a Cauchy distribution; 20 is where the fit's range ends, and no estimate. Weights: every tensor "
    "divided by its root mean square. ST-FS-EB's own priors ask for such tails; what they are without it, the other "
    "methods show."
)


def plan(what: str, asked: Asked) -> Plan:
    """Return the plan: ST-FS-EB beside two methods without its priors, at their presets."""
    tasks = tasks_of(asked, TASKS)
    variants = [Variant(method, label_of(method), method) for method in methods_of(asked, METHODS)]
    return assemble(
        what,
        "Fitted tails",
        asked,
        tasks,
        dict.fromkeys(tasks, variants),
        {name: quantities("tails/weights", "tails/context", "tails/test") for name in tasks},
        dict.fromkeys(tasks, ("tails",)),
        notes=(_NOTE,),
    )
