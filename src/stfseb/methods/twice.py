"""Layers whose gradients are cheap to differentiate once more, and right where torch's are not.

The covariance of a linearised network contains gradients, and its own gradient differentiates those. autograd
differentiates a convolution's backward pass by convolutions whose kernels are whole images, which on the card
took 4 of 10 milliseconds of a step. Here the gradient by the input is written as a transposed convolution, whose
derivatives are ordinary convolutions again; that of 2x2 pooling is a selection. Weight normalisation is written
out, as torch's second derivative of it is wrong (2.13), and attention is run unfused, as the fused kernels have none.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stfseb.methods.layer_calls import call_parts
from stfseb.methods.row_gram import row_gram, row_slopes
from stfseb.networks.layout import MaxPool2x2, halves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


JACOBIAN_BYTES = 128 * 2**20  # held at a time


class Stage:
    """Which gradients a pass is for: `inputs_only` while those of the network's outputs by its layers are taken."""

    inputs_only = False


def substitute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], stage: Stage) -> Tensor | None:
    """Return what a call of `conv2d`, `max_pool2d` or `_weight_norm` returns, or None where it is left to torch."""
    if func is F.conv2d:
        x, weight, bias, options = call_parts(func, args, kwargs)
        if x.ndim == 4 and not isinstance(options.get("padding", 0), str):
            names, defaults = ("stride", "padding", "dilation"), (1, 0, 1)
            sizes = tuple(_pair(options.get(n, d)) for n, d in zip(names, defaults, strict=True))
            out: Tensor = _Conv2d.apply(x, weight, bias, sizes, int(options.get("groups", 1)), stage)  # type: ignore[no-untyped-call]
            return out
    elif func in (F.max_pool2d, torch.max_pool2d) and halves(*args, **kwargs):
        pooled: Tensor = MaxPool2x2.apply(args[0].permute(0, 2, 3, 1))  # type: ignore[no-untyped-call]
        return pooled.permute(0, 3, 1, 2)
    return normalised(func, args, kwargs)


