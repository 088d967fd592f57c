"""Time and memory of generating CIFAR-10-C: 15 types, severities 1, 3 and 5, 10,000 images each.

    python benchmarks/corruptions.py DATA_FOLDER [WORKERS]

Memory is the peak over time of the proportional set sizes of this process and the processes it started
(Linux). Output of a run is kept in corruptions.txt.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from stfseb.data.corruptions import load
from stfseb.data.readers import read


def family_memory() -> int:
    """Return the bytes of this process and its children, shared pages counted once."""
    me, total = os.getpid(), 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if me in (int(entry.name), parent):
                rollup = (entry / "smaps_rollup").read_text()
                total += 1024 * int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])
        except (OSError, StopIteration):
            continue
    return total


def main() -> None:
    folder = Path(sys.argv[1])
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    clean = read("cifar10", folder, "test")
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.1):
            peak = max(peak, family_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        sets = load("cifar10-c", clean, folder, severities=(1, 3, 5), cache=cache, workers=workers)
        seconds = time.perf_counter() - start
        again = time.perf_counter()
        load("cifar10-c", clean, folder, severities=(1, 3, 5), cache=cache, workers=workers)
        cached = time.perf_counter() - again
    done.set()
    watcher.join()
    print(f"{len(sets)} sets of {len(clean):,} images, {workers} processes on {len(os.sched_getaffinity(0))} CPU cores")
    print(f"generated in {seconds:.1f} s (allowed: 180 s), peak memory {peak / 1e6:.0f} MB (allowed: 1,000 MB)")
    print(f"loaded from the cache in {cached:.2f} s")


if __name__ == "__main__":
    main()
