"""Run a network with other tensors in the place of its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.func import functional_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def places(net: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, by the names of `named_parameters`, every place where a parameter stands.

    Tied parameters stand in several. A module that is used in several places of the network is one place.
    """
    found: dict[int, list[str]] = {}
    for owner, module in net.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(f"{owner}.{name}" if owner else name)
    return {names[0]: tuple(names) for names in found.values()}


def call_with(
    net: nn.Module, parameters: Mapping[str, Tensor], x: Tensor, where: Mapping[str, tuple[str, ...]]
) -> Tensor:
    """Return `net(x)` with these parameters by name; `where` is `places(net)`.

    Left to tie parameters itself, torch gives a module that is used twice the new tensors for good.
    """
    spread = {place: value for name, value in parameters.items() for place in where[name]}
    out: Tensor = functional_call(net, spread, (x,), tie_weights=False)
    return out
