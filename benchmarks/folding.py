"""How much faster one folded pass over S samples is than a Python loop over samples, on the CPU.

Both do the same training step of ST-FS-EB (two-conv net, batch 128, 32 context points, fp32) and are timed
alternately in one process; the ratio is what counts, since absolute times depend on the machine.

    python benchmarks/folding.py [--samples 10] [--steps 6]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from stfseb import STFSEB, SmallCNN
from stfseb.function_prior import FunctionPrior


def naive_step(net, x, y, context, features, optimiser, samples, num_data=54_000):
    """Return after one step done the usual way: dropout layers in training mode, one pass per sample."""
    net.train()
    prior = FunctionPrior(features, 1.0, 100.0, 5.0)
    total = torch.zeros(())
    for _ in range(samples):
        logits = net(torch.cat([x, context]))
        loss = torch.nn.functional.cross_entropy(logits[: len(x)], y, reduction="sum")
        total = total + (loss + prior.penalty(logits[len(x) :])) / samples
    theta = torch.cat([p.flatten() for p in net.parameters()])
    total = total + 0.5 * len(x) / num_data * 3.0 * torch.log1p(theta.square() / 5.0).sum()
    optimiser.zero_grad()
    (total / len(x)).backward()
    optimiser.step()


def folded_step(method, x, y, optimiser, num_data=54_000):
    method.train()
    terms = method.objective(x, y, num_data)
    optimiser.zero_grad()
    (terms.total / len(x)).backward()
    optimiser.step()


def measure(samples: int, steps: int) -> dict[str, float]:
    """Return the median seconds a step of both ways, timed alternately."""
    torch.manual_seed(0)
    x, y = torch.rand(128, 1, 28, 28), torch.randint(10, (128,))
    context = torch.rand(2000, 1, 28, 28)
    net, plain = SmallCNN(), SmallCNN()
    method = STFSEB(net, context, samples=samples)
    features = torch.rand(32, 128)
    ours, theirs = torch.optim.Adam(net.parameters(), 5e-4), torch.optim.Adam(plain.parameters(), 5e-4)
    times: dict[str, list[float]] = {"folded": [], "loop": []}
    for step in range(steps + 1):
        for name in times:
            started = time.perf_counter()
            if name == "folded":
                folded_step(method, x, y, ours)
            else:
                naive_step(plain, x, y, context[:32], features, theirs, samples)
            if step:  # the first step warms up
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    found = measure(options.samples, options.steps)
    print(
        f"S = {options.samples}, {torch.get_num_threads()} threads, fp32: folded {found['folded'] * 1e3:.0f} ms, "
        f"loop {found['loop'] * 1e3:.0f} ms a step: {found['loop'] / found['folded']:.2f} times faster"
    )


if __name__ == "__main__":
    main()
