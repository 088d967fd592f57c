"""What a CPU's training step and prediction gain where freed memory stays with the process (`networks/memory.py`).

Every measurement has a fresh process, since malloc's state outlives what is measured in it; the two ways take turns, so
that what else runs on the machine falls on both. A step is the one that `fit` takes on a CPU (batch 128, ten samples,
32 context points); a prediction is of 1,000 images with ten samples. Peak memory is the growth of the process beyond
what it had before the first step, so the memory that is kept shows in it.

    python benchmarks/memory.py [--rounds 3] [--steps 12] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stfseb.experiments.machine import PeakMemory, origin, script_command
from stfseb.methods.registry import method_class
from stfseb.networks.cnn import DeepCNN, SmallCNN
from stfseb.networks.memory import memory_kept
from stfseb.networks.precision import resolve
from stfseb.training.batches import ResidentBatches
from stfseb.training.engine import make_engine, make_optimiser

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")
NETWORKS = {"small": (SmallCNN, (1, 28, 28)), "deep": (DeepCNN, (3, 32, 32))}
METHODS = ("stfseb", "mcdropout")
WAYS = ("given back", "kept")


def measure(network: str, method: str, way: str, steps: int, images: int = 1000) -> dict[str, Any]:
    """Return seconds a step and a prediction, and peak megabytes, of this process."""
    torch.manual_seed(0)
    make, shape = NETWORKS[network]
    x, y = torch.rand(128, *shape), torch.randint(10, (128,))
    context = {"context": torch.rand(2000, *shape)} if method == "stfseb" else {}
    built = method_class(method)(make(in_channels=shape[0]), **context)
    test = torch.rand(images, *shape)
    with PeakMemory(CPU) as memory, memory_kept() if way == "kept" else nullcontext():
        optimiser = make_optimiser(built.train(), lr=5e-4)
        engine: Any = make_engine(
            built, ResidentBatches(x, y, len(x), 0, CPU), optimiser, precision=resolve("auto", built.net)
        )
        times = []
        for _ in range(steps + 2):
            started = time.perf_counter()
            engine.step(x, y)
            optimiser.step()
            times.append(time.perf_counter() - started)
        built.eval()
        built.predict_proba(test[:128], samples=10, batch_size=128)
        started = time.perf_counter()
        for part in test.split(128):  # a call with several passes would keep memory by itself in both ways
            built.predict_proba(part, samples=10, batch_size=len(part))
        predicted = time.perf_counter() - started
    return {"step_s": statistics.median(times[2:]), "prediction_s": predicted, "peak_mb": memory.megabytes}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--one", nargs=3, metavar=("NETWORK", "METHOD", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.one is not None:
        print(json.dumps(measure(*args.one, args.steps)))
        return
    rows = []
    for network in NETWORKS:
        for method in METHODS:
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for _ in range(args.rounds):
                for way in WAYS:
                    command = [sys.executable, __file__, "--steps", str(args.steps), "--one", network, method, way]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    found[way].append(json.loads(done.stdout))
            for way in WAYS:
                middle = {key: statistics.median(one[key] for one in found[way]) for key in found[way][0]}
                rows.append({"network": network, "method": method, "way": way} | middle)
                print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        settings = {key: value for key, value in vars(args).items() if key != "one"}
        args.out.write_text(
            json.dumps(origin(CPU, script_command("memory", settings)) | {"rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
