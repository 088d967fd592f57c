"""Runs on a Dask cluster: the driver claims, submits, and records what comes back."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments import claims
from stfseb.experiments.executors.dask_client import connect, dask_modules, leave
from stfseb.experiments.executors.dask_held import QUEUED, Held
from stfseb.experiments.executors.dask_task import clear, do_runs
from stfseb.experiments.executors.failures import FAILURE, describe, forget_failure, write_failure
from stfseb.experiments.executors.local import request
from stfseb.experiments.executors.log import note
from stfseb.experiments.executors.view import View
from stfseb.experiments.executors.work import Report, known
from stfseb.experiments.jobs import RECORD
from stfseb.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from stfseb.experiments.executors.ledger import Ledger
    from stfseb.experiments.executors.plan import Planned

IN_FLIGHT = 128  # tasks that the scheduler has at a time, so that an elastic cluster sees how much there is
REMEMBERED = 256  # runs that a task says are recorded
QUIET = {  # a driver that only waits has no need to look at itself fifty times a second
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.worker.profile.enabled": False,
    "distributed.scheduler.worker-ttl": "5 minutes",
    "distributed.scheduler.http.routes": [],  # of a cluster on this machine: nothing to see, nothing to attack
    "distributed.worker.http.routes": [],
}


def run_on_dask(
    ledger: Ledger,
    *,
    address: str | None,
    processes: int | None,
    device: str | None,
    data_folder: Path | None,
    width: int,
    alone: bool = False,
    progress: bool,
    ready: Callable[[], None],
) -> None:
    """Do what waits in the ledger on a cluster: the one at `address`, or one on this machine.

    `ready` is called once there is a scheduler.
    """
    dask, distributed = dask_modules()
    _allow_many_claims()
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(QUIET))
        cards = 0
        target: Any = address
        if address is None:
            target, cards = _cluster(distributed, 1 if alone else processes, device, width)
            stack.callback(target.close)
        client = connect(target)
        stack.callback(leave, client)
        ready()
        driver = _Driver(ledger, client, distributed, device, data_folder, width, cards)
        if alone:
            driver.at_once = 1
        stack.callback(driver.held.leave)
        with View(ledger, show=progress, slots=driver.slots):
            for _ in ledger.rounds():
                driver.run()
        driver.clear()


def _allow_many_claims() -> None:
    """Let this process hold as many files as it may: every run in flight has its lock open."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _cluster(distributed: Any, processes: int | None, device: str | None, width: int) -> tuple[Any, int]:
    """Start workers on this machine: one for each card, or as many as there are cores (or as was asked)."""
    import torch

    from stfseb.experiments.run import default_device

    cards = torch.cuda.device_count() if (device or default_device()) == "cuda" else 0
    workers = processes or cards or torch.get_num_threads()
    cluster = distributed.LocalCluster(
        host="127.0.0.1",
        n_workers=workers,
        threads_per_worker=width if cards else 1,
        scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
        memory_limit=None,
        resources={"GPU": min(1.0, cards / workers)} if cards else None,
    )
    return cluster, cards


