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

from stfseb.methods.layer_calls import LINEAR, LayerCall


def is_supported(call: LayerCall) -> bool:
    """Tell whether a layer's per-row gradients can be written as products (else vmap(grad) makes them)."""
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
        first, second = torch.triu_indices(rows, rows, device=a.device)
        products = pair_products(a, weight_scale, bias_scale)
        doubled = g.double()
        parts = (doubled[:, first] * doubled[:, second] * products).sum(-1)
        return parts[:, pair_index(rows, a.device)]
    patches, groups = _patches(call, a)
    count, channels = len(g), g.shape[-1] if call.kind == LINEAR else g.shape[2]
    spread = g.reshape(count, rows, -1, channels).mT if call.kind == LINEAR else g.flatten(3)
    # (N, groups, n * O / groups, positions) x (N, groups, positions, K): patches are shared by the classes.
    grouped = spread.view(count, rows, groups, channels // groups, -1).permute(1, 2, 0, 3, 4).flatten(2, 3)
    weights = (grouped @ patches.mT).view(rows, groups, count, channels // groups, -1)
    weights = weights.permute(2, 0, 1, 3, 4).reshape(count, rows, -1) * weight_scale.flatten()
    doubled = weights.double()
    share = doubled @ doubled.mT
    if bias_scale is not None:
        biases = (spread.sum(-1) * bias_scale).double()
        share = share + biases @ biases.mT
    return share


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
    columns = F.unfold(a.unsqueeze(2) if flat else a, kernel, dilation, padding, stride)
    return columns.view(len(a), groups, columns.shape[1] // groups, -1), groups


def _pair(value: Any, flat: bool, lead: int) -> tuple[int, int]:
    """Return a convolution option for two dimensions; a flat one has `lead` in the dimension it lacks."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * (1 if flat else 2)
    return (lead, int(values[0])) if flat else (int(values[0]), int(values[-1]))


def pair_products(a: Tensor, weight_scale: Tensor, bias_scale: Tensor | None) -> Tensor:
    """Return sum_k s_ok^2 a_ik a_jk (+ the bias's s_o^2) for the pairs i <= j, (pairs, O), in float64."""
    first, second = torch.triu_indices(len(a), len(a), device=a.device)
    doubled = a.double()
    products = (doubled[first] * doubled[second]) @ weight_scale.double().square().mT
    return products if bias_scale is None else products + bias_scale.double().square()


def pair_index(rows: int, device: torch.device) -> Tensor:
    """Return (N, N) positions in the list of pairs i <= j: spreads a triangle into a symmetric matrix."""
    first, second = torch.triu_indices(rows, rows, device=device)
    index = torch.zeros(rows, rows, dtype=torch.int64, device=device)
    order = torch.arange(len(first), device=device)
    index[first, second] = order
    index[second, first] = order
    return index


def layer_bytes(call: LayerCall, rows: int, itemsize: int, *, only: bool) -> int:
    """Estimate the bytes that one class takes at its peak in this layer; `only`: no other layer is linearised."""
    width = call.weight_shape[0]
    activations = 0 if only else rows * math.prod(call.output_shape) * itemsize * 8
    if by_pairs(call):
        return activations + rows * (rows + 1) // 2 * (call.weight_shape[1] + 2 * width) * 16
    weights = math.prod(call.weight_shape)
    patches = weights // width * math.prod(call.output_shape) // width * 2
    return activations + rows * (patches * itemsize + weights * (3 * itemsize + 16))
