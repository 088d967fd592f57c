"""Which parameters a network uses exactly once, as the weight or bias of a linear or convolution call.

For those calls the effect of a weight perturbation can be written down from the call's input and output
alone, which local reparameterisation, flipout and GFSVI's covariance live on. Parameters that are used
in any other way (norm layers, tied or reused weights, parametrised ones, attention kernels) are left out,
and the caller treats them generally. Calls are watched, so no layer needs converting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stfseb.methods.base import evaluating
from stfseb.networks.folding import deterministic

if TYPE_CHECKING:
    from collections.abc import Callable

LINEAR = "linear"
CONVOLUTION = "convolution"
_KINDS = {F.linear: LINEAR, F.conv1d: CONVOLUTION, F.conv2d: CONVOLUTION, F.conv3d: CONVOLUTION}
# Reading these of a parameter says nothing about how its values enter the output.
_HARMLESS = frozenset(
    {
        *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "ndim", "size", "dim", "numel"),
        *("stride", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_mps", "is_floating_point", "is_complex"),
        "is_contiguous",
    }
)


class LayerCall(NamedTuple):
    """One call with a weight that nothing else uses: names, shapes and the call's other arguments."""

    weight: str
    bias: str | None
    kind: str
    function: Callable[..., Tensor]
    weight_shape: tuple[int, ...]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


def single_use_calls(net: nn.Module, x: Tensor) -> list[LayerCall]:
    """Run the network once (evaluation mode, no dropout) and return its calls with weights of their own."""
    names = {id(p): name for name, p in net.named_parameters() if p.requires_grad}
    probe = _Probe(names)
    with torch.no_grad(), evaluating(net), probe:
        deterministic(net, x)
    return [
        call
        for call in probe.calls
        if probe.uses[call.weight] == 1 and (call.bias is None or probe.uses[call.bias] == 1)
    ]


def call_parts(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Return input, weight, bias and the other arguments, by name, of a linear or convolution call."""
    order = ["input", "weight", "bias"]
    if _KINDS[func] == CONVOLUTION:
        order += ["stride", "padding", "dilation", "groups"]
    given = {**dict(zip(order, args, strict=False)), **kwargs}
    return given.pop("input"), given.pop("weight"), given.pop("bias", None), given


def kind_of(func: Callable[..., Any]) -> str | None:
    """Return "linear", "convolution" or, for any other function, None."""
    try:
        return _KINDS.get(func)
    except TypeError:  # an unhashable callable is none of ours
        return None


class _Probe(TorchFunctionMode):
    """Count the uses of each parameter and note the calls that use it as a weight."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.uses = dict.fromkeys(names.values(), 0)
        self.calls: list[LayerCall] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Watch a call and let it through."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _called(func) in _HARMLESS:
            return out
        for value in _flat((args, kwargs)):
            if id(value) in self.names:
                self.uses[self.names[id(value)]] += 1
        if kind_of(func) is not None:
            x, weight, bias, options = call_parts(func, args, kwargs)
            bias_is_ours = bias is None or id(bias) in self.names
            if id(weight) in self.names and bias_is_ours:
                self.calls.append(
                    LayerCall(
                        self.names[id(weight)],
                        None if bias is None else self.names[id(bias)],
                        _KINDS[func],
                        func,
                        tuple(weight.shape),
                        tuple(x.shape),
                        tuple(out.shape),
                        tuple(sorted(options.items())),
                    )
                )
        return out


def _called(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
