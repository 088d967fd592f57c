"""Where runs execute: in this process, in several, or on a Dask cluster; one entry point for all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError, unknown
from stfseb.experiments.executors.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stfseb.experiments.jobs import Job

EXECUTORS = ("local", "dask")
__all__ = ["EXECUTORS", "Outcome", "run_jobs"]


def run_jobs(
    jobs: Sequence[Job],
    results: Path,
    *,
    executor: str = "local",
    device: str | None = None,
    processes: int | None = None,
    address: str | None = None,
    retries: int = 1,
    retry_failed: bool = False,
    data_folder: Path | None = None,
    width: int = 3,
    alone: bool = False,
    parts: tuple[str, ...] = (),
    announce: Callable[[str], None],
    progress: bool = True,
) -> Outcome:
    """Do all jobs whose results are not there, and return when each is done, here or elsewhere, or has failed.

    A run is claimed by a lock in its folder: commands started at once on one results folder share the work,
    and what a killed process leaves is taken over. A failed run keeps its traceback in `failure.json`, does not
    stop the others and is done again only with `retry_failed`.

    Args:
        jobs: the runs; those that occur twice are done once.
        results: the folder of results, see `stfseb.experiments.jobs`.
        executor: "local" or "dask".
        device: cpu, cuda, cuda:1, ...; by default every CUDA device there is, else the CPU.
        processes: worker processes on this machine; by default one for each CUDA device where there are
            several, else none: the runs are done in this process.
        address: of a Dask scheduler; by default a cluster is started on this machine for as long as it takes.
        retries: how often a run is given to another worker after its worker has died.
        retry_failed: also do runs that have failed before.
        data_folder: where the data sets lie, by default as everywhere.
        width: runs that share a CUDA device.
        alone: one run at a time, whatever `processes` and `width` say: its time and memory are its own.
        parts: measurements kept beside the record, `stfseb.experiments.shifts`.
        announce: takes a line for the user.
        progress: show the progress of training (in this process) or of the whole job.
    """
    from stfseb.experiments.executors.ledger import Ledger
    from stfseb.experiments.executors.local import run_locally
    from stfseb.experiments.executors.plan import planned
    from stfseb.experiments.executors.plan_file import write_plan
    from stfseb.experiments.run import usable_device

    if executor not in EXECUTORS:
        raise unknown("executor", executor, EXECUTORS)
    if address is not None and executor != "dask":
        raise StfsebError(f"--address {address} is of a Dask scheduler: give --executor dask with it")
    if device is not None and address is None:  # the devices of a cluster are its workers' own
        usable_device(device)
    if address is not None:
        from stfseb.experiments.executors.dask_client import check_address

        check_address(address)
    began, cpu = time.perf_counter(), time.process_time()
    shared: dict[str, Any] = {
        "device": device,
        "processes": None if alone else processes,
        "data_folder": data_folder,
        "width": 1 if alone else width,
        "alone": alone,
        "progress": progress,
    }
    everything = planned(jobs, results, parts)
    ledger = Ledger(everything, announce, retry_failed=retry_failed, retries=retries)
    in_runs = 0.0
    if ledger.waiting:
        shared["ready"] = lambda: write_plan(results, everything)  # what nobody can do is no plan
        with ledger.stoppable():
            if executor == "dask":
                from stfseb.experiments.executors.dask import run_on_dask

                run_on_dask(ledger, address=address, **shared)
            else:
                in_runs = run_locally(ledger, **shared)
    ledger.close()
    outcome = ledger.outcome
    outcome.seconds = time.perf_counter() - began
    outcome.driver_cpu_seconds = time.process_time() - cpu - in_runs
    return outcome
