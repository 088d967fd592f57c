"""A table or figure as the runs behind it: tasks against variants, each cell one run a seed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task
from stfseb.errors import StfsebError, unknown
from stfseb.experiments.jobs import Job, make_job
from stfseb.experiments.paper.quantities import auroc_keys, quantities
from stfseb.methods.registry import key_of, method_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stfseb.data.tasks import Task
    from stfseb.experiments.paper.quantities import Quantity

TASKS = ("mnist", "fmnist", "cifar10", "pathmnist", "organamnist")
METHODS = ("stfseb", "fseb", "gfsvi", "mcdropout", "mfvi", "map")
NAMES = {"fmnist": "FMNIST", "mini": "mini"}  # shorter than the tasks' titles, as tables need them
LABELS = dict(zip(METHODS, ("ST-FS-EB", "FS-EB", "GFSVI", "MC Dropout", "MFVI", "MAP"), strict=True))

# What `stfseb paper` knows, and the module that plans it.
KINDS = {
    "table1": "main",
    "table2": "main",
    "tempered": "tempered",
    "figure1": "main",
    "figure2": "main",
    "dof": "ablations",
    "context-number": "ablations",
    "context-source": "ablations",
    "efficiency": "main",
    "readings": "readings",
    "beyond": "beyond",
    "samples": "samples",
    "tails": "tails",
}
OWN_METHODS = ("dof", "context-number", "context-source", "readings", "beyond")  # whatever was asked for
ALL = tuple(what for what in KINDS if what not in ("tempered", "readings", "beyond", "samples", "tails"))


@dataclass(frozen=True)
class Variant:
    """One column (or row) of a table: a method with settings laid over its preset."""

    key: str
    label: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    context: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    view: str | None = None  # the same runs, evaluated otherwise: a part ("temperature") or a set of one ("samples/10")

    def seen(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a run's record as this variant sees it."""
        if self.view is None:
            return record
        name, _, chosen = self.view.partition("/")
        part = (record.get("parts") or {}).get(name) or {}
        found = part.get("sets", {}).get(chosen, {}) if chosen else part.get("metrics", {}) | {name: part.get(name)}
        return {**record, "metrics": found, "parts": {}}


@dataclass(frozen=True)
class Asked:
    """What the user asked for, the same for every table."""

    tasks: tuple[str, ...] | None = None  # None: those of the paper's table
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = tuple(range(10))
    training: dict[str, Any] = field(default_factory=dict)  # over the task's
    context: str | None = None  # for variants that do not choose one themselves


@dataclass(frozen=True)
class Plan:
    """A table or figure: its variants, and for every task and variant the runs of its cell."""

    what: str
    title: str
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    variants: tuple[Variant, ...]
    jobs: dict[tuple[str, str], tuple[Job, ...]]  # by task and the variant's key
    quantities: dict[str, tuple[Quantity, ...]]  # by task
    parts: dict[str, tuple[str, ...]]  # what is measured beside the record, by task
    by_metric: bool = False  # rows go by metric, then task, as the paper's first table
    variants_down: bool = False  # a table a task, variants as its rows
    alone: bool = False  # one run at a time: times and memory are compared
    notes: tuple[str, ...] = ()

    @property
    def all_jobs(self) -> list[Job]:
        """Return every run once."""
        return list({job.name: job for cell in self.jobs.values() for job in cell}.values())

    def present(self, ids: Iterable[str]) -> bool:
        """Tell whether any run of the plan is among `ids`."""
        known = set(ids)
        return any(job.name in known for job in self.all_jobs)


def make_plan(what: str, asked: Asked) -> Plan:
    """Return the plan of one of `KINDS`."""
    if what not in KINDS:
        raise unknown("table or figure", what, [*KINDS, "all"])
    module = importlib.import_module(f"stfseb.experiments.paper.{KINDS[what]}")
    found: Plan = module.plan(what, asked)
    return found


def limited(plans: Sequence[Plan], rows: Sequence[str]) -> list[Plan]:
    """Return the plans with these of their variants alone; where they go down, the first, the preset, stays."""
    known = [v.key for plan in plans for v in plan.variants]
    for row in rows:
        if row not in known:
            raise unknown("row", row, list(dict.fromkeys(known)))
    found = []
    for plan in plans:
        kept = tuple(v for v in plan.variants if v.key in rows)
        if not kept:
            raise StfsebError(f"--rows {','.join(rows)}: {plan.what} has none of them; leave {plan.what} out")
        if plan.variants_down and plan.variants[0] not in kept:
            kept = (plan.variants[0], *kept)
        keys = {v.key for v in kept}
        found.append(replace(plan, variants=kept, jobs={k: cell for k, cell in plan.jobs.items() if k[1] in keys}))
    return found


