"""The law of a linearised network that is a chain of plain layers: the backward pass written out, class by class.

    g_out = e_l,   Linear: g_in = W' g,   ReLU: g_in = 1[z > 0] g,   2x2 max-pooling: to the largest of four,
    convolution: g_in = transposed convolution of g

Forward quantities are computed once for all classes, gradients for all classes at once, and all of it is made of
operations that autograd differentiates once: nothing is differentiated twice, and a compiler can follow it.
`Linearisation` does the same for any network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stfseb.methods.layer_calls import LayerCall, single_use_calls
from stfseb.methods.layer_products import is_supported, layer_bytes, layer_covariance
from stfseb.networks.dropout import DROPOUT_MODULES
from stfseb.networks.folding import chain
from stfseb.networks.layout import halves, hooked

if TYPE_CHECKING:
    from collections.abc import Callable


class ChainLinearisation:
    """Means and covariances of a linearised chain; made by `chain_linearisation`."""

    last_layer = False

    def __init__(self, net: nn.Module, calls: dict[str, LayerCall], outputs: int) -> None:
        self.net = net
        self.calls = calls
        self.outputs = outputs
        names = {id(module): name for name, module in net.named_modules()}
        self.modules = [(f"{names[id(module)]}.weight", module) for module in chain(net)]

    def law(
        self, x: Tensor, scales: dict[str, Tensor], classes: Tensor, *, create_graph: bool
    ) -> tuple[Tensor, Tensor]:
        """Return means (n, N) and covariances (n, N, N) in float64 of the n `classes` at the N rows of x."""
        del create_graph  # whoever asks for gradients gets them
        count, rows = len(classes), len(x)
        inputs: dict[str, Tensor] = {}
        back: list[tuple[str, Callable[[Tensor], Tensor]]] = []
        out = x
        for name, module in self.modules:
            if name in self.calls:
                inputs[name] = out
            out, undo = _forward(module, out)
            back.append((name, undo))
        chosen = out.T[classes]
        g = F.one_hot(classes, self.outputs).to(out).unsqueeze(1).expand(count, rows, -1)
        covariance = torch.zeros(count, rows, rows, dtype=torch.float64, device=x.device)
        remaining = len(self.calls)
        for name, undo in reversed(back):
            if name in self.calls:
                call = self.calls[name]
                bias = None if call.bias is None else scales[call.bias]
                covariance = covariance + layer_covariance(call, inputs[name], g, scales[name], bias)
                remaining -= 1
                if not remaining:  # nothing random comes before this layer
                    break
            g = undo(g)
        return chosen.double(), covariance

    def bytes_needed(self, rows: int, itemsize: int) -> tuple[int, int]:
        """Estimate the memory of a covariance at its peak, gradients included: once, and for each class."""
        layers = [layer_bytes(call, rows, itemsize, only=False) for call in self.calls.values()]
        return sum(once for once, _ in layers), sum(each for _, each in layers)


def chain_linearisation(net: nn.Module, example: Tensor) -> ChainLinearisation | None:
    """Return the network's linearisation if it is a chain of layers that are written out here, else None."""
    calls = {call.weight: call for call in single_use_calls(net, example) if is_supported(call)}
    covered = {name for call in calls.values() for name in (call.weight, call.bias)}
    if any(p.requires_grad and name not in covered for name, p in net.named_parameters()):
        return None
    out = example
    with torch.no_grad():
        for module in chain(net):
            if hooked(module) or not _known(module, out):
                return None
            out, _ = _forward(module, out)
    return ChainLinearisation(net, calls, int(out.shape[1])) if out.ndim == 2 else None


def _known(module: nn.Module, x: Tensor) -> bool:
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if type(module) is nn.MaxPool2d:
        settings: Any = (module.kernel_size, module.stride, module.padding, module.dilation)
        return not (module.ceil_mode or module.return_indices) and halves(x, *settings)
    if type(module) is nn.Linear:
        return x.ndim == 2
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    return type(module) in (nn.ReLU, nn.Identity) or isinstance(module, DROPOUT_MODULES)


def _forward(module: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return a layer's output, and the function that takes gradients (n, N, ...) by it to gradients by its input."""
    if isinstance(module, nn.Linear):
        weight = module.weight
        return F.linear(x, weight, module.bias), lambda g: g @ weight
    if isinstance(module, nn.Conv2d):
        return _conv2d(module, x)
    if isinstance(module, nn.MaxPool2d):
        return _max_pool(x)
    if isinstance(module, nn.ReLU):
        passes = x > 0
        return F.relu(x), lambda g: torch.where(passes, g, 0.0)
    if isinstance(module, nn.Flatten):
        shape = x.shape[1:]
        return x.flatten(1), lambda g: g.unflatten(2, shape)
    return x, lambda g: g


def _conv2d(module: nn.Conv2d, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    weight = module.weight
    stride, padding, dilation = module.stride, module.padding, module.dilation
    assert not isinstance(padding, str)
    out = F.conv2d(x, weight, module.bias, stride, padding, dilation)
    reach = [
        (out.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[i + 2] - 1) + 1
        for i in (0, 1)
    ]
    over = [x.shape[i + 2] - reach[i] for i in (0, 1)]

    def undo(g: Tensor) -> Tensor:
        flat = F.conv_transpose2d(g.flatten(0, 1), weight, None, stride, padding, over, 1, dilation)
        return flat.view(*g.shape[:2], *flat.shape[1:])

    return out, undo


def _max_pool(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Pool 2x2; the first of equal values is taken, as `max_pool2d` does."""
    n, c, h, w = x.shape
    four = x.reshape(n, c, h // 2, 2, w // 2, 2)
    best = four[:, :, :, 0, :, 0]
    which = torch.zeros_like(best, dtype=torch.int8)
    for place, (i, j) in enumerate(((0, 1), (1, 0), (1, 1)), 1):
        other = four[:, :, :, i, :, j]
        better = other > best
        best = torch.where(better, other, best)
        which = torch.where(better, place, which).to(torch.int8)

    def undo(g: Tensor) -> Tensor:
        places = torch.arange(4, device=x.device, dtype=torch.int8).view(2, 1, 2)
        chosen = which[:, :, :, None, :, None] == places
        return torch.where(chosen, g[:, :, :, :, None, :, None], 0.0).reshape(*g.shape[:3], h, w)

    return best, undo
