"""One layer's share of J diag(s^2) J', from its inputs a and the gradients g of the outputs with respect to its own.

- `F.linear` on rows (N, in): J_i J_j' = sum_o g_io g_jo sum_k s_ok^2 a_ik a_jk, the inner sum, over pairs of
  rows, shared by all classes: the gradient of the weight is never formed;
- convolutions, and `F.linear` on sequences: the weight's gradient of each row as one product of patches and g.

Products over parameters are float64, so that reduced-precision matrix units do not make them indefinite.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stfseb.methods.layer_calls import LINEAR, LayerCall
from stfseb.methods.twice import JACOBIAN_BYTES, Patches, weight_gram

_BLOCK_BYTES = 32 * 2**20


def is_supported(call: LayerCall) -> bool:
    """Tell whether a layer's per-row gradients can be written as products (else rows get copies of it)."""
    if call.kind == LINEAR:
        return len(call.input_shape) >= 2
    options = dict(call.options)
    return call.function in (F.conv1d, F.conv2d) and not isinstance(options.get("padding", 0), str)


def by_pairs(call: LayerCall) -> bool:
    """Tell whether a layer meets each row once, so that pairs of rows suffice."""
    return call.kind == LINEAR and len(call.input_shape) == 2


def layer_covariance(call: LayerCall, a: Tensor, g: Tensor, weight_scale: Tensor, bias_scale: Tensor | None) -> Tensor:
    """Return one layer's share of the covariances, (n, N, N), from inputs (N, ...) and gradients (n, N, ...)."""
    rows = len(a)
    if by_pairs(call):
        doubled = g.double()
        return torch.einsum("lio,ljo,ijo->lij", doubled, doubled, pair_products(a, weight_scale, bias_scale))
    patches, groups = _patches(call, a)
    count, channels = len(g), g.shape[-1] if call.kind == LINEAR else g.shape[2]
    spread = g.reshape(count, rows, -1, channels).mT if call.kind == LINEAR else g.flatten(3)
    share = weight_gram(spread.view(count, rows, groups, channels // groups, -1), patches, weight_scale.flatten())
    if bias_scale is None:
        return share
    biases = (spread.sum(-1) * bias_scale).double()
    return share + biases @ biases.mT


def _patches(call: LayerCall, a: Tensor) -> tuple[Tensor, int]:
    """Return what the weight meets at each position, (N, groups, K, positions), and the number of groups."""
    if call.kind == LINEAR:
        return a.reshape(len(a), 1, -1, a.shape[-1]).mT, 1
    options = dict(call.options)
    groups = int(options.get("groups", 1))
    flat = call.function is F.conv1d
    kernel = (1, call.weight_shape[2]) if flat else call.weight_shape[2:]
    stride, padding, dilation = (
        _pair(options.get(name, default), flat, default)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    images = a.unsqueeze(2) if flat else a
    columns: Tensor = Patches.apply(images, kernel, dilation, padding, stride)  # type: ignore[no-untyped-call]
    return columns.view(len(a), groups, columns.shape[1] // groups, -1), groups


def _pair(value: Any, flat: bool, lead: int) -> tuple[int, int]:
    """Return a convolution option for two dimensions; a flat one has `lead` in the dimension it lacks."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * (1 if flat else 2)
    return (lead, int(values[0])) if flat else (int(values[0]), int(values[-1]))


def pair_products(a: Tensor, weight_scale: Tensor, bias_scale: Tensor | None) -> Tensor:
    """Return sum_k s_ok^2 a_ik a_jk (+ the bias's s_o^2) for all pairs of rows, (N, N, O), in float64."""
    products: Tensor = _PairProducts.apply(a.double(), weight_scale.double().square())  # type: ignore[no-untyped-call]
    return products if bias_scale is None else products + bias_scale.double().square()


class _PairProducts(torch.autograd.Function):
    """T_ijo = sum_k V_ok a_ik a_jk in blocks of rows: the products a_ik a_jk are made again in backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, variance: Tensor) -> Tensor:
        """Return (N, N, O) from rows (N, K) and variances (O, K)."""
        ctx.save_for_backward(a, variance)
        return torch.cat([(block[:, None] * a) @ variance.mT for block in a.split(_block(a))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to both."""
        a, variance = ctx.saved_tensors
        by_variance = torch.zeros_like(variance)
        rows = []
        # T is symmetric in its rows: with the symmetric part of `outer`, each row's gradient counts twice.
        symmetric = (outer + outer.transpose(0, 1)) / 2
        for block, part in zip(a.split(_block(a)), symmetric.split(_block(a)), strict=True):
            products = (block[:, None] * a).flatten(0, 1)
            by_variance += part.flatten(0, 1).mT @ products
            rows.append(2 * torch.einsum("bjk,jk->bk", part @ variance, a))
        return torch.cat(rows), by_variance


def _block(a: Tensor) -> int:
    return int(max(1, _BLOCK_BYTES // (a.numel() * a.element_size())))


def layer_bytes(call: LayerCall, rows: int, itemsize: int, *, only: bool) -> tuple[int, int]:
    """Estimate the bytes this layer takes once and for each class; `only`: no other layer is linearised."""
    width = call.weight_shape[0]
    activations = 0 if only else rows * math.prod(call.output_shape) * itemsize * 4
    if by_pairs(call):
        block = min(_BLOCK_BYTES, rows * rows * call.weight_shape[1] * 8)
        return 4 * (block + rows * rows * width * 8), activations + 3 * rows * rows * width * 8
    weights = math.prod(call.weight_shape)
    patches = weights // width * math.prod(call.output_shape) // width * 2
    # The Jacobian of one class at least, of as many as a block holds at most, and what is computed from it.
    block = max(JACOBIAN_BYTES, rows * weights * (2 * itemsize + 8))
    return rows * patches * itemsize + block // 2, activations
