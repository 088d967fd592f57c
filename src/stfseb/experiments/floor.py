"""The counted floor of a training step: no implementation runs much below it on the card at hand.

Operations and bytes of the convolutions and matrix products of one step, forward and backward, each tensor read
once and written once in bf16; divided by the card's own rates, measured in the same run. Elementwise work,
masks and the optimiser are left out, so the floor is below what can be reached.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from stfseb.methods.base import Method

_HEAVY = ("convolution", "mm", "addmm", "bmm")


class _Bytes(TorchDispatchMode):
    """Count the elements that heavy operations read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(name in str(func) for name in _HEAVY):
            tensors = [t for t in tree_leaves((args, out)) if isinstance(t, Tensor)]
            self.elements += sum(t.numel() for t in tensors)
        return out


def count(method: Method, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the floating-point operations and the bytes (bf16) of one step on the minibatch (x, y)."""
    method.train()
    with torch.no_grad():
        method.objective(x, y, len(x))  # caches the context's features, which are not part of a step
    flops, moved = FlopCounterMode(display=False), _Bytes()
    with flops, moved:
        method.objective(x, y, len(x)).total.backward()
    for parameter in method.parameters():
        parameter.grad = None
    return float(flops.get_total_flops()), 2.0 * moved.elements


def rates(device: torch.device) -> dict[str, float] | None:
    """Measure the card's bf16 matrix rate (operations a second) and copy bandwidth (bytes a second)."""
    if device.type != "cuda":
        return None
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _timed(lambda: a @ b, device)
    copy = _timed(lambda: target.copy_(source), device)
    return {"operations": 2 * 8192**3 / product, "bytes": 2 * source.numel() / copy}


def floor_seconds(operations: float, moved: float, steps: float, measured: dict[str, float]) -> float:
    """Return the floor of an epoch: the larger of arithmetic and traffic."""
    return steps * max(operations / measured["operations"], moved / measured["bytes"])


def _timed(action: Any, device: torch.device) -> float:
    for _ in range(3):
        action()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(10):
        action()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / 10
