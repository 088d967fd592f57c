"""What goes beyond the paper, and what experts will ask for, each beside the ST-FS-EB that it changes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stfseb.experiments.paper.plan import Asked, Plan, Variant, assemble_with_aurocs, tasks_of

if TYPE_CHECKING:
    from stfseb.data.tasks import Task

TASKS = ("mnist", "fmnist", "cifar10")
# Images that are no relatives of the unfamiliar sets: KMNIST's glyphs are, of MNIST's and notMNIST's.
_LEFT_OUT = {"fmnist": ("cifar100", "context: CIFAR-100 in grey"), "mnist": ("cifar100", "context: CIFAR-100 in grey")}
# What the recorded searches chose by the lowest NLL alone (the paper's rule) and by the lowest NLL of level AUROCs, and
# what a longer one chose by ours; where rows start from is what the search chose by ours.
_LEVEL = "chosen by NLL where AUROCs are level"
_CHOSEN: dict[str, list[Variant]] = {
    "mnist": [
        Variant(
            "paper-rule",
            "chosen by the paper's rule",
            "stfseb",
            {"dof": 10.0, "sigma": 10.0, "tau1": 0.01, "tau2": 1000.0},
        ),
    ],
    "fmnist": [
        Variant(
            "paper-rule",
            "chosen by the paper's rule",
            "stfseb",
            {"dof": 20.0, "sigma": 10.0, "tau1": 3000.0, "tau2": 3.0},
        ),
        Variant("level-rule", _LEVEL, "stfseb", {"dof": 5.0, "sigma": 3.0, "tau1": 3.0, "tau2": 30.0}),
        Variant(
            "trials-300",
            "chosen among 300 trials",
            "stfseb",
            {"dof": 3.0, "sigma": 10.0, "tau1": 1000.0, "tau2": 0.1},
        ),
        Variant("mcdropout-level-rule", f"MC Dropout, {_LEVEL}", "mcdropout", {"sigma": 5.0}),
    ],
}
COPIES = 4  # distorted ones of each context image
_LEARNT = (("dof",), ("tau",), ("sigma",), ("dof", "tau", "sigma"))


def variants(task: Task) -> list[Variant]:
    """Return the rows of a task: changes to ST-FS-EB, then other methods."""
    chosen = _CHOSEN.get(task.name, [])
    found = [Variant("preset", "ST-FS-EB", "stfseb"), *(v for v in chosen if v.method == "stfseb")]
    found += [
        Variant("gaussian-weights", "t for the function, Gaussian weights", "stfseb", {"dof_weights": math.inf}),
        Variant("gaussian-function", "Gaussian function, t for the weights", "stfseb", {"dof_function": math.inf}),
        Variant("curvature", "curvature-matched dof", "stfseb", {"parametrisation": "curvature"}),
    ]
    found += [
        Variant("learn-" + "-".join(names), f"learnt {', '.join(names)}", "stfseb", {"learn": list(names)})
        for names in _LEARNT
    ]
    found.append(_other_context(task, "stfseb"))
    found.append(
        Variant("distorted", "context: distorted training images", "stfseb", {"context_copies": 0}, context="distorted")
    )
    if task.name in _LEFT_OUT:
        context, label = _LEFT_OUT[task.name]
        found.append(Variant(f"context-{context}", label, "stfseb", context=context))
    found += [
        Variant("fseb", "FS-EB", "fseb"),
        _other_context(task, "fseb", "FS-EB, "),
        Variant("mcdropout", "MC Dropout", "mcdropout"),
        *(v for v in chosen if v.method == "mcdropout"),
        Variant("outlierexposure", "MC Dropout + outlier exposure", "outlierexposure", _as_control(task)),
        _other_context(task, "outlierexposure", "MC Dropout + outlier exposure, "),
        Variant("ensemble", "deep ensemble, 5 MAP", "ensemble", {"of": "map", "members": 5, **_members(task)}),
    ]
    return found


def _members(task: Task) -> dict[str, Any]:
    """Return the settings of an ensemble's members where they are not those of MAP's preset."""
    return {"settings": dict(task.ablated["map"])} if "map" in task.ablated else {}


def _other_context(task: Task, method: str, label: str = "") -> Variant:
    """Return a method with distorted copies of the context where its preset has none, and without them where it has."""
    key = "" if method == "stfseb" else f"{method}-"
    own = _as_control(task) if method == "outlierexposure" else {}
    if task.start(method).get("context_copies"):
        return Variant(f"{key}plain-context", f"{label}context without copies", method, {**own, "context_copies": 0})
    return Variant(f"{key}copies", f"{label}context with {COPIES} copies", method, {**own, "context_copies": COPIES})


def _as_control(task: Task) -> dict[str, float]:
    """Return what outlier exposure has of MC Dropout's preset, so that the two differ in the context term alone."""
    control, own = task.start("mcdropout"), task.presets.get("outlierexposure", {})
    return {"sigma": control["sigma"]} if "sigma" in control and "sigma" not in own else {}


def plan(what: str, asked: Asked) -> Plan:
    """Return the plan of all additions."""
    tasks = tasks_of(asked, TASKS)
    return assemble_with_aurocs(what, "Beyond the paper", asked, tasks, variants, variants_down=True, ablation=True)
