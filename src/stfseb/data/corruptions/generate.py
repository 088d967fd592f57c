"""Fill the cache: every missing corruption made once, by several processes, written whole or not at all.

The processes are started with a command line of their own rather than forked or spawned from the caller's
script: nothing of the caller is run again, no `if __name__ == "__main__"` is asked of it, and they need no torch.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stfseb.data.corruptions.colour_weather import read_textures
from stfseb.data.corruptions.recipes import VERSION, corrupted
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.data.corruptions.operators import Bytes

    Progress = Callable[[int, int, str], None]
    Key = tuple[str, int]


def cache_key(suite: str, fingerprint: str, seed: int) -> str:
    """Return the name of the folder that holds what is generated from one clean set."""
    return f"{suite}-{fingerprint}-recipe{VERSION}-seed{seed}"


def target(folder: Path, kind: str, severity: int) -> Path:
    """Return the file of one corruption."""
    return folder / (f"{kind}-{severity}.npy" if severity else f"{kind}.npy")


def write_array(path: Path, array: Bytes, owner: str) -> None:
    """Write a .npy file whole or not at all; its temporary name starts with the owner's."""
    part = path.with_name(f".{owner}.{path.name}")
    with part.open("wb") as stream:
        np.lib.format.write_array(stream, array, allow_pickle=False)
    part.replace(path)


def run(job: dict[str, Any]) -> None:
    """Make one corruption: read the clean images, write the corrupted ones."""
    images = np.load(job["clean"], mmap_mode="r", allow_pickle=False)
    made = corrupted(images, job["suite"], job["kind"], job["severity"], job["seed"], job["textures"])
    write_array(Path(job["target"]), made, job["owner"])


def fill(
    folder: Path,
    images: Bytes,
    suite: str,
    keys: list[Key],
    seed: int,
    textures: Path,
    workers: int,
    progress: Progress | None,
) -> None:
    """Make the corruptions `keys` of `images` into `folder`."""
    if any(kind == "frost" for kind, _ in keys):
        read_textures(textures)  # what is missing is told before any work is done
    owner = uuid.uuid4().hex
    clean = folder / f".{owner}.clean.npy"
    common = {"clean": str(clean), "suite": suite, "seed": seed, "textures": str(textures), "owner": owner}
    jobs: list[dict[str, Any]] = [
        {**common, "kind": kind, "severity": severity, "target": str(target(folder, kind, severity))}
        for kind, severity in keys
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_array(clean, images, owner)
        if workers <= 1 or len(jobs) == 1:
            for done, job in enumerate(jobs, 1):
                run(job)
                if progress is not None:
                    progress(done, len(jobs), job["kind"])
        else:
            _in_processes(jobs, min(workers, len(jobs)), progress)
    except OSError as fault:
        raise StfsebError(f"cannot write to the cache {folder} ({fault.strerror}): name another cache") from fault
    finally:
        for left in folder.glob(f".{owner}.*"):  # the clean images, and what a killed process did not finish
            left.unlink(missing_ok=True)


def _in_processes(jobs: list[dict[str, Any]], workers: int, progress: Progress | None) -> None:
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    told: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    processes = [_start() for _ in range(workers)]
    threads = [threading.Thread(target=_feed, args=(one, waiting, told), daemon=True) for one in processes]
    try:
        for thread in threads:
            thread.start()
        for done in range(1, len(jobs) + 1):
            news = told.get()
            if isinstance(news, BaseException):
                raise news
            if progress is not None:
                progress(done, len(jobs), news)
    finally:
        for process in processes:
            process.kill()
        for process, thread in zip(processes, threads, strict=True):
            process.wait()
            if thread.ident is not None:
                thread.join()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()


def _start() -> subprocess.Popen[str]:
    # One thread each: the processes are the parallelism.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    here = str(Path(__file__).resolve().parents[3])  # the same stfseb as the caller's, wherever it was found
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "stfseb.data.corruptions.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **single, "PYTHONPATH": paths},
    )


def _feed(
    process: subprocess.Popen[str],
    waiting: queue.SimpleQueue[dict[str, Any]],
    told: queue.SimpleQueue[str | BaseException],
) -> None:
    """Give one process a job at a time and pass on what it answers."""
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            if process.stdin is None or process.stdout is None:
                return
            print(json.dumps(job), file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline() or '"its process ended"')
        except (OSError, ValueError) as fault:
            answer = str(fault)
        if answer is not True:
            told.put(StfsebError(f"{job['suite']} corruption {job['kind']} could not be made: {answer}"))
            return
        told.put(job["kind"])
