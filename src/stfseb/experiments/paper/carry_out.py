"""Carrying plans out: what is not there yet is run, what cannot be run is named with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stfseb.data import sets
from stfseb.data.folder import data_folder
from stfseb.data.sources import OWN_CONTEXTS
from stfseb.data.tasks import HeldOut, load_task
from stfseb.experiments.executors import Outcome, run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from stfseb.experiments.jobs import Job
    from stfseb.experiments.paper.plan import Plan

NO_DATA, FAILED = "no data", "failed"


@dataclass
class Carried:
    """What became of the plans' runs, by name, and for those that are missing the reason."""

    there: set[str] = field(default_factory=set)  # all that have their results
    trained: set[str] = field(default_factory=set)  # of them: now
    measured: set[str] = field(default_factory=set)  # were trained before, and measured now
    elsewhere: set[str] = field(default_factory=set)  # done meanwhile by another command
    missing: dict[str, str] = field(default_factory=dict)  # by run: NO_DATA or FAILED
    reasons: dict[str, None] = field(default_factory=dict)  # lines for the user

    def add(self, outcome: Outcome) -> None:
        """Count in what `run_jobs` did."""
        self.there |= {*outcome.done, *outcome.elsewhere, *outcome.skipped}
        measured = {*outcome.measured}
        self._came({*outcome.done} - measured, measured, {*outcome.elsewhere})
        for name, error in outcome.failed.items():
            self.missing[name] = FAILED
            when = "failed before, and was not tried now" if name in outcome.before else "failed"
            self.reasons[f"{name} {when}: {error}"] = None

    def join(self, other: Carried) -> None:
        """Count in what another call did."""
        self.there |= other.there
        self._came(other.trained, other.measured, other.elsewhere)
        self.missing.update(other.missing)
        self.reasons.update(other.reasons)

    def _came(self, trained: set[str], measured: set[str], elsewhere: set[str]) -> None:
        """Count a run once, however often a command comes to it: by what was done for it first."""
        self.trained |= trained - self.elsewhere
        self.elsewhere |= elsewhere - self.trained
        self.measured = (self.measured | measured) - self.trained - self.elsewhere


def carry_out(
    plans: Sequence[Plan], results: Path, *, announce: Callable[[str], None], folder: Path | None = None, **how: Any
) -> Carried:
    """Run what the plans need and is not on disk; `how` goes to `run_jobs`."""
    carried = Carried()
    batches: dict[tuple[bool, tuple[str, ...]], dict[str, Job]] = {}
    for job, parts, alone in _wanted(plans):
        reason = None if _complete(job, parts, results) else not_on_disk(job, folder)
        if reason is not None:
            carried.reasons[reason] = None
            if not job.done(results):
                carried.missing[job.name] = NO_DATA
                continue
            parts = ()  # what was run elsewhere is shown; what it lacks cannot be measured here
        batches.setdefault((alone, parts), {})[job.name] = job
    to_run = [job for jobs in batches.values() for job in jobs.values() if not job.done(results)]
    for line in [*carried.reasons, *unfamiliar_not_on_disk(to_run, folder)]:
        announce(f"note: {line}")
    for (alone, parts), jobs in sorted(batches.items(), key=lambda entry: not entry[0][0]):
        runs = list(jobs.values())
        carried.add(run_jobs(runs, results, alone=alone, parts=parts, data_folder=folder, announce=announce, **how))
    return carried


def missing_of(plans: Sequence[Plan], results: Path, folder: Path | None = None) -> Carried:
    """Say why runs of the plans are missing, without running any."""
    from stfseb.experiments.executors.failures import read_failure

    carried = Carried()
    for job in {job.name: job for plan in plans for job in plan.all_jobs}.values():
        if job.done(results):
            carried.there.add(job.name)
        elif (failure := read_failure(job.folder(results))) is not None:
            carried.missing[job.name] = FAILED
            carried.reasons[f"{job.name} failed: {failure['error']}"] = None
        elif (reason := not_on_disk(job, folder)) is not None:
            carried.missing[job.name] = NO_DATA
            carried.reasons[reason] = None
    return carried


def not_on_disk(job: Job, folder: Path | None = None) -> str | None:
    """Say which published set of a run is not on disk, None where all are; nothing is read."""
    task, where = load_task(job.task), data_folder(folder)
    needed = [task.train, task.test, *([] if isinstance(task.validation, HeldOut) else [task.validation])]
    for source in needed:
        if _absent(source.kind, source.where, source.splits, where):
            return f"{task.title}: {source} is not on disk, no result{_get(source.where)}"
    own = task.context
    if job.context is None and own is not None and _absent(own.kind, own.where, own.splits, where):
        return f"{task.title}: context {own} is not on disk, no result{_get(own.where)}, or give --context train"
    if job.context not in (None, *OWN_CONTEXTS) and _absent(
        "set", job.context, tuple(sets.get(job.context).splits), where
    ):
        return f"{task.title}: context {job.context} is not on disk, no result{_get(job.context)}"
    return None


def unfamiliar_not_on_disk(jobs: Iterable[Job], folder: Path | None = None) -> list[str]:
    """Say which unfamiliar sets the runs will go without: they are trained all the same, and never looked at again."""
    where, lines = data_folder(folder), []
    for name in dict.fromkeys(job.task for job in jobs):
        task = load_task(name)
        for key, source in task.ood.items():
            if _absent(source.kind, source.where, source.splits, where):
                why = f"{task.title}: {key} is not on disk, runs will have no AUROC against it"
                lines.append(why + _get(source.where))
    return lines


def _get(name: str) -> str:
    return f" ('stfseb data download {name}', or name the folder that has it in STFSEB_DATA)"


def _absent(kind: str, name: str, splits: tuple[str, ...], folder: Path) -> bool:
    """Tell whether a source is a published set of which no wanted split is there."""
    if kind != "set" or name == "mini":
        return False
    published = sets.get(name)
    return all(published.missing(folder, split) for split in splits)


def _wanted(plans: Sequence[Plan]) -> Iterable[tuple[Job, tuple[str, ...], bool]]:
    """Return every run once, with all parts that any plan wants of it."""
    found: dict[str, tuple[Job, set[str], bool]] = {}
    for plan in plans:
        for (task, _), cell in plan.jobs.items():
            for job in cell:
                _, parts, alone = found.setdefault(job.name, (job, set(), plan.alone))
                parts.update(plan.parts[task])
                found[job.name] = (job, parts, alone or plan.alone)
    return [(job, tuple(sorted(parts)), alone) for job, parts, alone in found.values()]


def _complete(job: Job, parts: tuple[str, ...], results: Path) -> bool:
    return job.done(results) and all((job.folder(results) / f"{part}.json").exists() for part in parts)
