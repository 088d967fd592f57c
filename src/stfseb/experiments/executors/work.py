"""Doing runs in this process: claim, train, record, measure the parts, and say what became of each.

The same code works in the driver itself, in the processes it starts, and in those of a Dask worker.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments import claims
from stfseb.experiments.executors.failures import describe, forget_failure, in_a_line, read_failure, write_failure
from stfseb.experiments.executors.log import note
from stfseb.experiments.jobs import perform, perform_together
from stfseb.experiments.run import CHECKPOINT
from stfseb.files import write_json
from stfseb.training.interrupts import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from stfseb.data.tasks import TaskData
    from stfseb.experiments.executors.plan import Planned
    from stfseb.experiments.jobs import Job
    from stfseb.methods.base import Method

log = logging.getLogger("stfseb")

KEPT = 2  # tasks whose images a worker keeps in memory
ALWAYS_AGAIN = ("data", "worker", "model")  # stages whose failures say nothing against the run itself


@dataclass(frozen=True)
class Report:
    """What became of a run: started, done, skipped, elsewhere (another process has it) or failed."""

    name: str
    state: str
    error: str = ""
    seconds: float = 0.0


@dataclass
class Workplace:
    """Where runs are done one after another (or, on a card, as a population), with the images at hand."""

    device: str
    data_folder: Path | None = None
    width: int = 3
    progress: bool = False
    forgiven: Mapping[str, int] = field(default_factory=dict)  # by run: failed attempts that may be repeated
    alone: bool = False  # never as a population: times and memory are compared
    beside: int = 1  # processes that do runs on this device, this one among them
    cpu_seconds: float = 0.0  # spent in the runs themselves
    _images: dict[tuple[str, str | None, str], TaskData] = field(default_factory=dict)

    @property
    def together(self) -> bool:
        """Whether runs share the device; elsewhere a population would only follow one another."""
        return self.device.startswith("cuda")

    def do(self, jobs: Sequence[Planned]) -> Iterator[Report]:
        """Do the jobs and report on each; those that can share a card must be of one group."""
        alone = list(jobs)
        if self.together and len(alone) > 1 and not self.alone:
            finished = set()
            for report in self._together(alone):
                finished.add(report.name) if report.state != "started" else None
                yield report
            alone = [entry for entry in alone if entry.name not in finished]  # left by an error of one of them
        for entry in alone:
            yield from self._alone(entry)

    def _alone(self, entry: Planned) -> Iterator[Report]:
        held = claims.claim(entry.folder, seed=entry.job.seed)
        if held is None:
            yield Report(entry.name, "elsewhere")
            return
        with held:
            before = known(entry, self.forgiven)
            if before is not None:
                yield before
                return
            note(entry.results, "started", entry.name)
            yield Report(entry.name, "started")
            began, stage = time.perf_counter(), "data"
            try:
                with self._counted():
                    data = self._data(entry.job)
                    stage = "training"
                    if not entry.recorded:
                        how: dict[str, Any] = {"device": self.device, "progress": self.progress, "beside": self.beside}
                        perform(entry.job, entry.results, data, **how)
                    for part in entry.missing:
                        stage = "model"
                        method = self._model(entry, data)
                        stage = part
                        self._measure(entry, part, data, method)
            except Interrupted:
                raise
            except Exception as error:  # whatever it is, the other runs go on
                yield self._failed(entry, describe(error, stage), began)
                return
            yield self._done(entry, time.perf_counter() - began)

    def _together(self, jobs: Sequence[Planned]) -> Iterator[Report]:
        """Train jobs of one group as a population; an error outside a single run ends it early."""
        began = time.perf_counter()
        with ExitStack() as held:
            mine: dict[str, Planned] = {}
            for entry in jobs:
                claim = claims.claim(entry.folder, seed=entry.job.seed)
                if claim is None:
                    yield Report(entry.name, "elsewhere")
                    continue
                before = known(entry, self.forgiven)
                if before is not None or entry.recorded:  # a part that is missing is measured alone, afterwards
                    claim.release()
                    if before is not None:
                        yield before
                    continue
                held.enter_context(claim)
                mine[entry.name] = entry
                note(entry.results, "started", entry.name)
                yield Report(entry.name, "started")
            if not mine:
                return
            broken: dict[str, dict[str, Any]] = {}
            try:
                with self._counted():
                    data = self._data(next(iter(mine.values())).job)
                runs = perform_together(
                    [entry.job for entry in mine.values()],
                    jobs[0].results,
                    data,
                    device=self.device,
                    width=self.width,
                    beside=self.beside,
                    after=lambda job, method: self._parts_of(mine[job.name], method, data, broken),
                )
                while True:
                    with self._counted():
                        found = next(runs, None)
                    if found is None:
                        return
                    entry = mine[found[0].name]
                    if isinstance(found[1], str):
                        yield self._failed(entry, describe(found[1] or "training failed", "training"), began)
                    elif entry.name in broken:
                        yield self._failed(entry, broken[entry.name], began)
                    else:
                        yield self._done(entry, float(found[1]["seconds"]))
            except Interrupted:
                raise
            except Exception as error:  # not of a single run: those that are left are done one by one, which tells
                log.warning("runs at once ended early (%s): those that are left follow one by one", in_a_line(error))

    def _done(self, entry: Planned, seconds: float) -> Report:
        forget_failure(entry.folder)
        note(entry.results, "done", entry.name, seconds=round(seconds, 3))
        return Report(entry.name, "done", seconds=seconds)

    def _failed(self, entry: Planned, described: dict[str, Any], began: float) -> Report:
        try:
            line = write_failure(entry.folder, described)
        except Exception as error:  # a full disk: say it, and go on
            line = f"{described['error']} (and the failure could not be written: {in_a_line(error)})"
        note(entry.results, "failed", entry.name, error=line)
        return Report(entry.name, "failed", line, time.perf_counter() - began)

    def _data(self, job: Job) -> TaskData:
        """Return the images of a job, read once for all jobs of the same task and context."""
        key = (job.task, job.context, job.definition)
        if key not in self._images:
            while len(self._images) >= KEPT:
                del self._images[next(iter(self._images))]
            self._images[key] = job.load(self.data_folder)
        return self._images[key]

    def _parts_of(self, entry: Planned, method: Method, data: TaskData, broken: dict[str, dict[str, Any]]) -> None:
        for part in entry.missing:
            try:
                self._measure(entry, part, data, method)
            except Exception as error:  # the population goes on
                broken[entry.name] = describe(error, part)
                return

    def _model(self, entry: Planned, data: TaskData) -> Method:
        """Read a recorded run's model; where it cannot be, say what to do about this run."""
        from stfseb.experiments.models import load_model

        try:
            return load_model(entry.folder / "model", task=data.task).to(self.device)
        except StfsebError as error:
            where = entry.folder.relative_to(entry.results)
            raise StfsebError(
                f"the run is recorded and its model cannot be read ({error.args[0].partition(': ')[0]}): bring "
                f"{where / 'model'} again from where the run was made, or remove {where}, and the same command trains "
                "it anew"
            ) from error

    def _measure(self, entry: Planned, part: str, data: TaskData, method: Method) -> None:
        from stfseb.experiments.shifts import measure_part

        found = measure_part(part, method, data, samples=int(entry.job.training["test_samples"]))
        write_json(entry.folder / f"{part}.json", found)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before = time.process_time()
        try:
            yield
        finally:
            self.cpu_seconds += time.process_time() - before


def known(entry: Planned, forgiven: Mapping[str, int]) -> Report | None:
    """Say what is known of a run that has just been claimed, or None when it is to be done."""
    if entry.complete:
        return Report(entry.name, "skipped")
    failure = read_failure(entry.folder)
    if failure is None:
        return None
    if int(failure.get("attempt", 1)) > forgiven.get(entry.name, 0):
        return Report(entry.name, "failed", str(failure["error"]))
    if str(failure["error"]).startswith(CHECKPOINT):  # it cannot be used, and retrying is starting over
        (entry.folder / CHECKPOINT).unlink(missing_ok=True)
    return None


def forgivable(jobs: Sequence[Planned], retry_failed: bool) -> dict[str, int]:
    """Return by run the failed attempts that a new command may repeat."""
    found = {}
    for entry in jobs:
        failure = read_failure(entry.folder)
        if failure is not None and (retry_failed or failure.get("stage") in ALWAYS_AGAIN):
            found[entry.name] = int(failure.get("attempt", 1))
    return found
