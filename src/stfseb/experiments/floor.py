"""The counted floor of a training epoch: no implementation that writes each layer's output runs below it.

Counted are the convolutions and matrix products of a step, forward and backward, layer by layer:

- a layer costs 2 * places * K * O operations a row, once forward, once for its weights' gradient and, unless it is
  the first, once for its input's; it reads and writes inputs, outputs and weights once in each direction, in bf16;
- the dropout methods share all that comes before the first dropout layer between the S samples;
- the mean-field methods have S sets of weights, which are drawn (written once) and whose gradients are summed (read);
- GFSVI adds, at its N_c context points and for L classes, the forward pass, the gradients of all outputs by all
  layers, the Jacobians J of the convolutions, the products J S J' (for Linear layers over pairs of rows, which all
  classes share), and the gradients of all of these. Nothing is computed twice.

Left out: elementwise work, masks, noise, the optimiser, and the algebra of N_c x N_c matrices. Divided by the
machine's own rates, measured in the same run: those of bf16 on a card, though GFSVI's Jacobians are TF32 and their
products float64. All of this makes the floor lower than what can be reached.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stfseb.experiments.naive import DROPOUT, MEAN_FIELD, METHODS
from stfseb.networks.dropout import DROPOUT_MODULES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stfseb.methods.base import Method

_BYTES = 2  # of a number in bf16


@dataclass(frozen=True)
class Layer:
    """A Linear or convolution layer as it meets one row: operations and numbers of elements."""

    operations: int
    inputs: int
    outputs: int
    weights: int
    first: bool
    shared: bool  # comes before any dropout
    linear: bool


@dataclass(frozen=True)
class Count:
    """Floating-point operations and bytes moved."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Count:
        return Count(self.flops * times, self.bytes * times)


def layers_of(net: nn.Module, x: Tensor) -> list[Layer]:
    """Return the layers of a network in the order in which the first row of x meets them."""
    found: list[Layer] = []
    dropped = False

    def seen(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal dropped
        if isinstance(module, DROPOUT_MODULES):
            dropped = True
            return
        weight: Any = module.weight
        found.append(
            Layer(
                operations=2 * weight[0].numel() * out.numel(),
                inputs=inputs[0].numel(),
                outputs=out.numel(),
                weights=sum(p.numel() for p in module.parameters()),
                first=not found,
                shared=not dropped,
                linear=isinstance(module, nn.Linear),
            )
        )

    wanted = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *DROPOUT_MODULES)
    handles = [module.register_forward_hook(seen) for module in net.modules() if isinstance(module, wanted)]
    training = net.training
    try:
        with torch.no_grad():
            net.eval()(x[:1])
    finally:
        net.train(training)
        for handle in handles:
            handle.remove()
    return found


def step_count(method: Method, x: Tensor) -> Count | None:
    """Return what a step on the minibatch x (scaled) needs, None for a method whose step is not written down here."""
    key, samples, rows = method.key, method.samples, len(x)
    if key not in METHODS:
        return None
    layers = layers_of(method.net, x)
    settings: Any = method.settings
    points = settings.num_context if method.uses_context else 0
    if key in DROPOUT:
        rows += points
        return _sum(_both_ways(layer, rows if layer.shared else samples * rows) for layer in layers)
    if key not in MEAN_FIELD:
        return _sum(_both_ways(layer, rows) for layer in layers)
    data = samples * (rows + (points if key == "fseb" else 0))
    drawn = Count(0.0, 2 * samples * sum(layer.weights for layer in layers) * _BYTES)
    total = _sum(_both_ways(layer, data, samples) for layer in layers) + drawn
    if key == "gfsvi":
        total += _sum(_linearised(layer, points, method.outputs(x)) for layer in layers)
    return total


def _sum(counts: Iterable[Count]) -> Count:
    return sum(counts, Count())


def _both_ways(layer: Layer, rows: int, sets: int = 1) -> Count:
    """Return what a layer needs forward and backward; `sets` of weights share the rows, and the first one's input."""
    passes = 2 if layer.first else 3
    inputs = layer.inputs * (rows // sets if layer.first else rows)
    forward = inputs + layer.outputs * rows + layer.weights * sets
    # Read: the output's gradient, the input and the weights; written: the gradients of the latter two.
    backward = layer.outputs * rows + inputs + layer.weights * sets
    if not layer.first:
        backward += inputs + layer.weights * sets
    return Count(float(passes * layer.operations * rows), float(forward + backward) * _BYTES)


def _linearised(layer: Layer, points: int, classes: int) -> Count:
    """Return what a layer needs for the covariance of GFSVI's linearised network, its gradient included."""
    rows = classes * points
    # The gradients of all outputs go through the layer as rows do, from its outputs to its inputs.
    flows = Count() if layer.first else _both_ways(layer, rows)
    if layer.linear:  # sum_k s_ok^2 a_ik a_jk over pairs of rows, and its gradients by s^2 and by a
        products = 3 * 2 * points**2 * layer.weights
        jacobian, moved = 0, 3 * (points**2 * layer.outputs + points * layer.inputs + layer.weights)
    else:  # J from patches and gradients, J S J', the slope times J, and what that is by the gradients and patches
        products = 2 * 2 * classes * points**2 * layer.weights
        jacobian = (2 if layer.first else 3) * layer.operations * rows
        moved = 3 * (layer.outputs * rows + layer.inputs * points + layer.weights)
    return _both_ways(layer, points) + flows + Count(float(products + jacobian), float(moved) * _BYTES)


def rates(device: torch.device) -> dict[str, float]:
    """Measure the machine's matrix rate (operations a second) and copy bandwidth (bytes a second).

    On CUDA the rate is that of bf16; elsewhere the better of float32 and bf16.
    """
    on_cuda = device.type == "cuda"
    size, copied = (8192, 2**31) if on_cuda else (1024, 2**27)
    products = []
    for dtype in (torch.bfloat16,) if on_cuda else (torch.float32, torch.bfloat16):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        products.append(_timed(lambda a=a, b=b: a @ b, device))
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _timed(lambda: target.copy_(source), device)
    return {"operations": 2 * size**3 / min(products), "bytes": 2 * copied / copy}


def floor_seconds(count: Count, measured: dict[str, float]) -> float:
    """Return the least time for a count: the larger of arithmetic and traffic."""
    return max(count.flops / measured["operations"], count.bytes / measured["bytes"])


def _timed(action: Any, device: torch.device) -> float:
    """Return the best time of a few (on CUDA the mean: single launches cannot be told apart)."""
    repeats, best = (10, math.inf) if device.type == "cuda" else (1, math.inf)
    action()
    for _ in range(3):
        _wait(device)
        started = time.perf_counter()
        for _ in range(repeats):
            action()
        _wait(device)
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
