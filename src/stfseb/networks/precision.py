"""How precisely a network is run while it trains.

"float32" is exact single precision; "tf32" lets CUDA's matrix units round inputs to 10 bits; "bf16" runs
convolutions and products in bfloat16 under autocast, with float32 weights, losses and updates (what leaves
autocast, as GFSVI's Jacobians do, has TF32 products). The function
prior is float64 in all of them. "auto" is bf16 for float32 networks with convolutions, on CUDA and on
processors with bf16 instructions, and float32 otherwise (small dense networks gain nothing from bf16, and
regression would lose digits).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stfseb.errors import unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

PRECISIONS = ("auto", "float32", "tf32", "bf16")


def resolve(precision: str, net: nn.Module) -> str:
    """Return the precision that "auto" means for `net` where it is now."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if precision != "auto":
        return precision
    parameter = next(p for p in net.parameters() if p.is_floating_point())
    convolves = any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in net.modules())
    return "bf16" if convolves and parameter.dtype == torch.float32 and _has_bf16(parameter.device) else "float32"


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # No public name yet; without it the processor is taken to have no such instructions.
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return device.type == "cpu" and bool(supported())


@contextmanager
def running(precision: str, device: torch.device) -> Iterator[None]:
    """Run a block in a resolved precision; the global switches are given back afterwards."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee" if precision == "float32" else "tf32"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value
