"""The driver's book: which jobs wait, run, are done or failed, and what is said about it."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stfseb.experiments import claims
from stfseb.experiments.executors.failures import describe, read_failure, write_failure
from stfseb.experiments.executors.outcome import Outcome
from stfseb.experiments.executors.work import Report, forgivable
from stfseb.training.interrupts import Interrupted, stoppable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stfseb.experiments.executors.plan import Planned

GO_ON = "start the same command again to go on"
FIRST_LOOK, LONGEST_LOOK = 0.25, 5.0  # seconds between looks at runs that others do


class Ledger:
    """All jobs of a command, each in one state at every moment."""

    def __init__(
        self, jobs: Sequence[Planned], announce: Callable[[str], None], *, retry_failed: bool = False, retries: int = 1
    ) -> None:
        self.jobs = {entry.name: entry for entry in jobs}
        self.announce, self.retries = announce, retries
        self.outcome = Outcome()
        self.running: set[str] = set()
        self.claimed: dict[str, Planned] = {}  # by other processes
        self.deaths: dict[str, int] = {}
        self.waiting: deque[Planned] = deque()
        self.changed: Callable[[], None] = lambda: None  # the view's
        left = []
        for entry in jobs:
            if entry.complete:
                claims.tidy(entry.folder)
                self.outcome.skipped.append(entry.name)
            else:
                left.append(entry)
        self.recorded = {entry.name for entry in left if entry.recorded}  # what they lack is measured
        self.forgiven = forgivable(left, retry_failed)
        for entry in left:
            failure = read_failure(entry.folder)
            if failure is not None and entry.name not in self.forgiven and claims.holder(entry.folder) is None:
                self.outcome.failed[entry.name] = str(failure["error"])
                self.outcome.before.append(entry.name)
            else:
                self.waiting.append(entry)
        if self.outcome.failed:
            announce(
                f"{len(self.outcome.failed)} runs failed before and are left alone: --retry-failed does them again"
            )

    @property
    def finished(self) -> int:
        """How many jobs need nothing more."""
        found = self.outcome
        return len(found.done) + len(found.skipped) + len(found.failed) + len(found.elsewhere)

    def chunk(self, size: int) -> list[Planned]:
        """Take the next jobs of one group, at most `size`."""
        found: list[Planned] = []
        while self.waiting and len(found) < size and (not found or self.waiting[0].group == found[0].group):
            found.append(self.waiting.popleft())
        return found

    def note(self, report: Report) -> None:
        """Write down what became of a job."""
        entry = self.jobs[report.name]
        self.running.discard(report.name)
        if report.state == "started":
            self.running.add(report.name)
        elif report.state == "done":
            self.outcome.done.append(report.name)
            if report.name in self.recorded:
                self.outcome.measured.append(report.name)
            what = "measured" if report.name in self.recorded else "done"
            self._say(entry, f"{what} in {report.seconds:.0f} s")
        elif report.state == "failed":
            self.outcome.failed[report.name] = report.error
            self._say(entry, f"failed: {report.error[:200]}")
        elif report.state == "skipped":  # another process did it between the plan and the claim
            self.outcome.elsewhere.append(report.name)
        else:
            self.claimed[report.name] = entry
        self.changed()

    def died(self, jobs: Sequence[Planned], how: str) -> None:
        """Give the jobs of a dead worker to another; those that were under way at most `retries` times."""
        under_way = {entry.name for entry in jobs if entry.name in self.running} or {entry.name for entry in jobs}
        for entry in jobs:
            if entry.name in under_way:  # all, when it did not even begin: something is wrong with the worker
                self.running.discard(entry.name)
                self.deaths[entry.name] = self.deaths.get(entry.name, 0) + 1
            if self.deaths.get(entry.name, 0) > self.retries:
                error = f"its worker {how}, {self.deaths[entry.name]} times"
                write_failure(entry.folder, describe(error, "worker"))
                self.note(Report(entry.name, "failed", error))
            else:
                self.waiting.append(entry)
                if entry.name in self.deaths:
                    self._say(entry, f"its worker {how}: given to another")
        self.changed()

    def lost(self, name: str, how: str) -> None:
        """Say that a run's worker is gone, where others see to it that another gets the run."""
        self._say(self.jobs[name], f"{how}: another takes the run up")

    def look_again(self) -> bool:
        """Look once at the runs of other processes; return whether some are theirs still."""
        for name, entry in list(self.claimed.items()):
            if entry.complete:
                self.outcome.elsewhere.append(name)
                del self.claimed[name]
            elif claims.holder(entry.folder) is None:  # its owner died, or failed: whoever claims it sees which
                self.waiting.append(entry)
                del self.claimed[name]
        self.changed()
        return bool(self.claimed)

    def rounds(self) -> Iterator[None]:
        """Yield whenever there are jobs to do, until all are finished here or elsewhere."""
        pause, said = FIRST_LOOK, False
        while True:
            if self.waiting:
                pause = FIRST_LOOK
                yield
            if not self.look_again() and not self.waiting:
                return
            if not self.waiting:
                if not said:
                    self.announce(f"waiting for {len(self.claimed)} runs that another process does")
                    said = True
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK)

    def close(self) -> None:
        """Name the failures, one line each."""
        if self.outcome.failed:
            self.announce(
                f"{len(self.outcome.failed)} of {len(self.jobs)} runs failed (--retry-failed does them again):"
            )
            for name, error in self.outcome.failed.items():
                self.announce(f"  {self.jobs[name].label} ({name}): {error[:300]}")

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Turn SIGTERM and Ctrl-C within the block into an error that says how far the job has come."""

        def where() -> str:
            return f"after {self.finished} of {len(self.jobs)} runs"

        with stoppable(where, GO_ON):
            try:
                yield
            except Interrupted as error:  # a run in this process has saved itself
                raise Interrupted(error.signum, where(), GO_ON) from None

    def _say(self, entry: Planned, what: str) -> None:
        self.announce(f"[{self.finished}/{len(self.jobs)}] {entry.label}: {what}")
