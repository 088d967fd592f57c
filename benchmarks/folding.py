"""How much faster the CPU's training step is than a Python loop over samples.

All ways do the same training step of ST-FS-EB (two-conv net, batch 128, 32 context points) and are timed alternately
in one process; the ratio is what counts, since absolute times depend on the machine, and alternating keeps what else
runs there from falling on one way alone. The loop is eager float32; the others are the steps that `fit` makes, in
float32 and in the precision that it chooses (bf16 where the processor has it). In every turn a way does two steps, of
which the second is timed: `fit` keeps memory between steps (`networks/memory.py`), the loop before has given it back.

    python benchmarks/folding.py [--samples 10] [--steps 6] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stfseb import STFSEB, SmallCNN
from stfseb.experiments.machine import origin, script_command
from stfseb.function_prior import FunctionPrior
from stfseb.networks.memory import memory_kept
from stfseb.networks.precision import resolve
from stfseb.training.batches import ResidentBatches
from stfseb.training.engine import make_engine, make_optimiser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_DATA = 54_000
CPU = torch.device("cpu")


def naive_step(net, x, y, context, features, optimiser, samples):
    """Return after one step done the usual way: dropout layers in training mode, one pass per sample."""
    net.train()
    prior = FunctionPrior(features, 1.0, 100.0, 5.0)
    total = torch.zeros(())
    for _ in range(samples):
        logits = net(torch.cat([x, context]))
        loss = torch.nn.functional.cross_entropy(logits[: len(x)], y, reduction="sum")
        total = total + (loss + prior.penalty(logits[len(x) :])) / samples
    theta = torch.cat([p.flatten() for p in net.parameters()])
    total = total + 0.5 * len(x) / NUM_DATA * 3.0 * torch.log1p(theta.square() / 5.0).sum()
    optimiser.zero_grad()
    (total / len(x)).backward()
    optimiser.step()


def engine_step(context, x, y, samples, precision) -> Callable[[], None]:
    """Return a step of the engine that `fit` takes on the CPU."""
    method = STFSEB(SmallCNN(), context, samples=samples).train()
    optimiser = make_optimiser(method, lr=5e-4)
    engine: Any = make_engine(method, ResidentBatches(x, y, len(x), 0, CPU), optimiser, precision=precision)

    def step() -> None:
        engine.step(x, y)
        optimiser.step()

    return step


def measure(samples: int, steps: int, batch: int = 128) -> dict[str, float]:
    """Return the median seconds a step of each way, timed alternately."""
    torch.manual_seed(0)
    x, y = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
    context, features = torch.rand(2000, 1, 28, 28), torch.rand(32, 128)
    plain = SmallCNN()
    theirs = torch.optim.Adam(plain.parameters(), 5e-4)
    ways: dict[str, Callable[[], None]] = {
        "loop, float32": lambda: naive_step(plain, x, y, context[:32], features, theirs, samples)
    }
    for precision in dict.fromkeys(("float32", resolve("auto", plain))):
        ways[f"engine, {precision}"] = engine_step(context, x, y, samples, precision)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(steps + 1):
        for name, step in ways.items():
            with memory_kept(name.startswith("engine")):
                step()
                started = time.perf_counter()
                step()
                if turn:  # the first steps warm up
                    times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    args = parser.parse_args(words)
    found = measure(args.samples, args.steps, args.batch)
    loop = found["loop, float32"]
    rows = [
        {"way": way, "step_s": seconds, "steps_per_second": 1 / seconds, "over_loop": loop / seconds}
        for way, seconds in found.items()
    ]
    for row in rows:
        print(json.dumps(row))
    if args.out is not None:
        made = origin(CPU, script_command("folding", vars(args)))
        args.out.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
