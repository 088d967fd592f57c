"""Products of Jacobians over their weights, and what their gradient needs, in float64 from J as it is.

With J[i, l] the gradient of class l's output at row i by a layer's P weights, of scales s:

    K[l, i, j] = sum_p s_p^2 J[i, l, p] J[j, l, p]                                              (`row_gram`)
    W[i, l, p] = s_p sum_j D[l, i, j] s_p J[j, l, p],     b_p = sum_{i, l, j} D[l, i, j] s_p J[j, l, p] J[i, l, p]
                                                                                                (`row_slopes`)

With D = G + G' for a gradient G by K, W is the gradient by J and b that by s. s J is rounded to J's precision;
products and sums are float64: log det of K sees what single precision does to them.

On CUDA, single precision is widened inside of Triton kernels, on the way from memory to the matrix units. Why our
own: a library's product in float64 takes J in float64 from memory, and on an H200 the conversions there and back took
about as long as the products (1.0 and 1.15 of a step's 8.1 ms on CIFAR-10).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stfseb.networks.card_kernels import on_card

_KERNELS = "stfseb.methods.row_gram_kernels"
_PART = 4096  # weights whose products are summed at once


@torch.library.custom_op("stfseb::row_gram", mutates_args=())
def row_gram(jacobian: Tensor, scale: Tensor) -> Tensor:
    """Return K (n, N, N) in float64 from J (N, n, P) and scales (P)."""
    found: Tensor | None = _on_card("gram", jacobian, scale)
    if found is not None:
        return found
    # In parts, which run at once: one product of N x P by P x N keeps matrix units waiting for the few that add up P.
    size = min(_PART, len(scale))
    scaled = F.pad(jacobian * scale, (0, -len(scale) % size))
    parts = scaled.unflatten(2, (-1, size)).permute(1, 2, 0, 3).double()
    out: Tensor = (parts @ parts.mT).sum(1)
    return out


@torch.library.custom_op("stfseb::row_slopes", mutates_args=())
def row_slopes(jacobian: Tensor, scale: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Return W (N, n, P) in J's type and b (P) in that of the scales, from J (N, n, P), scales (P) and D (n, N, N).

    D is float64.
    """
    found: tuple[Tensor, Tensor] | None = _on_card("slopes", jacobian, scale, slope)
    if found is not None:
        return found
    scaled = (slope @ (jacobian * scale).transpose(0, 1).double()).transpose(0, 1).to(jacobian.dtype)
    by_jacobian, by_scale = (scaled * scale).contiguous(), (scaled * jacobian).sum((0, 1))
    return by_jacobian.to(jacobian.dtype), by_scale.to(scale.dtype)


@row_gram.register_fake
def _(jacobian: Tensor, scale: Tensor) -> Tensor:
    del scale
    rows, classes, _ = jacobian.shape
    return jacobian.new_empty(classes, rows, rows, dtype=torch.float64)


@row_slopes.register_fake
def _(jacobian: Tensor, scale: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    del slope
    return jacobian.new_empty(jacobian.shape), scale.new_empty(scale.shape)


def _on_card(name: str, jacobian: Tensor, scale: Tensor, *others: Tensor) -> Any | None:
    """Return what the kernel does, None where there is none for this J."""
    if jacobian.device.type != "cuda" or not jacobian.dtype == scale.dtype == torch.float32:
        return None
    key = jacobian.device, len(jacobian) > 16  # few rows have smaller tiles
    tensors = [tensor.contiguous() for tensor in (jacobian, scale, *others)]
    return on_card(_KERNELS, name, key, "a product in float64", *tensors)
