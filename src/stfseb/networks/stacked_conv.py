"""A convolution with weights of its own for every sample, all samples in one call.

    out[s, n, h, w, o] = sum_{t, c} x[s, n, (h, w) + t, c] weight[s, t, c, o],      t over the kernel's places

Rows lie channels last; the kernel has odd sides, stride 1 and the padding that keeps the image's size. An input
with one sample serves them all. On CUDA the sums are Triton kernels (implicit matrix products in bf16 with
float32 sums); elsewhere, and as their reference, one `conv2d` a sample.

Why our own: a grouped convolution is the library's form of the same thing. On an H200 in bf16, forward and
backward of ten samples of 128 rows take (grouped, best layout / these kernels, microseconds) 390 / 168 for the
two-conv network's second layer, 467 / 218, 420 / 147 and 443 / 272 for three layers of the six-conv network;
only where a layer has as many inputs as outputs, at most 64, is the grouped form faster (349 / 524, 190 / 319).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stfseb.networks.card_kernels import on_card

_KERNELS = "stfseb.networks.stacked_kernels"
_WIDTHS = (16, 32, 64, 128)  # what the kernels' tiles are made for


def fits(channels: int, outputs: int) -> bool:
    """Tell whether the kernels take these numbers of channels."""
    return channels in _WIDTHS and outputs in _WIDTHS


def indexable(x: Tensor, outputs: int) -> bool:
    """Tell whether the kernels, whose places within a sample are 32-bit numbers, reach all of the input and output."""
    return x.shape[1:4].numel() * max(x.shape[4], outputs) < 2**31


@torch.library.custom_op("stfseb::stacked_conv", mutates_args=())
def stacked_conv(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """Return (S, N, H, W, O) from x (S or 1, N, H, W, C) and weights (S, height * width, C, O)."""
    if x.device.type == "cuda" and indexable(x, weight.shape[3]):
        out = by_kernel("conv", x.contiguous(), weight.contiguous(), height, width)
        if out is not None:
            return out
    kernels = weight.unflatten(1, (height, width)).permute(0, 4, 3, 1, 2)
    rows = x.expand(len(weight), *x.shape[1:]).permute(0, 1, 4, 2, 3)
    each = [F.conv2d(r, k, padding=(height // 2, width // 2)) for r, k in zip(rows, kernels, strict=True)]
    return torch.stack(each).permute(0, 1, 3, 4, 2).contiguous()


@torch.library.custom_op("stfseb::stacked_conv_weights", mutates_args=())
def stacked_conv_weights(x: Tensor, outer: Tensor, height: int, width: int) -> Tensor:
    """Return the gradient (S, height * width, C, O), float32 or wider, by the weights, given that by the outputs."""
    if x.device.type == "cuda" and indexable(x, outer.shape[4]):
        sums = by_kernel("weights", x.contiguous(), outer.contiguous(), height, width)
        if sums is not None:
            return sums
    _, _, h, w, _ = outer.shape
    padded = F.pad(x, (0, 0, width // 2, width // 2, height // 2, height // 2))
    padded = padded.expand(len(outer), *padded.shape[1:])
    places = [
        torch.einsum("snhwc,snhwo->sco", padded[:, :, i : i + h, j : j + w], outer)
        for i in range(height)
        for j in range(width)
    ]
    return torch.stack(places, dim=1).to(torch.promote_types(x.dtype, torch.float32))


@stacked_conv.register_fake
def _(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    del height, width
    return x.new_empty(len(weight), *x.shape[1:4], weight.shape[3])


@stacked_conv_weights.register_fake
def _(x: Tensor, outer: Tensor, height: int, width: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(len(outer), height * width, x.shape[4], outer.shape[4], dtype=wide)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight, ctx.height, ctx.width = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight = ctx.saved_tensors
    by_x = by_weight = None
    if ctx.needs_input_grad[0]:
        # The gradient by the input is a convolution with the kernel turned round.
        turned = weight.flip(1).transpose(2, 3).contiguous()
        by_x = stacked_conv(outer.contiguous(), turned, ctx.height, ctx.width)
        by_x = by_x.sum(0, keepdim=True) if len(x) == 1 != len(by_x) else by_x
    if ctx.needs_input_grad[1]:
        by_weight = stacked_conv_weights(x, outer.contiguous(), ctx.height, ctx.width).to(weight.dtype)
    return by_x, by_weight, None, None


stacked_conv.register_autograd(_backward, setup_context=_keep)


def by_kernel(name: str, x: Tensor, other: Tensor, height: int, width: int) -> Tensor | None:
    """Return what a kernel makes of its inputs, None where this card cannot run it."""
    key = x.device, x.dtype, x.shape[4], other.shape[-1], height, width
    return on_card(_KERNELS, name, key, "one convolution a sample", x, other, height, width)
