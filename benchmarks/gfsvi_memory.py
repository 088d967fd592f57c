"""Peak memory and time of a training step: GFSVI beside MFVI, on the six-convolution network.

Setting of the paper's table: DeepCNN on 32 x 32 colour images, 10 classes, batch 128, S = 10 samples, 32 context
points; its figure for GFSVI is 2.6 GB. Each line is measured in a process of its own, since a peak never goes
down: resident memory on the CPU (the interpreter and torch included), `max_memory_allocated` on CUDA.

    python benchmarks/gfsvi_memory.py [--device cpu|cuda] [--context 32 128] [--steps 2] [--small]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

CASES = ("MFVI", "GFSVI", "GFSVI last_layer", "GFSVI subset 2")


def measure(case: str, device: str, num_context: int, steps: int, small: bool) -> dict[str, float]:
    import torch

    from stfseb.methods.gfsvi import GFSVI
    from stfseb.methods.mfvi import MFVI
    from stfseb.networks.cnn import DeepCNN, SmallCNN

    torch.manual_seed(0)
    net = SmallCNN() if small else DeepCNN()
    shape = (1, 28, 28) if small else (3, 32, 32)
    x = torch.randint(0, 256, (128, *shape), dtype=torch.uint8)
    y = torch.arange(128) % 10
    context = torch.randint(0, 256, (max(256, num_context), *shape), dtype=torch.uint8)
    if case == "MFVI":
        method = MFVI(net)
    else:
        _, *form = case.split()
        settings = {"linearise": form[0]} if form else {}
        if len(form) > 1:
            settings["subset_classes"] = int(form[1])
        method = GFSVI(net, context, num_context=num_context, **settings)
        method.prior.set(10.0, 5.0)
    method.to(device)
    x, y = x.to(device), y.to(device)
    optimiser = torch.optim.Adam(method.parameters(), lr=5e-4)
    before = _resident() if device == "cpu" else 0.0

    def step() -> None:
        terms = method.objective(x, y, 45_000)
        optimiser.zero_grad()
        (terms.total / 128).backward()
        optimiser.step()

    step()
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / steps
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else _resident()
    return {"peak_gb": peak, "before_gb": before, "seconds": seconds}


def _resident() -> float:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, nargs="+", default=[32])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="the two-convolution network on 28 x 28 images")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        found = measure(arguments.case, arguments.device, arguments.context[0], arguments.steps, arguments.small)
        print(json.dumps(found))
        return
    print(f"{'method':20} {'context':>7} {'peak GB':>8} {'start GB':>8} {'s/step':>8}")
    for count in arguments.context:
        for case in CASES:
            command = [sys.executable, __file__, "--device", arguments.device, "--context", str(count)]
            command += ["--steps", str(arguments.steps), "--case", case] + ["--small"] * arguments.small
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{case:20} {count:7d} failed: {done.stderr.strip().splitlines()[-1]}")
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{case:20} {count:7d} {found['peak_gb']:8.2f} {found['before_gb']:8.2f} {found['seconds']:8.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
