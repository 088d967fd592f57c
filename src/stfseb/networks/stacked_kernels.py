"""The Triton kernels behind `stacked_conv`: imported only where there is a CUDA device."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPLITS = 8  # parts of the rows whose weight gradients are summed separately


@triton.jit  # type: ignore[untyped-decorator]
def _conv(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    rows_in_all,
    height,
    width,
    x_stride,
    C: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    sample = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    channels = tl.arange(0, C)
    down = (rows // width) % height
    across = rows % width
    x += sample * x_stride
    weight += sample * KH * KW * C * O
    sums = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    for place in tl.static_range(KH * KW):
        dy = place // KW - KH // 2
        dx = place % KW - KW // 2
        inside = (down + dy >= 0) & (down + dy < height) & (across + dx >= 0) & (across + dx < width)
        inside &= rows < rows_in_all
        a = tl.load(x + (rows + dy * width + dx)[:, None] * C + channels[None, :], mask=inside[:, None], other=0.0)
        b = tl.load(weight + place * C * O + channels[:, None] * O + outputs[None, :])
        sums = tl.dot(a, b, sums)
    target = out + sample * rows_in_all * O + rows[:, None] * O + outputs[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(rows < rows_in_all)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    x,
    outer,
    out,
    rows_in_all,
    rows_each,
    height,
    width,
    x_stride,
    C: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    place = tl.program_id(0) % (KH * KW)
    part = tl.program_id(0) // (KH * KW)
    sample = tl.program_id(1).to(tl.int64)
    dy = place // KW - KH // 2
    dx = place % KW - KW // 2
    channels = tl.arange(0, C)
    outputs = tl.arange(0, O)
    x += sample * x_stride
    outer += sample * rows_in_all * O
    sums = tl.zeros((C, O), dtype=tl.float32)
    for start in range(part * rows_each, (part + 1) * rows_each, ROWS):
        rows = start + tl.arange(0, ROWS)
        down = (rows // width) % height
        across = rows % width
        inside = (down + dy >= 0) & (down + dy < height) & (across + dx >= 0) & (across + dx < width)
        inside &= rows < rows_in_all
        a = tl.load(x + (rows + dy * width + dx)[None, :] * C + channels[:, None], mask=inside[None, :], other=0.0)
        b = tl.load(outer + rows[:, None] * O + outputs[None, :], mask=(rows < rows_in_all)[:, None], other=0.0)
        sums = tl.dot(a, b, sums)
    target = out + ((sample * SPLITS + part) * KH * KW + place) * C * O
    tl.store(target + channels[:, None] * O + outputs[None, :], sums)


def conv(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """See `stacked_conv`."""
    shared, count, h, w, channels = x.shape
    samples, outputs = len(weight), weight.shape[3]
    rows = count * h * w
    out = torch.empty(samples, count, h, w, outputs, dtype=x.dtype, device=x.device)
    wide = min(outputs, 128)
    warps = 8 if wide == 128 or channels == outputs == 32 else 4  # as measured on an H200
    grid = (triton.cdiv(rows, 128), outputs // wide, samples)
    stride = 0 if shared == 1 else rows * channels
    sizes: tuple[Any, ...] = (channels, outputs, height, width, 128, wide)
    _conv[grid](x, weight, out, rows, h, w, stride, *sizes, num_warps=warps, num_stages=3)
    return out


def weights(x: Tensor, outer: Tensor, height: int, width: int) -> Tensor:
    """See `stacked_conv_weights`."""
    shared, count, h, w, channels = x.shape
    samples, outputs = len(outer), outer.shape[4]
    rows, places = count * h * w, height * width
    step = 128 if channels <= 32 else 64
    splits = _SPLITS if places > 1 else 8 * _SPLITS  # one place: few programs, so more parts
    each = triton.cdiv(triton.cdiv(rows, splits), step) * step
    out = torch.empty(samples, splits, places, channels, outputs, dtype=torch.float32, device=x.device)
    stride = 0 if shared == 1 else rows * channels
    sizes: tuple[Any, ...] = (channels, outputs, height, width, step, splits)
    _weights[(places * splits, samples)](x, outer, out, rows, each, h, w, stride, *sizes, num_warps=4, num_stages=3)
    return out.sum(1)
