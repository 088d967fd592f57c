"""What a Dask worker does: a few runs in a process of its own, and their files as bytes.

Workers need not share a file system with the driver: files go and come with the task. The runs are done by a
`WorkerProcess`, one for each of the worker's threads: seeds belong to one process, training does not keep the worker
from answering the scheduler, and a run that is killed for its memory does not take the worker with it. The process
stays for the next task, with the images it has read.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from stfseb.experiments.executors.dask_held import tell_begun
from stfseb.experiments.executors.worker_process import WorkerProcess

SCRATCH = "STFSEB_SCRATCH"  # a folder for checkpoints, by default in the worker's own temporary one
PAUSE = 2.0  # seconds, where another worker has the same run in a shared scratch folder
_mine = threading.local()


def do_runs(request: dict[str, Any]) -> dict[str, Any]:
    """Do the runs of a request; return by name their state and files, and how the process died if it did."""
    scratch = _scratch() / request["place"]
    clear(request["place"], request["recorded"])
    folders = {name: scratch / place for name, place in request["folders"].items()}
    for name, files in request["files"].items():
        for place, content in files.items():
            _lay(folders[name] / place, content)
    process = _process(request["threads"])
    found: dict[str, Any] = {}
    asked = {**request["ask"], "results": str(scratch)}
    if request["cards"]:
        asked["device"] = f"cuda:{_number() % request['cards']}"
    jobs = dict(zip(folders, asked["jobs"], strict=True))
    while jobs:
        begun = set()
        for reply in process.answers({**asked, "jobs": list(jobs.values())}):
            name = reply.pop("name")
            if reply["state"] == "started":
                begun.add(name)
                tell_begun(request["topic"], name, process.process.pid, str(folders[name] / "checkpoint"))
            elif reply["state"] != "elsewhere":
                found[name] = {**reply, "files": _collect(folders[name])}
                del jobs[name]
        if not process.alive:
            return {"runs": found, "died": process.how_it_ended(), "begun": sorted(begun & set(jobs))}
        if jobs:
            time.sleep(PAUSE)
    return {"runs": found, "died": None, "begun": []}


def clear(place: str, recorded: list[str], dask_worker: Any = None) -> None:
    """Remove runs that the driver has recorded; until then a result may be lost on its way, and is found here.

    Outside a task Dask gives the worker as an argument.
    """
    scratch = _scratch(dask_worker) / place
    for folder in recorded:
        shutil.rmtree(scratch / folder, ignore_errors=True)


def _scratch(worker: Any = None) -> Path:
    given = os.environ.get(SCRATCH)
    if given:
        return Path(given)
    if worker is None:
        from distributed import get_worker

        worker = get_worker()
    return Path(worker.local_directory) / "stfseb"


def _number() -> int:
    """Return the worker's place among those of a cluster on one machine."""
    from distributed import get_worker

    return int(get_worker().name)


def _process(threads: int) -> WorkerProcess:
    current: WorkerProcess | None = getattr(_mine, "process", None)
    if current is not None and not current.alive:
        current.close()
        current = None
    if current is None:
        current = _mine.process = WorkerProcess(threads)
    return current


def _lay(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _collect(folder: Path) -> dict[str, bytes]:
    """Return the results in a run's folder: the record, its parts, the model, a failure; no checkpoint, no claim."""
    files = [path for path in (*folder.glob("*.json"), *folder.glob("model/*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.name != "claim.json"}
