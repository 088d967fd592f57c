"""Single steps on a card: the share of factoring and solving, GFSVI's step beside MFVI's, prediction against a loop.

    python benchmarks/steps.py [--only share,gfsvi,prediction] [--out steps.json]

Random images of the data sets' shapes, batch 128, S = 10, 10 classes. A step is the captured, compiled bf16 one that
`fit` replays: the best of five means over 60 replays. The share of solving is a difference: the same step with the
quadratic form of the function prior replaced by a sum of squares; factoring is timed alone, an epoch's at once.
Prediction: 10,000 images, the median of five; the loop is eager, ten passes a minibatch in train mode, under the
same precision.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from stfseb import DeepCNN, MCDropout, SmallCNN
from stfseb.experiments.bench import Sizes, _augment, make
from stfseb.experiments.machine import origin, script_command
from stfseb.function_prior import FunctionPrior
from stfseb.methods.predictor import Predictor
from stfseb.networks.precision import running
from stfseb.training.batches import ResidentBatches
from stfseb.training.engine import CapturedEngine, make_engine, make_optimiser

if TYPE_CHECKING:
    from collections.abc import Callable

REPLAYS = 60


def captured(task: str, key: str, num_context: int) -> tuple[CapturedEngine, float]:
    """Return an engine ready to be replayed and its peak memory beyond what was there before, MB."""
    torch._dynamo.reset()
    device = torch.device("cuda")
    method, x, y = make(task, key, Sizes(num_context=num_context), device)
    method.prepare(x[:512], y[:512])
    method.train()
    batches = ResidentBatches(x, y, 128, 0, device, _augment(task))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = make_engine(
        method, batches, make_optimiser(method, lr=5e-4), precision="bf16", capture=True, compiled=True
    )
    assert isinstance(engine, CapturedEngine)
    engine.full.load(batches.order(1)[: engine.full.order.numel()])
    engine.graph.replay()
    torch.cuda.synchronize()
    return engine, (torch.cuda.max_memory_allocated() - before) / 1e6


def step_us(engine: CapturedEngine) -> float:
    """Return the microseconds of one replay."""
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        engine.full.counter.zero_()
        start.record()
        for _ in range(REPLAYS):
            engine.graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / REPLAYS * 1000)
    return best


def share(num_context: int) -> dict[str, Any]:
    """Return what solving and factoring take of ST-FS-EB's step on the MNIST network."""
    engine, _ = captured("mnist", "stfseb", num_context)
    whole = step_us(engine)
    engine.full._factor()
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.full._factor()
    torch.cuda.synchronize()
    factor = (time.perf_counter() - start) / engine.full.steps * 1e6
    with patch.object(FunctionPrior, "_penalty", lambda _, values: values.double().square().sum((-2, -1)) * 1e-3):
        bare = step_us(captured("mnist", "stfseb", num_context)[0])
    return {
        "what": "share",
        "num_context": num_context,
        "step_us": whole,
        "without_solve_us": bare,
        "factor_us": factor,
        "share": (whole - bare + factor) / (whole + factor),
    }


def gfsvi(task: str) -> dict[str, Any]:
    """Return GFSVI's step with 32 context points, and MFVI's in the same run."""
    engine, memory = captured(task, "gfsvi", 32)
    step = step_us(engine)
    del engine
    mfvi = step_us(captured(task, "mfvi", 32)[0])
    return {
        "what": "gfsvi",
        "task": task,
        "step_us": step,
        "peak_memory_mb": memory,
        "mfvi_step_us": mfvi,
        "over_mfvi": step / mfvi,
    }


def prediction(task: str, precision: str, batch: int, images: int = 10_000) -> dict[str, Any]:
    """Return the seconds of ten samples for all images, in a loop of passes and by the predictor."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    network, shape = (SmallCNN(), (1, 28, 28)) if task == "mnist" else (DeepCNN(), (3, 32, 32))
    x = torch.randint(256, (images, *shape), dtype=torch.uint8, device=device)
    method = MCDropout(network, samples=10).to(device)

    def timed(what: Callable[[], object]) -> float:
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            what()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])

    def passes(part: torch.Tensor) -> torch.Tensor:
        return torch.stack([network(part.float() / 255).float().softmax(-1) for _ in range(10)]).mean(0)

    def loop() -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return torch.cat([passes(part) for part in x.split(batch)])

    network.train()
    with running("float32", device):
        slow = timed(loop)
    network.eval()
    predictor = Predictor(method, x, batch, 10, precision=precision)
    fast = timed(lambda: predictor.predict_proba(x))
    row = {"what": "prediction", "task": task, "precision": precision, "batch": batch, "images": images}
    return {**row, "loop_s": slow, "predictor_s": fast, "ratio": slow / fast}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="share,gfsvi,prediction", help="of these, with commas")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--images", type=int, default=10_000, help="predicted")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if not torch.cuda.is_available() and wanted != ["prediction"]:
        sys.exit("steps are captured on CUDA, and there is none here; --only prediction runs anywhere")
    cases: list[Callable[[], dict[str, Any]]] = []
    if "share" in wanted:
        cases += [lambda n=n: share(n) for n in (32, 1024)]
    if "gfsvi" in wanted:
        cases += [lambda task=task: gfsvi(task) for task in ("mnist", "cifar10")]
    if "prediction" in wanted:
        cases += [
            lambda t=t, p=p, b=b: prediction(t, p, b, args.images)
            for t in ("mnist", "cifar10")
            for p in ("bf16", "float32")
            for b in (128, 256)
        ]
    rows = []
    for case in cases:
        rows.append(case())
        print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        made = origin(device, script_command("steps", vars(args)))
        args.out.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
