"""What is to be done: jobs with their names and folders worked out once, and the plan file that `status` reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task
from stfseb.errors import StfsebError
from stfseb.experiments.jobs import RECORD, Job
from stfseb.files import alone_in, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

PLAN = "plan.json"
FORMAT = 1


@dataclass(frozen=True)
class Planned:
    """A job with what is asked of it again and again: its name, its folder and the parts beside its record."""

    job: Job
    name: str
    folder: Path
    results: Path
    parts: tuple[str, ...] = ()

    @property
    def recorded(self) -> bool:
        """Whether the run itself is complete."""
        return (self.folder / RECORD).exists()

    @property
    def missing(self) -> list[str]:
        """The parts that are not there yet."""
        return [part for part in self.parts if not (self.folder / f"{part}.json").exists()]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.recorded and not self.missing

    @property
    def group(self) -> tuple[Any, ...]:
        """What runs must share to be trained as a population."""
        return self.job.task, self.job.context, tuple(sorted(self.job.training.items())), self.job.method

    @property
    def label(self) -> str:
        """The run in a few words."""
        context = f", context {self.job.context}" if self.job.context else ""
        return f"{self.folder.parent.name} {self.job.method} seed {self.job.seed}{context}"


def planned(jobs: Iterable[Job], results: Path, parts: Sequence[str] = ()) -> list[Planned]:
    """Return the jobs, each once, those of one task and method side by side."""
    found: dict[str, Planned] = {}
    for job in jobs:
        name = job.name
        folder = results / "runs" / load_task(job.task).name / name
        found.setdefault(name, Planned(job, name, folder, results, tuple(parts)))
    order: dict[Any, int] = {}
    for entry in found.values():
        order.setdefault((entry.job.task, entry.job.context), len(order))
    methods: dict[Any, int] = {}
    for entry in found.values():
        methods.setdefault(entry.group, len(methods))
    return sorted(found.values(), key=lambda p: (order[p.job.task, p.job.context], methods[p.group]))


def write_plan(results: Path, jobs: Sequence[Planned]) -> None:
    """Add jobs to the results' plan; several commands may do so at once."""
    path = results / PLAN
    with alone_in(results):
        before = read_plan(results)
        entries = dict(before)
        for entry in jobs:
            old = entries.get(entry.name, {})
            parts = sorted({*old.get("parts", ()), *entry.parts})
            entries[entry.name] = {**asdict(entry.job), "folder": entry.folder.parent.name, "parts": parts}
        if entries != before:
            write_json(path, {"format": FORMAT, "jobs": entries})


def read_plan(results: Path) -> dict[str, dict[str, Any]]:
    """Return the planned jobs by name; none where there is no plan."""
    path = results / PLAN
    if not path.exists():
        return {}
    content = read_json(path, "plan")
    if not isinstance(content, dict) or not isinstance(content.get("jobs"), dict):
        raise StfsebError(f"{path} is not a plan: remove it, the next command writes it again")
    if content.get("format", 0) > FORMAT:
        raise StfsebError(f"{path} is of a newer format than this stfseb reads: upgrade stfseb")
    jobs: dict[str, dict[str, Any]] = content["jobs"]
    return jobs
