"""What runs cost in card seconds, and the whole paper as a graph of runs for `stfseb.experiments.simulate`.

The table is of one NVIDIA H200: bf16, captured and compiled steps, batch 128, ten samples, 32 context points, random
images of the data sets' shapes, training alone. Two shapes were measured, MNIST's (two convolutions) and CIFAR-10's
(six); other tasks are scaled from these by images and pixels. `docs/scaling.md` has the conditions in words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from stfseb.data.corruptions import CIFAR10_C, MNIST_C
from stfseb.errors import unknown
from stfseb.experiments.executors.plan import planned
from stfseb.experiments.paper.plan import ALL, METHODS, TASKS, Asked, Plan, make_plan
from stfseb.experiments.paper.retuning import FACTORS, grid_plan, retuned_plan
from stfseb.experiments.search.plan import make_plan as make_search
from stfseb.experiments.simulate import Phase, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from stfseb.experiments.jobs import Job

BATCH, CONTEXT, SAMPLES = 128, 32, 10  # of the measurements


@dataclass(frozen=True)
class Shape:
    """A task as its cost sees it; `others` are the unfamiliar images that a run's evaluation looks at."""

    network: str
    images: int
    side: int
    test: int
    others: int
    corrupted: int = 0  # sets of corrupted test images
    angles: int = 13


SHAPES = {
    "mnist": Shape("small", 54_000, 28, 10_000, 28_724, len(MNIST_C)),
    "fmnist": Shape("small", 54_000, 28, 10_000, 28_724),
    "cifar10": Shape("deep", 45_000, 32, 10_000, 26_032, 3 * len(CIFAR10_C)),
    "pathmnist": Shape("deep", 89_996, 28, 7_180, 3_421),
    "organamnist": Shape("small", 34_561, 28, 17_778, 8_827),
}
MEASURED_ON = {"small": "mnist", "deep": "cifar10"}

# Seconds an epoch: `h200/training_2.json`; GFSVI on the deep network of `h200/growth.json`, MAP of the older
# `h200/training.json`.
EPOCH = {
    "small": {"stfseb": 0.218, "mcdropout": 0.174, "mfvi": 0.238, "fseb": 0.291, "gfsvi": 0.728, "map": 0.096},
    "deep": {"stfseb": 0.499, "mcdropout": 0.421, "mfvi": 0.845, "fseb": 1.025, "gfsvi": 2.888, "map": 0.202},
}
# Seconds of compilation and capture, for each place on a card; of GFSVI's no time is recorded: the longest seen.
SET_UP = {
    "small": {"stfseb": 17.0, "mcdropout": 6.5, "mfvi": 19.6, "fseb": 14.0, "gfsvi": 43.0, "map": 7.1},
    "deep": {"stfseb": 22.7, "mcdropout": 12.1, "mfvi": 32.0, "fseb": 24.4, "gfsvi": 43.0, "map": 11.5},
}
PREDICTION = {"small": 0.034, "deep": 0.187}  # seconds for 10,000 images, ten samples, float32
POPULATION = 21.3 / 90 / EPOCH["small"]["stfseb"]  # three runs of 30 epochs on Fashion-MNIST, validation included


@dataclass(frozen=True)
class CostModel:
    """Card seconds of runs.

    Args:
        epochs: that a final run trains; an assumption (at most 100 with patience 10 in the paper).
        trial_epochs: that a trial of a search trains.
        overhead: card time of an epoch in a population, validation and host work included, over training alone.
        table: seconds an epoch on the measured shapes, by network and method.
    """

    epochs: float = 40.0
    trial_epochs: float = 40.0
    overhead: float = POPULATION
    table: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: EPOCH)

    def epoch(self, task: str, method: str, num_context: int = CONTEXT) -> float:
        """Return the seconds of an epoch of training alone; rows of context beyond 32 count like those of data."""
        shape = _shape(task)
        known = self.table[shape.network]
        if method not in known:
            raise unknown("method with a measured cost", method, known)
        base = _shape(MEASURED_ON[shape.network])
        scale = shape.images * shape.side**2 / (base.images * base.side**2)
        rows = (BATCH + num_context) / (BATCH + CONTEXT) if method in ("stfseb", "fseb") else 1.0
        return known[method] * scale * rows

    def evaluation(self, task: str, method: str, parts: Iterable[str] = ()) -> float:
        """Return the seconds of predictions at the end of a run: test, unfamiliar, and turned or corrupted images."""
        shape = _shape(task)
        sets = {"rotation": shape.angles, "corruption": shape.corrupted}
        images = shape.others + shape.test * (1 + sum(sets[part] for part in parts))
        base = _shape(MEASURED_ON[shape.network])
        passes = 1 / SAMPLES if method == "map" else 1.0
        return PREDICTION[shape.network] * images / 10_000 * (shape.side / base.side) ** 2 * passes

    def run(self, job: Job, parts: Iterable[str] = ()) -> Run:
        """Return a run of the paper: trained for `epochs`, or fewer where its job allows no more."""
        number = int(job.settings.get("num_context", CONTEXT))
        epochs = min(self.epochs, float(job.training["epochs"]))
        predictions = self.evaluation(job.task, job.method, parts)
        seconds = epochs * self.epoch(job.task, job.method, number) * self.overhead
        return Run(seconds + predictions, self.set_up(job.task, job.method), _kind(job), epochs)

    def trial(self, job: Job) -> Run:
        """Return a trial of a search, which predicts nothing but validation images."""
        seconds = self.trial_epochs * self.epoch(job.task, job.method) * self.overhead
        return Run(seconds, self.set_up(job.task, job.method), _kind(job), self.trial_epochs)

    def set_up(self, task: str, method: str) -> float:
        """Return the seconds that a place on a card needs before its first step."""
        return SET_UP[_shape(task).network][method]


