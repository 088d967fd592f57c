"""The Triton kernels behind `row_gram`: imported only where there is a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = 64  # weights at a time
_PROGRAMS = 1024  # about eight for each of a large card's processors


@triton.jit  # type: ignore[untyped-decorator]
def _gram(  # type: ignore[no-untyped-def]
    jacobian,
    scale,
    out,
    rows,
    classes,
    weights,
    each,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    SINGLE: tl.constexpr,  # one block holds all rows
):
    part = tl.program_id(0)
    label = tl.program_id(1)
    blocks = tl.cdiv(rows, BLOCK)
    a = tl.program_id(2) // blocks * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(2) % blocks * BLOCK + tl.arange(0, BLOCK)
    left = jacobian + (a.to(tl.int64) * classes + label)[:, None] * weights
    right = jacobian + (b.to(tl.int64) * classes + label)[:, None] * weights
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float64)
    for start in range(part * each, tl.minimum((part + 1) * each, weights), WIDE):
        at = start + tl.arange(0, WIDE)
        inside = (at < weights)[None, :]
        s = tl.load(scale + at, mask=at < weights, other=0.0)[None, :]
        x = tl.load(left + at[None, :], mask=(a < rows)[:, None] & inside, other=0.0) * s
        if SINGLE:
            y = x
        else:
            y = tl.load(right + at[None, :], mask=(b < rows)[:, None] & inside, other=0.0) * s
        sums = tl.dot(x.to(tl.float64), tl.trans(y.to(tl.float64)), sums, out_dtype=tl.float64)
    target = out + ((part * classes + label).to(tl.int64) * rows + a[:, None]) * rows + b[None, :]
    tl.store(target, sums, mask=(a < rows)[:, None] & (b < rows)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _slopes(  # type: ignore[no-untyped-def]
    jacobian,
    scale,
    slope,
    out,
    by_scale,
    rows,
    classes,
    weights,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    at = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    label = tl.program_id(1)
    block = tl.program_id(2)
    a = block * BLOCK + tl.arange(0, BLOCK)
    inside = (at < weights)[None, :]
    s = tl.load(scale + at, mask=at < weights, other=0.0)[None, :]
    sums = tl.zeros((BLOCK, WIDE), dtype=tl.float64)
    for start in range(0, rows, BLOCK):
        b = start + tl.arange(0, BLOCK)
        both = (a < rows)[:, None] & (b < rows)[None, :]
        d = tl.load(slope + (label.to(tl.int64) * rows + a[:, None]) * rows + b[None, :], mask=both, other=0.0)
        place = (b.to(tl.int64) * classes + label)[:, None] * weights + at[None, :]
        x = tl.load(jacobian + place, mask=(b < rows)[:, None] & inside, other=0.0) * s
        sums = tl.dot(d, x.to(tl.float64), sums, out_dtype=tl.float64)
    scaled = sums.to(tl.float32)
    place = (a.to(tl.int64) * classes + label)[:, None] * weights + at[None, :]
    own = tl.load(jacobian + place, mask=(a < rows)[:, None] & inside, other=0.0)
    tl.store(out + place, scaled * s, mask=(a < rows)[:, None] & inside)
    target = by_scale + (block * classes + label).to(tl.int64) * weights + at
    tl.store(target, tl.sum(scaled * own, axis=0), mask=at < weights)


def gram(jacobian: Tensor, scale: Tensor) -> Tensor:
    """See `row_gram`."""
    rows, classes, weights = jacobian.shape
    block = _block(rows)
    pairs = triton.cdiv(rows, block) ** 2
    parts = max(1, _PROGRAMS // (classes * pairs))
    each = triton.cdiv(triton.cdiv(weights, parts), _WIDE) * _WIDE
    parts = triton.cdiv(weights, each)
    out = torch.empty(parts, classes, rows, rows, dtype=torch.float64, device=jacobian.device)
    sizes = (rows, classes, weights, each, block, _WIDE, pairs == 1)
    _gram[(parts, classes, pairs)](jacobian, scale, out, *sizes, num_warps=4, num_stages=3)
    return out.sum(0)


def slopes(jacobian: Tensor, scale: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """See `row_slopes`."""
    rows, classes, weights = jacobian.shape
    block = _block(rows)
    blocks = triton.cdiv(rows, block)
    out = torch.empty_like(jacobian)
    by_scale = torch.empty(blocks * classes, weights, dtype=torch.float32, device=jacobian.device)
    sizes = (rows, classes, weights, block, _WIDE)
    grid = (triton.cdiv(weights, _WIDE), classes, blocks)
    _slopes[grid](jacobian, scale, slope, out, by_scale, *sizes, num_warps=4, num_stages=2)
    return out, by_scale.sum(0)


def _block(rows: int) -> int:
    return 16 if rows <= 16 else 32
