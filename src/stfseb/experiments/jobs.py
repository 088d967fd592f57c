"""A run as plain data: what it is, where its results lie, whether they are there, and how it is done.

A results folder holds `runs/TASK/METHOD-seedN-HASH/`, one folder a run. The hash is of everything that defines
the run (`Job.identity`), so the same run has the same folder on every machine, results of several machines are
merged by copying, and what is there is not done again. `record.json` is written last: a folder that has one is
complete, and is never written to again except for parts that are added beside it.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import definition_of, load_task
from stfseb.errors import StfsebError, unknown
from stfseb.experiments.records import RECORD, read_record
from stfseb.experiments.run import (
    CHECKPOINT,
    RunConfig,
    evaluate_and_record,
    make_method,
    refuse_reserved,
    train_and_evaluate,
)
from stfseb.experiments.run import augmentation as _augmentation
from stfseb.experiments.run import protocol_of as _protocol
from stfseb.methods.registry import key_of, method_class
from stfseb.training.population import Member, fit_population

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stfseb.data.tasks import Task, TaskData
    from stfseb.methods.base import Method

__all__ = ["RECORD", "Job", "make_job", "perform", "perform_together"]
_OF_ENSEMBLES = ("of", "members", "settings")


@dataclass(frozen=True)
class Job:
    """One run: a task, a method with all its settings, how it is trained, its context and its seed."""

    task: str  # a built-in task's name or the path of a task file
    method: str
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # complete: the preset is in it
    training: dict[str, Any] = field(default_factory=dict)  # complete
    context: str | None = None  # None: the task's own; "train", "distorted", or the name of a set
    definition: str = ""  # fingerprint of a user's task file: an edited one is another task

    @property
    def identity(self) -> dict[str, Any]:
        """Return what defines the run; equal identities give equal results on equal machines."""
        known = {**asdict(self), "task": load_task(self.task).name}
        return known if self.definition else {k: v for k, v in known.items() if k != "definition"}

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        text = json.dumps(self.identity, sort_keys=True, separators=(",", ":"))
        return f"{self.method}-seed{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def folder(self, results: Path) -> Path:
        """Return where the run's results lie below a results folder."""
        return results / "runs" / load_task(self.task).name / self.name

    def done(self, results: Path) -> bool:
        """Tell whether the run is complete."""
        return (self.folder(results) / RECORD).exists()

    def record(self, results: Path) -> dict[str, Any]:
        """Read the run's record."""
        return read_record(self.folder(results) / RECORD)

    def config(self, device: str) -> RunConfig:
        """Return the run's settings for a device."""
        return RunConfig(self.method, self.seed, self.settings, self.training, device, complete=True)

    def load(self, folder: Path | None = None) -> TaskData:
        """Bring the images of the run's task, with its context."""
        if self.definition and self.definition != definition_of(self.task):
            raise StfsebError(
                f"{self.task}, or its network's file, has changed since the run was planned: start the command again"
            )
        return load_task(self.task).load(folder, context=self.context)


def make_job(
    task: str,
    method: str,
    seed: int = 0,
    *,
    settings: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    context: str | None = None,
) -> Job:
    """Return the job whose settings are the task's preset, with these laid over it.

    Equal settings make one run however they are written (3 or 3.0, names in any order); a setting that the method does
    not have is refused.
    """
    key, known = key_of(method), load_task(task)
    whole = _complete(known, key, settings or {}, training or {})
    return Job(task, key, seed, *whole, context, definition_of(task))


def _complete(
    task: Task, key: str, settings: dict[str, Any], training: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    whole, trained = {**task.presets.get(key, {}), **settings}, {**task.training, **training}
    if key == "ensemble":  # what defines its runs is its members' preset
        for name in whole:
            if name not in _OF_ENSEMBLES:
                raise unknown("setting", name, _OF_ENSEMBLES)
        of = key_of(str(whole.get("of", "map")))
        members, _ = _complete(task, of, whole.get("settings", {}), {})
        return {"members": 5, **whole, "of": of, "settings": members}, trained
    refuse_reserved(whole)
    return method_class(key).settings_type.plain(whole), trained


def perform(
    job: Job,
    results: Path,
    data: TaskData,
    *,
    device: str,
    progress: bool = False,
    beside: int = 1,
    after: Callable[[Job, Method], None] | None = None,
) -> dict[str, Any]:
    """Do one run and return its record; the caller has made sure that nobody else is doing it.

    `after` is called with the trained method once the record is written. `beside` is how many processes, this one
    among them, do runs on the device: the record says it.
    """
    method, record = train_and_evaluate(
        data, job.config(device), job.folder(results), progress=progress, together=beside, more=_more(job)
    )
    if after is not None:
        after(job, method)
    return record


def perform_together(
    jobs: Sequence[Job],
    results: Path,
    data: TaskData,
    *,
    device: str,
    width: int = 3,
    beside: int = 1,
    after: Callable[[Job, Method], None] | None = None,
) -> Iterator[tuple[Job, dict[str, Any] | str]]:
    """Do runs that share task, context and training as a population; yield each with its record, or its error.

    `after` is called with each trained method once its record is written. Records say how many runs had the device at
    a time: those of this population times `beside`, the processes that do runs on it.
    """
    by_name = {job.name: job for job in jobs}
    first = jobs[0].config(device)
    started = time.time()
    together = beside * (min(width, len(jobs)) if device.startswith("cuda") else 1)  # elsewhere one after another
    members = [
        Member(
            job.name,
            lambda job=job: make_method(data, job.config(device)),  # type: ignore[misc]
            job.seed,
            job.folder(results) / CHECKPOINT,
        )
        for job in jobs
    ]
    for outcome in fit_population(
        members,
        data.train,
        data.validation,
        width=width,
        batch_size=jobs[0].training["batch_size"],
        device=device,
        augment=_augmentation(data.task),
        **_protocol(data.task, first),
    ):
        job = by_name[outcome.member.name]
        if outcome.method is None or outcome.result is None:
            yield job, outcome.error
            continue
        record = evaluate_and_record(
            data,
            job.config(device),
            outcome.method,
            outcome.result,
            job.folder(results),
            started=started,
            memory=None,
            together=together,
            more=_more(job),
        )
        if after is not None:
            after(job, outcome.method)
        yield job, record


def _more(job: Job) -> dict[str, Any]:
    return {"job": job.identity}