def search_phase(model: CostModel, trials: int, space: str = "paper") -> Phase:
    """Return the searches of six methods on five tasks; draws that repeat an earlier one are not trained."""
    groups = {}
    for task in TASKS:
        for method in METHODS:
            plan = make_search(task, method, space)
            distinct = {repr(sorted(draw.items())): draw for draw in plan.draws(trials)}
            groups[f"{task} {method}"] = [model.trial(plan.job(draw)) for draw in distinct.values()]
    return Phase(f"search, {trials} trials", groups, claims=True)


def paper_phases(model: CostModel, results: Path, asked: Asked | None = None) -> list[Phase]:
    """Return `stfseb paper all --retuned` as it is carried out: batches of runs, one after another.

    The dof that is retuned is assumed to choose another tau2 than the preset's, so that its runs are new ones.
    """
    asked = asked or Asked()
    done: set[str] = set()
    phases = _batches(model, [make_plan(what, asked) for what in ALL], results, done)
    grid = grid_plan(asked)
    phases += _batches(model, [grid], results, done, "dof grid")
    chosen = retuned_plan(asked, _records_that_choose(grid, FACTORS[1]))
    return phases + _batches(model, [chosen], results, done, "dof retuned")


def _batches(
    model: CostModel, plans: Sequence[Plan], results: Path, done: set[str], title: str = "paper"
) -> list[Phase]:
    """Return the calls of `run_jobs` that `carry_out` makes: one for each set of parts, runs to be timed first."""
    wanted: dict[str, tuple[Job, set[str], bool]] = {}
    for plan in plans:
        for (task, _), cell in plan.jobs.items():
            for job in cell:
                _, parts, alone = wanted.get(job.name, (job, set(), False))
                wanted[job.name] = (job, parts | set(plan.parts[task]), alone or plan.alone)
    batches: dict[tuple[bool, tuple[str, ...]], list[Job]] = {}
    for name, (job, parts, alone) in wanted.items():
        if name not in done:
            batches.setdefault((alone, tuple(sorted(parts))), []).append(job)
    done.update(wanted)
    phases = []
    for (alone, names), jobs in sorted(batches.items(), key=lambda entry: not entry[0][0]):
        groups: dict[str, list[Run]] = {}
        for group, entries in groupby(planned(jobs, results), key=lambda entry: entry.group):
            groups[f"{group[0]} {group[-1]} #{len(groups)}"] = [model.run(entry.job, names) for entry in entries]
        said = ", one run at a time" if alone else f" ({', '.join(names)})" if names else ""
        phases.append(Phase(title + said, groups, width=1 if alone else 3, alone=alone))
    return phases


def by_task_and_method(phases: Iterable[Phase]) -> dict[tuple[str, str], tuple[int, float]]:
    """Return runs and card seconds, set-up not counted, of every task and method."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for phase in phases:
        for name, runs in phase.groups.items():
            task, method = name.split()[:2]
            number, seconds = found.get((task, method), (0, 0.0))
            found[task, method] = (number + len(runs), seconds + sum(run.seconds for run in runs))
    return found


def at_speeds(phases: Iterable[Phase], speeds: Mapping[str, Mapping[str, float]]) -> float:
    """Return the card seconds of the same epochs at other seconds an epoch (by task and method), nothing added."""
    total = 0.0
    for phase in phases:
        for name, runs in phase.groups.items():
            task, method = name.split()[:2]
            total += sum(run.epochs for run in runs) * speeds[task][method]
    return total


def _shape(task: str) -> Shape:
    if task not in SHAPES:
        raise unknown("task with a known cost", task, SHAPES)
    return SHAPES[task]


def _kind(job: Job) -> str:
    """Return what runs must share to use one captured step: not seeds, and of the settings not the continuous ones."""
    fixed = {k: v for k, v in job.settings.items() if not isinstance(v, float) and k not in ("sigma", "tau1", "tau2")}
    return repr((job.task, job.method, job.context, sorted(fixed.items())))


def _records_that_choose(grid: Plan, factor: float) -> dict[str, Any]:
    """Return records of the grid's runs among which this multiple of the preset's tau2 is the best."""
    return {
        job.name: {
            "best_epoch": 1,
            "history": [{"epoch": 1, "validation_nll": 0.0 if key.endswith(f"-{factor:g}") else 1.0}],
        }
        for (_, key), cell in grid.jobs.items()
        for job in cell
    }