class _Driver:
    """Keeps the scheduler supplied with tasks and writes down what they return."""

    def __init__(
        self,
        ledger: Ledger,
        client: Any,
        distributed: Any,
        device: str | None,
        data_folder: Path | None,
        width: int,
        cards: int,
    ) -> None:
        self.ledger, self.client, self.distributed = ledger, client, distributed
        self.data_folder, self.width, self.cards = data_folder, width, cards
        workers = self._workers()
        resources = [float(worker["resources"].get("GPU", 0)) for worker in workers]
        self.card = max(resources) if device is None or device.startswith("cuda") else 0.0
        self.device = device  # None: each worker's best
        self.slots = sum(int(worker["nthreads"]) for worker in workers)
        hosts: Counter[str] = Counter()
        for worker in workers:
            hosts[str(worker.get("host"))] += int(worker["nthreads"])
        self.crowd = max(hosts.values())
        self.at_once = max(IN_FLIGHT, 2 * self.slots)
        self.completed = distributed.as_completed(loop=client.loop, raise_errors=False)
        self.flying: dict[str, list[Planned]] = {}
        self.held = Held(ledger.lost)
        self.topic = f"stfseb-{_place(next(iter(ledger.jobs.values())).results)}"
        self.held.listen(client, self.topic)
        self.recorded: list[str] = []  # folders that workers need not keep

    def run(self) -> None:
        """Submit and record until nothing waits and nothing is under way."""
        self._fill()
        for future in self.completed:
            self._take(future)
            self._fill()

    def clear(self) -> None:
        """Let the workers remove what is recorded."""
        with suppress(Exception):  # it is only tidier
            self.client.run(clear, _place(next(iter(self.ledger.jobs.values())).results), self.recorded)

    def _workers(self) -> list[dict[str, Any]]:
        """Return what the cluster's workers say of themselves, after waiting for the first."""
        said = False
        while not (found := self.client.scheduler_info(n_workers=-1)["workers"]):
            if not said:
                self.ledger.announce("waiting for the first Dask worker")
                said = True
            with suppress(TimeoutError):
                self.client.wait_for_workers(1, timeout=5)
            self._check()
        return list(found.values())

    def _check(self) -> None:
        if self.client.status != "running":  # "connecting": it looks for a scheduler that has gone
            raise self._lost()

    def _lost(self) -> StfsebError:
        done, of = self.ledger.finished, len(self.ledger.jobs)
        return StfsebError(
            f"the Dask scheduler was lost; {done} of {of} runs are recorded: start the command again for the rest"
        )

    def _fill(self) -> None:
        while self.ledger.waiting and len(self.flying) < self.at_once:
            chunk = self.ledger.chunk(max(1, int(self.width * self.card)))
            mine = [entry for entry in chunk if self._claim(entry)]
            if mine:
                self._submit(mine)

    def _claim(self, entry: Planned) -> bool:
        held = claims.claim(entry.folder, seed=entry.job.seed, executor="dask", state=QUEUED)
        if held is None:
            self.ledger.note(Report(entry.name, "elsewhere"))
            return False
        before = known(entry, self.ledger.forgiven)
        if before is not None:
            held.release()
            self.ledger.note(before)
            return False
        self.held.take(entry.name, held)
        return True

    def _submit(self, jobs: Sequence[Planned]) -> None:
        self._check()
        for entry in jobs:
            note(entry.results, "started", entry.name, executor="dask")
            self.ledger.note(Report(entry.name, "started"))
        again = max(self.ledger.deaths.get(entry.name, 0) for entry in jobs)
        what = {
            "ask": {
                **request(jobs, self.ledger, self.device, self.data_folder, self.width, 0, self._beside(len(jobs))),
                "forgiven": {entry.name: 1 << 30 for entry in jobs},  # that is the driver's to judge
            },
            "place": _place(jobs[0].results),
            "topic": self.topic,
            "folders": {entry.name: _below(entry) for entry in jobs},
            "recorded": self.recorded[-REMEMBERED:],
            "files": {entry.name: _files(entry.folder) for entry in jobs if entry.recorded},
            "threads": 0,
            "cards": self.cards,
        }
        share = min(self.card, len(jobs) * int(10_000 / self.width) / 10_000)
        future = self.client.submit(
            do_runs,
            what,
            key=_key(jobs, again),
            resources={"GPU": share} if self.card else None,
            retries=self.ledger.retries,
            pure=False,
        )
        self.flying[future.key] = list(jobs)
        self.completed.add(future)

    def _beside(self, count: int) -> int:
        """Return how many processes, at most, do runs on the device of a task that has `count` of them."""
        if self.at_once == 1:
            return 1
        return max(1, self.width // count) if self.card else self.crowd

    def _take(self, future: Any) -> None:
        jobs = self.flying.pop(future.key)
        found = self._answer(future) if future.status == "finished" else None
        if found is not None:
            for entry in jobs:
                if entry.name in found["runs"]:
                    self._record(entry, found["runs"][entry.name])
            self._again([entry for entry in jobs if entry.name not in found["runs"]], found["died"], found["begun"])
        elif future.status == "error":
            error = future.exception()
            if isinstance(error, self.distributed.KilledWorker):
                self._again(jobs, "died", [entry.name for entry in jobs])
            else:  # not of a run: those are returned
                for entry in jobs:
                    line = write_failure(entry.folder, describe(error, "worker"))
                    self._note(Report(entry.name, "failed", line))
        else:
            raise self._lost()
        future.release()

    def _answer(self, future: Any) -> dict[str, Any] | None:
        """Return what a finished task found; None where its worker died with it and working it out again failed."""
        try:
            found: dict[str, Any] = future.result()
        except Exception as error:  # of the task itself, or of the answer's way to here
            if future.status == "error":
                return None
            if isinstance(error, (OSError, CancelledError)):
                raise self._lost() from error
            raise
        return found

    def _again(self, jobs: Sequence[Planned], how: str | None, begun: Iterable[str]) -> None:
        for entry in jobs:
            if entry.name not in begun:
                self.ledger.running.discard(entry.name)
            self.held.release(entry.name)
        if jobs:
            self.ledger.died(jobs, how or "returned nothing")

    def _record(self, entry: Planned, found: dict[str, Any]) -> None:
        """Write a run's files, the record last."""
        files: dict[str, bytes] = found.pop("files")
        failure = files.pop(FAILURE, None)
        record = files.pop(RECORD, None)
        if not entry.recorded:
            for place in sorted(files, key=lambda name: name.endswith(".json")):  # what others name comes first
                write_bytes(entry.folder / place, files[place])
            if record is not None:
                write_bytes(entry.folder / RECORD, record)
        else:
            for part in entry.missing:
                if f"{part}.json" in files:
                    write_bytes(entry.folder / f"{part}.json", files[f"{part}.json"])
        if found["state"] == "failed":
            described = json.loads(failure) if failure else describe(found["error"], "training")
            write_failure(entry.folder, described)
        else:
            forget_failure(entry.folder)
            found["state"] = "done"
        self.recorded.append(_below(entry))
        note(entry.results, found["state"], entry.name, executor="dask", seconds=round(found["seconds"], 3))
        self._note(Report(entry.name, **found))

    def _note(self, report: Report) -> None:
        self.held.release(report.name)
        self.ledger.note(report)


def _key(jobs: Sequence[Planned], again: int) -> str:
    """Return a task's key: the same for the same runs, so that a driver started anew finds those under way."""
    text = "|".join([str(jobs[0].results.resolve()), str(again), *jobs[0].parts, *(entry.name for entry in jobs)])
    return f"stfseb-{jobs[0].name}-{_digest(text)}"


def _place(results: Path) -> str:
    """Return the name of the folder in which workers do the runs of a folder of results."""
    return _digest(str(results.resolve()))


def _below(entry: Planned) -> str:
    return entry.folder.relative_to(entry.results).as_posix()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _files(folder: Path) -> dict[str, bytes]:
    files = [folder / RECORD, *(folder / "model").glob("*")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.is_file()}
