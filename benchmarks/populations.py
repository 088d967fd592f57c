"""Throughput of a population by its width: epochs a second of all runs together, validation included.

    python benchmarks/populations.py [--tasks mnist,cifar10] [--widths 1,2,3,4] [--out populations.json]

As many runs as places, on random images of the data sets' shapes at the paper's sizes, from each run's second epoch
on: the first has the capture and compilation of the step in it. Without a card everything is cut down (512 images, 2
samples, no compilation) so that the script can be tried; runs then follow one another, and their rate means little.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stfseb.experiments.bench import Sizes, _augment, make
from stfseb.experiments.machine import origin, script_command
from stfseb.training.population import Member, fit_population

if TYPE_CHECKING:
    from collections.abc import Sequence

CUT = 512  # images without a card


def throughput(task: str, key: str, width: int, epochs: int, device: torch.device) -> dict[str, Any]:
    """Return the epochs a second of `width` runs at once."""
    on_cuda = device.type == "cuda"
    sizes = Sizes() if on_cuda else Sizes(samples=2)
    made = [make(task, key, sizes, torch.device("cpu")) for _ in range(width)]
    x, y = made[0][1:] if on_cuda else (part[:CUT] for part in made[0][1:])
    members = [Member(str(number), lambda number=number: made[number][0], number) for number in range(width)]
    marks: list[float] = []

    def after_an_epoch(_: Member, history: list[dict[str, Any]]) -> bool:
        if len(history) > 1:
            marks.append(time.perf_counter())
        return False

    outcomes = fit_population(
        members,
        (x, y),
        (x[:256], y[:256]),
        width=width,
        device=device,
        epochs=epochs,
        patience=epochs,
        compiled=on_cuda,
        augment=_augment(task),
        prune=after_an_epoch,
    )
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        return {"task": task, "method": key, "width": width, "error": failed[0]}
    rate = (len(marks) - 1) / (marks[-1] - marks[0])
    return {"task": task, "method": key, "width": width, "epochs_timed": len(marks) - 1, "epochs_per_second": rate}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="mnist,cifar10", help="with commas")
    parser.add_argument("--widths", default="1,2,3,4", help="runs at once, with commas; ratios are over the first")
    parser.add_argument("--method", default="stfseb")
    parser.add_argument("--epochs", type=int, default=8, help="of each run, at least 4")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    args = parser.parse_args(words)
    if args.epochs < 4:
        parser.error(f"--epochs {args.epochs}: give at least 4, of which the first and the last are not timed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for task in args.tasks.split(","):
        base = None
        for width in map(int, args.widths.split(",")):
            row = throughput(task, args.method, width, args.epochs, device)
            base = base or row.get("epochs_per_second")
            if base and "error" not in row:
                row["over_first"] = row["epochs_per_second"] / base
            rows.append(row)
            print(json.dumps(row), flush=True)
            if device.type == "cuda":
                torch._dynamo.reset()
                torch.cuda.empty_cache()
    if args.out is not None:
        made = origin(device, script_command("populations", vars(args)))
        args.out.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