def normalised(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return g v / |v|, which `torch._weight_norm` returns, or None of any other call."""
    if func is not torch._weight_norm:
        return None
    given = {"dim": 0, **dict(zip(("v", "g", "dim"), args, strict=False)), **kwargs}
    v, g, dim = given["v"], given["g"], given["dim"]
    # -1 is torch's word for all dimensions. Not torch.norm_except_dim: `vmap` runs it row by row, with a warning.
    others = None if dim == -1 else [axis for axis in range(v.ndim) if axis != dim % v.ndim]
    weight: Tensor = v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=dim != -1))
    return weight


class Normalised(TorchFunctionMode):
    """Weight normalisation written out, for passes under `vmap`, which the other substitutes do not follow."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the call if it is one; let everything through."""
        out = normalised(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if out is None else out


@contextmanager
def unfused() -> Iterator[None]:
    """Run attention by matrix products, whose gradients can be differentiated: the fused kernels' cannot."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


class _Conv2d(torch.autograd.Function):
    """A convolution whose gradient by the input is a transposed one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: tuple[Any, ...], groups: int, stage: Stage
    ) -> Tensor:
        """Convolve."""
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.groups, ctx.stage, ctx.biased = sizes, groups, stage, bias is not None
        stride, padding, dilation = sizes
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weights and bias."""
        x, weight = ctx.saved_tensors
        (stride, padding, dilation), outer = ctx.sizes, gradients[0]
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            over = [
                x.shape[i + 2]
                - ((outer.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[i + 2] - 1) + 1)
                for i in (0, 1)
            ]
            by_x = F.conv_transpose2d(outer, weight, None, stride, padding, over, ctx.groups, dilation)
        if not ctx.stage.inputs_only and ctx.needs_input_grad[1]:
            bias_sizes = [weight.shape[0]] if ctx.biased else None
            _, by_weight, by_bias = torch.ops.aten.convolution_backward(
                outer, x, weight, bias_sizes, stride, padding, dilation, False, [0, 0], ctx.groups,
                [False, True, ctx.biased],
            )  # fmt: skip
        return by_x, by_weight, by_bias if ctx.biased else None, None, None, None


class Patches(torch.autograd.Function):
    """What a kernel meets at each place of images (N, C, H, W): (N, C * kh * kw, places), in one copy.

    `F.unfold` launches a kernel for every image.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
        """Gather."""
        ctx.size, ctx.settings = x.shape[2:], (kernel, dilation, padding, stride)
        padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
        n, c, h, w = padded.shape
        out = [(size - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i, size in enumerate((h, w))]
        a, b, d, e = padded.stride()
        strides = (a, b, d * dilation[0], e * dilation[1], d * stride[0], e * stride[1])
        return padded.as_strided((n, c, *kernel, *out), strides).reshape(n, c * kernel[0] * kernel[1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Add up where each place came from."""
        return F.fold(gradients[0], ctx.size, *ctx.settings), None, None, None, None


class WeightGram(torch.autograd.Function):
    """J diag(s^2) J' of a layer's weights, (n, N, N) in float64, for n classes at N rows.

    J is the product of gradients g (n, N, groups, O, places) and patches (N, groups, K, places). It is made for a few
    classes at a time and made again in the backward pass, so that it is never held: for the six-convolution network,
    10 classes and 32 rows it has 370 MB.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, patches: Tensor, scale: Tensor) -> Tensor:
        """Return the covariances."""
        ctx.save_for_backward(g, patches, scale)
        return torch.cat([row_gram(_jacobian(part, patches), scale) for part in g.split(_classes(g, scale))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients by g, the patches and the scales; never in bf16, in which J would be another one."""
        g, patches, scale = ctx.saved_tensors
        with torch.autocast(outer.device.type, enabled=False):
            return _gram_slopes(g, patches, scale, outer)


def weight_gram(g: Tensor, patches: Tensor, scale: Tensor) -> Tensor:
    """Return J diag(s^2) J' of a layer's weights; see `WeightGram`."""
    out: Tensor = WeightGram.apply(g, patches, scale)  # type: ignore[no-untyped-call]
    return out


def _gram_slopes(g: Tensor, patches: Tensor, scale: Tensor, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    by_scale, by_patches, by_g = torch.zeros_like(scale), torch.zeros_like(patches), []
    both = outer + outer.mT
    size = _classes(g, scale)
    for part, slope in zip(g.split(size), both.split(size), strict=True):
        by_jacobian, by_part = row_slopes(_jacobian(part, patches), scale, slope)
        by_scale = by_scale + by_part
        count, rows, groups, outputs, _ = part.shape
        flat = by_jacobian.view(rows, count, groups, outputs, -1).transpose(1, 2).flatten(2, 3)
        by_patches = by_patches + flat.mT @ _grouped(part)
        by_g.append((flat @ patches).unflatten(2, (count, outputs)).permute(2, 0, 1, 3, 4))
    return torch.cat(by_g).contiguous(), by_patches.mT.contiguous().mT, by_scale


def _classes(g: Tensor, scale: Tensor) -> int:
    """Return for how many classes at a time J is made: in its own precision twice and once in float64."""
    return max(1, JACOBIAN_BYTES // (g.shape[1] * scale.numel() * (2 * g.element_size() + 8)))


def _grouped(g: Tensor) -> Tensor:
    """Return gradients (n, N, groups, O, places) as (N, groups, n * O, places): patches are shared by the classes."""
    return g.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _jacobian(g: Tensor, patches: Tensor) -> Tensor:
    """Return the gradients by a layer's weights, (N, n, weights)."""
    count, rows, groups, outputs, _ = g.shape
    product = (_grouped(g) @ patches.mT).view(rows, groups, count, outputs, -1)
    return product.transpose(1, 2).reshape(rows, count, -1)


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else [int(v) for v in value]