def assemble(
    what: str,
    title: str,
    asked: Asked,
    tasks: Sequence[str],
    variants: Mapping[str, Sequence[Variant]],
    quantities: Mapping[str, tuple[Quantity, ...]],
    parts: Mapping[str, tuple[str, ...]],
    *,
    ablation: bool = False,
    **more: Any,
) -> Plan:
    """Return the plan whose variants may differ from task to task; of an ablation they change what it starts from."""
    if not asked.seeds:
        raise StfsebError("nothing to run: give at least one seed")
    started = [line for task in tasks for line in _starts(task, variants[task])] if ablation else []
    more["notes"] = (*more.get("notes", ()), *started, *_conditions(asked))
    everything = {v.key: v for task in tasks for v in variants[task]}
    jobs = {(task, v.key): cell(task, v, asked, ablation=ablation) for task in tasks for v in variants[task]}
    return Plan(
        what, title, asked.seeds, tuple(tasks), tuple(everything.values()), jobs, dict(quantities), dict(parts), **more
    )


def assemble_with_aurocs(
    what: str,
    title: str,
    asked: Asked,
    tasks: Sequence[str],
    variants: Callable[[Task], Sequence[Variant]],
    keys: Sequence[str] = ("acc", "ece", "nll"),
    **more: Any,
) -> Plan:
    """Return the plan whose rows are these metrics and the AUROC against every set of the task, corrupted ones too."""
    loaded = {name: load_task(name) for name in tasks}
    rows = {name: quantities(*keys, *auroc_keys(task)) for name, task in loaded.items()}
    parts = {name: corruption_parts(task) for name, task in loaded.items()}
    return assemble(
        what, title, asked, tasks, {name: variants(task) for name, task in loaded.items()}, rows, parts, **more
    )


def _conditions(asked: Asked) -> list[str]:
    """Say what of the task's own way was changed for all runs."""
    words = [f"{name.replace('_', ' ')} {value}" for name, value in asked.training.items()]
    lines = [f"Trained with {', '.join(words)} in place of the task's own."] if words else []
    return lines + ([f"Context: {asked.context}, not the task's own."] if asked.context else [])


def _starts(name: str, variants: Sequence[Variant]) -> list[str]:
    """Say what a task's ablation starts from where that is not the preset."""
    task = load_task(name)
    named = ["map" if v.method == "ensemble" else v.method for v in variants]
    methods = [m for m in dict.fromkeys(named) if task.ablated.get(m)]
    words = [f"{label_of(m)} at {', '.join(map(_setting, task.ablated[m].items()))}" for m in methods]
    return [f"{task_label(name)} starts from {'; '.join(words)}: not what the main tables have."] if words else []


def _start(name: str, method: str) -> dict[str, Any]:
    """Return what an ablation lays over a method's preset before anything else."""
    found = load_task(name).ablated.get(method, {})
    known = method_class(method).settings_type.names() if found else ()
    for setting in found:
        if setting not in known:
            raise StfsebError(f"{name}: ablated: {method}: {unknown('setting', setting, known)}")
    return found


def _setting(named: tuple[str, Any]) -> str:
    name, value = named
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def cell(task: str, variant: Variant, asked: Asked, *, ablation: bool = False) -> tuple[Job, ...]:
    """Return the runs of one cell, one a seed."""
    start = _start(task, variant.method) if ablation else {}
    return tuple(
        make_job(
            task,
            variant.method,
            seed,
            settings={**start, **variant.settings},
            training={**asked.training, **variant.training},
            context=variant.context or asked.context,
        )
        for seed in asked.seeds
    )


def methods_of(asked: Asked, default: Sequence[str] = METHODS) -> list[str]:
    """Return the keys of the methods, each once, or the default ones, in the order that all tables have."""
    keys = dict.fromkeys(key_of(name) for name in asked.methods or default)
    return sorted(keys, key=lambda key: METHODS.index(key) if key in METHODS else len(METHODS))


def corruption_parts(task: Task) -> tuple[str, ...]:
    """Return the part that the task's AUROC against corrupted images needs."""
    return ("corruption",) if task.shifts.corruption is not None else ()


def tasks_of(asked: Asked, default: Sequence[str] = TASKS) -> list[str]:
    """Return the tasks, each once, checked to exist."""
    names = list(dict.fromkeys(asked.tasks or default))
    for name in names:
        load_task(name)
    return names


def label_of(method: str) -> str:
    """Return a method's name for people."""
    return LABELS.get(method) or method_class(method).label


def task_label(name: str) -> str:
    """Return a task's name for tables."""
    return NAMES.get(name) or load_task(name).title
