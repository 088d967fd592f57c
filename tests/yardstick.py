"""How fast this machine is, for limits on time that were set on another one."""

from __future__ import annotations

import time

import torch
from torch import nn

# CPU seconds of the two pieces of work on the machine of two cores on which the limits were set.
PLAIN, TENSORS = 0.125, 0.32


def slowness() -> float:
    """Return how many times more CPU time than there work takes here and now; 1 where it takes less."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return max(1.0, _cpu(_plain) / PLAIN, _cpu(_tensors) / TENSORS)
    finally:
        torch.set_num_threads(threads)


def _cpu(work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _plain():
    sum(i * i for i in range(3_000_000))


def _tensors():
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten())
    x = torch.ones(64, 1, 28, 28)
    for _ in range(20):
        net(x).sum().backward()
