"""Runs on this machine: in this process, or in several of its own."""

from __future__ import annotations

import selectors
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import StfsebError
from stfseb.experiments.executors.view import View
from stfseb.experiments.executors.work import Report, Workplace
from stfseb.experiments.executors.worker_process import PATIENCE, WorkerProcess
from stfseb.experiments.run import default_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stfseb.experiments.executors.ledger import Ledger
    from stfseb.experiments.executors.plan import Planned

ROUNDS_OF_PLACES = 8  # a population is claimed in pieces of this many times its width


def run_locally(
    ledger: Ledger,
    *,
    device: str | None,
    processes: int | None,
    data_folder: Path | None,
    width: int,
    alone: bool = False,
    progress: bool,
    ready: Callable[[], None],
) -> float:
    """Do what waits in the ledger on this machine; return the CPU seconds of runs done in this very process."""
    if processes is not None and processes < 1:
        raise StfsebError(f"--processes {processes}: give 1 or more")
    ready()
    chosen = device or default_device()
    cards = torch.cuda.device_count() if chosen == "cuda" else 1
    if processes is None and cards > 1 and not alone:
        processes = cards
    if processes is not None:
        devices = [f"cuda:{i % cards}" if chosen == "cuda" else chosen for i in range(processes)]
        pool = _Pool(ledger, devices, data_folder, width)
        with View(ledger, show=progress):
            pool.run()
        return 0.0
    shared = chosen.startswith("cuda") and not alone  # runs that share a card have no display of their own
    place = Workplace(chosen, data_folder, width, progress and not shared, ledger.forgiven, alone)
    with View(ledger, show=progress and shared):
        for _ in ledger.rounds():
            while ledger.waiting:
                for report in place.do(ledger.chunk(ROUNDS_OF_PLACES * width if shared else 1)):
                    ledger.note(report)
    return place.cpu_seconds


class _Pool:
    """Processes, one for each entry of `devices`, that are given jobs as they become free."""

    def __init__(self, ledger: Ledger, devices: Sequence[str], data_folder: Path | None, width: int) -> None:
        self.ledger, self.data_folder, self.width = ledger, data_folder, width
        self.beside = Counter(devices)
        self.free = list(devices)
        cpus = sum(device == "cpu" for device in devices)
        self.threads = max(1, torch.get_num_threads() // cpus) if cpus else 0
        self.on_card = not cpus
        self.selector = selectors.DefaultSelector()
        self.idle: list[_Worker] = []
        self.workers: list[_Worker] = []

    def run(self) -> None:
        """Do what waits in the ledger; on Ctrl-C let the runs save themselves."""
        try:
            for _ in self.ledger.rounds():
                while self.ledger.waiting or len(self.idle) < len(self.workers):
                    self._hand_out()
                    for key, _ in self.selector.select():
                        self._hear(key.data)
        except BaseException:
            for worker in self.workers:
                worker.process.interrupt()
            self._close(PATIENCE)
            raise
        self._close()

    def _hand_out(self) -> None:
        while self.ledger.waiting and (self.idle or self.free):
            if not self.idle:
                worker = _Worker(self.free.pop(), self.threads)
                self.workers.append(worker)
                self.selector.register(worker.process.handle, selectors.EVENT_READ, worker)
                self.idle.append(worker)
            worker = self.idle.pop()
            worker.jobs = self.ledger.chunk(self._size())
            worker.process.ask(
                request(
                    *(worker.jobs, self.ledger, worker.device, self.data_folder, self.width, self.threads),
                    beside=self.beside[worker.device],
                )
            )

    def _size(self) -> int:
        """Return how many jobs a worker is given: the more the fuller a card, but all must have some at the end."""
        if not self.on_card:
            return 1
        share = len(self.ledger.waiting) // (2 * (len(self.workers) + len(self.free)))
        return max(self.width, min(ROUNDS_OF_PLACES * self.width, share))

    def _hear(self, worker: _Worker) -> None:
        replies = worker.process.replies()
        if replies is None:
            self._bury(worker)
            return
        for reply in replies:
            if reply["state"] == "end":
                worker.jobs = []
                self.idle.append(worker)
                continue
            report = Report(**reply)
            if report.state != "started":
                worker.jobs = [entry for entry in worker.jobs if entry.name != report.name]
            self.ledger.note(report)

    def _bury(self, worker: _Worker) -> None:
        self.selector.unregister(worker.process.handle)
        self.workers.remove(worker)
        if worker in self.idle:
            self.idle.remove(worker)
        self.free.append(worker.device)
        how = worker.process.how_it_ended()
        worker.process.close()
        self.ledger.died(worker.jobs, how)

    def _close(self, patience: float = 0.0) -> None:
        for worker in self.workers:
            worker.process.close(patience)
        self.selector.close()


class _Worker:
    def __init__(self, device: str, threads: int) -> None:
        self.device, self.process = device, WorkerProcess(threads)
        self.jobs: list[Planned] = []


def request(
    jobs: Sequence[Planned],
    ledger: Ledger,
    device: str | None,
    data_folder: Path | None,
    width: int,
    threads: int,
    beside: int = 1,
) -> dict[str, Any]:
    """Return the request for some jobs, as plain data; `beside` processes share the device."""
    return {
        "jobs": [{**asdict(entry.job), "task": _reachable(entry.job.task)} for entry in jobs],
        "results": str(jobs[0].results.resolve()),
        "parts": list(jobs[0].parts),
        "forgiven": {entry.name: ledger.forgiven[entry.name] for entry in jobs if entry.name in ledger.forgiven},
        "device": device,
        "data_folder": None if data_folder is None else str(data_folder),
        "width": width,
        "threads": threads,
        "beside": beside,
    }


def _reachable(task: str) -> str:
    """Return a task's name as it is, or the whole path of a task file: a worker may have another current folder."""
    path = Path(task).expanduser()
    return str(path.resolve()) if path.is_file() else task
