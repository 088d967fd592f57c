"""The feature extractor h of the function prior: a frozen copy of the network without its last layer.

Features are the input of the last `nn.Linear` that a forward pass reaches, unless a layer is named
(then its output) or a callable is given (then its result, for example a pretrained backbone). Dropout
is off, batch norm uses its running statistics, nothing gets a gradient; in modules that a callable reaches, too.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError, unknown
from stfseb.networks.constant import moved, quietly, reachable
from stfseb.networks.precision import running

if TYPE_CHECKING:
    from collections.abc import Callable

# "pretrained" is "init" for a network that was given with its pretrained weights: both copy it as it is.
EXTRACTORS = ("init", "pretrained", "independent", "he")


def frozen_network(net: nn.Module, extractor: str, seed: int) -> nn.Module:
    """Copy the network now, at construction: training will change it."""
    if extractor not in EXTRACTORS:
        raise unknown("extractor", extractor, EXTRACTORS)
    try:
        if extractor in ("init", "pretrained"):
            return copy.deepcopy(net)
        return reinitialised(net, seed) if extractor == "independent" else he_initialised(net, seed)
    except StfsebError:
        raise
    except Exception as error:  # a module may refuse to be copied in any way
        raise StfsebError(
            f"{type(net).__name__} cannot be copied for the function prior ({type(error).__name__}): "
            "give extractor=callable"
        ) from error


def last_linear(net: nn.Module, example: Tensor) -> str:
    """Return the name of the last `nn.Linear` that a forward pass on `example` reaches."""
    names = {module: name for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    reached: list[str] = []
    handles = [m.register_forward_hook(lambda m, *_: reached.append(names[m])) for m in names]
    try:
        _quiet_forward(net, example)
    finally:
        for handle in handles:
            handle.remove()
    if not reached:
        raise StfsebError(
            f"{type(net).__name__} has no nn.Linear to take features from: name a layer with features='layer', "
            "or give extractor=callable"
        )
    return reached[-1]


def reinitialised(net: nn.Module, seed: int) -> nn.Module:
    """Return a copy of the network with every layer initialised anew, as its constructor would."""
    fresh = copy.deepcopy(net)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in fresh.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif any(True for _ in module.parameters(recurse=False)):
                raise StfsebError(
                    f"extractor='independent' or 'he': layer '{name}' ({type(module).__name__}) has parameters but no "
                    "reset_parameters(); give the network to use as extractor=module"
                )
    return fresh


def he_initialised(net: nn.Module, seed: int) -> nn.Module:
    """Return a copy whose linear and convolutional weights are N(0, 2/fan_in), biases zero; other layers anew.

    He et al. 2015: with ReLU the size of the activations is kept from layer to layer, where torch's default
    shrinks them. tau1 does not carry over from one to the other unless features are normalised.
    """
    fresh = reinitialised(net, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in fresh.modules():
            if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                continue
            fan_in = module.weight[0].numel()
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * (2.0 / fan_in) ** 0.5)
            if module.bias is not None:
                module.bias.zero_()
    return fresh


class Features:
    """h: images -> (N, p), frozen, from a copy of a network or from any callable."""

    def __init__(self, source: Callable[[Tensor], Tensor], layer: str | None) -> None:
        self.source = source
        self.layer = layer  # None: the callable returns features itself
        self.modules = reachable(source)

    @classmethod
    def from_network(cls, net: nn.Module, example: Tensor, layer: str | None) -> Features:
        """Freeze `net` (a copy of the trained one) and read the input of its last Linear, or the output of `layer`."""
        frozen = net.eval().requires_grad_(False)
        if layer is None:
            return cls(frozen, f"input of {last_linear(frozen, example)}")
        names = [name for name, _ in frozen.named_modules() if name]
        if layer not in names:
            raise unknown("layer", layer, names)
        return cls(frozen, f"output of {layer}")

    def to(self, like: Tensor) -> Features:
        """Move the frozen network to the device and precision of `like`."""
        moved(self.source, like)
        return self

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the features of a batch, flattened to (N, p)."""
        # In the network's own precision, whatever the training runs in: h is computed once and kept.
        with running("float32", x.device):
            if self.layer is not None:
                out = self._hooked(x)
            else:
                with quietly(self.modules):
                    out = self.source(x)
        if out.shape[:1] != x.shape[:1]:
            raise StfsebError(f"the extractor turned {len(x)} images into features of shape {tuple(out.shape)}")
        return out.detach().flatten(1)

    def _hooked(self, x: Tensor) -> Tensor:
        assert isinstance(self.source, nn.Module)
        assert self.layer is not None
        kind, _, name = self.layer.partition(" of ")
        seen: list[Tensor] = []

        def keep(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            seen.append(inputs[0] if kind == "input" else output)

        handle = self.source.get_submodule(name).register_forward_hook(keep)
        try:
            _quiet_forward(self.source, x)
        finally:
            handle.remove()
        if not seen:
            raise StfsebError(f"features='{name}': the forward pass never reaches that layer")
        return seen[-1]


def _quiet_forward(net: nn.Module, x: Tensor) -> Tensor:
    """Run `net` in evaluation mode, without gradients or dropout, and leave its mode as it was."""
    with quietly([net]):
        out: Tensor = net(x)
    return out
