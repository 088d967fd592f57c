"""Validation by the rows of a pass: its time, and the memory it takes.

    python benchmarks/validation.py [--out validation.json]

Random images of the data sets' shapes, S = 10, bf16 as in training on a card: 6,000 validation images for the MNIST
network, 5,000 for CIFAR-10's. Sizes take turns; times are the median of nine rounds. Memory is the allocator's peak
beyond what was there before; that of training stands in `stfseb bench`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stfseb.experiments.bench import Sizes, make
from stfseb.experiments.machine import origin, script_command
from stfseb.networks.precision import running
from stfseb.training.validation import validation_score

ROWS = (1024, 512, 256, 128)
CASES = (("mnist", "stfseb", 6000), ("mnist", "fseb", 6000), ("cifar10", "stfseb", 5000), ("cifar10", "fseb", 5000))


def measured(task: str, key: str, images: int, device: torch.device, rounds: int = 9) -> dict[str, Any]:
    """Return milliseconds and megabytes of a validation by the rows of its passes."""
    method, x, y = make(task, key, Sizes(), device)
    x, y = x[:images], y[:images]
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    peaks: dict[int, float] = {}

    def once(rows: int) -> None:
        batches = list(zip(x.split(rows), y.split(rows), strict=True))
        with running("bf16", device):
            validation_score(method, batches, 10)

    for turn in range(rounds + 1):
        for rows in ROWS:
            if device.type == "cuda":
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            once(rows)
            if device.type == "cuda":
                torch.cuda.synchronize()
                peaks[rows] = (torch.cuda.max_memory_allocated() - before) / 1e6
            if turn:  # the first warms up
                times[rows].append((time.perf_counter() - began) * 1e3)
    by_rows = {str(rows): {"ms": statistics.median(times[rows]), "mb": peaks.get(rows)} for rows in ROWS}
    return {"task": task, "method": key, "images": images, "by_rows": by_rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=int, help="fewer, to try it")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = origin(device, script_command("validation", vars(given))) | {"rows": []}
    for task, key, images in CASES:
        row = measured(task, key, given.images or images, device, given.rounds)
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
