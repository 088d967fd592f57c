"""Run a chain of plain layers under many sets of weights at once: rows folded over samples, weights stacked.

vmap does the same for any module, but chooses the memory layout itself, and its grouped convolutions are slow on
the card. Here convolutions are `stacked_conv`, linear layers batched products, and everything between them sees
one batch of S * rows rows. What comes before the first layer with weights, and that layer's input, is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stfseb.networks.dropout import NoDropout
from stfseb.networks.folding import chain, rearranged
from stfseb.networks.functional import places
from stfseb.networks.layout import CardLayout, hooked
from stfseb.networks.stacked_conv import fits, stacked_conv

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PATCH = 128  # the widest patch that the first layer is turned into a product of


class StackedChain:
    """A network seen as one function of rows and of S sets of weights; made by `stacked_chain`."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        modules = chain(net)
        names = {id(module): name for name, module in net.named_modules()}
        self.steps: list[tuple[str, Callable[[Tensor], Tensor]]] = [
            (names.get(id(step), ""), step) for step in rearranged(modules, flatten=False)
        ]
        self.known_as = {place: name for name, tied in places(net).items() for place in tied}

    def __call__(self, x: Tensor, weights: Mapping[str, Tensor], samples: int) -> Tensor:
        """Return outputs (S, rows, L) for weights (S, ...) by the names of the network's parameters."""
        rows, shared, out = len(x), True, x
        with NoDropout(), CardLayout():
            for name, step in self.steps:
                if isinstance(step, nn.Conv2d | nn.Linear):
                    weight, bias = (
                        None
                        if own is None
                        else weights.get(self.known_as[f"{name}.{kind}".lstrip(".")], own.expand(samples, *own.shape))
                        for kind, own in (("weight", step.weight), ("bias", step.bias))
                    )
                    assert weight is not None
                    layer = _linear if isinstance(step, nn.Linear) else _conv2d
                    out, shared = layer(out, weight, bias, shared=shared), False
                else:
                    out = step(out)
        return out.view(samples, rows, -1) if not shared else out.expand(samples, *out.shape)


def stacked_chain(net: nn.Module) -> StackedChain | None:
    """Return the network as a `StackedChain`, or None where it is not a chain of layers that this can run."""
    first = True
    for module in chain(net):
        if hooked(module):
            return None
        if type(module) is nn.Conv2d:
            if not _plain(module, first=first):
                return None
            first = False
        elif type(module) is nn.Linear:
            first = False
        elif next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            return None
    return None if first else StackedChain(net)


def _plain(conv: nn.Conv2d, *, first: bool) -> bool:
    """Tell whether a convolution keeps the image's size and has channels that the kernels take."""
    height, width = conv.kernel_size
    same = conv.padding in ("same", (height // 2, width // 2)) and height % 2 == width % 2 == 1
    simple = conv.stride == conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"
    wide = fits(conv.in_channels, conv.out_channels)
    small = first and fits(16, conv.out_channels) and conv.in_channels * height * width <= _PATCH
    return same and simple and (wide or small)


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, *, shared: bool) -> Tensor:
    """Convolve rows (S * N, C, H, W), or (N, C, H, W) that all samples share, with weights (S, O, C, kh, kw)."""
    samples, outputs, channels, height, width = weight.shape
    dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
    last = x.permute(0, 2, 3, 1)
    kernel = weight.permute(0, 3, 4, 2, 1).reshape(samples, height * width, channels, outputs).to(dtype)
    if shared and channels * height * width <= _PATCH:
        last, kernel = _patches(last, height, width), kernel.reshape(samples, 1, -1, outputs)
        extra = next(n for n in (16, 32, 64, 128) if n >= kernel.shape[2]) - kernel.shape[2]
        last, kernel = F.pad(last, (0, extra)), F.pad(kernel, (0, 0, 0, extra))
        height = width = 1
    folded = last.to(dtype).reshape(1 if shared else samples, -1, *last.shape[1:])
    out: Tensor = stacked_conv(folded, kernel, height, width)
    if bias is not None:
        out = out + bias.to(dtype).view(samples, 1, 1, 1, outputs)
    return out.flatten(0, 1).permute(0, 3, 1, 2)


def _patches(last: Tensor, height: int, width: int) -> Tensor:
    """Return what the kernel meets at each place, (N, H, W, kh * kw * C)."""
    _, h, w, _ = last.shape
    padded = F.pad(last, (0, 0, width // 2, width // 2, height // 2, height // 2))
    return torch.cat([padded[:, i : i + h, j : j + w] for i in range(height) for j in range(width)], dim=-1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, shared: bool) -> Tensor:
    """Multiply rows (S * N, ..., K), or (N, ..., K) that all samples share, by weights (S, O, K)."""
    samples = len(weight)
    rows = x.reshape(1 if shared else samples, -1, x.shape[-1]).expand(samples, -1, -1)
    out = rows @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return out.reshape(-1, *x.shape[1:-1], weight.shape[1])
