"""What is to be done: jobs with their names and folders worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task
from stfseb.experiments.jobs import RECORD

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from stfseb.experiments.jobs import Job


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
        job = self.job
        return job.task, job.definition, job.context, tuple(sorted(job.training.items())), job.method

    @property
    def label(self) -> str:
        """The run in a few words."""
        usual = load_task(self.job.task).presets.get(self.job.method, {})
        other = [
            f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in self.job.settings.items()
            if usual.get(k) != v and not isinstance(v, dict)
        ]
        context = [f"context {self.job.context}"] if self.job.context else []
        return ", ".join([f"{self.folder.parent.name} {self.job.method} seed {self.job.seed}", *other, *context])


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
