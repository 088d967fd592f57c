"""What a network must be, so that a method can go around it: asked once, when the method is made."""

from __future__ import annotations

import warnings

from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from stfseb.errors import StfsebError


class GroupingWarning(UserWarning):
    """Predictions of a row depend on which other rows are predicted with it."""


def check_module(net: object) -> None:
    """Refuse what is no network; the usual mistake is its class."""
    if isinstance(net, type):
        raise StfsebError(f"net is the class {net.__name__}: give an instance, {net.__name__}(...)")
    if not isinstance(net, nn.Module):
        raise StfsebError(f"net is {type(net).__name__}: give an nn.Module")


def check_network(net: nn.Module, label: str, *, lazy: bool) -> None:
    """Refuse what `label` cannot go around; `lazy` says whether weights may be made by the first pass."""
    check_module(net)
    if any(isinstance(module, ScriptModule) for module in net.modules()):
        raise StfsebError(
            f"{type(net).__name__} is scripted or traced, and what runs in it cannot be reached: give {label} the "
            "nn.Module that it was made from"
        )
    if not lazy and any(map(is_lazy, [*net.parameters(), *net.buffers()])):
        raise StfsebError(
            f"{type(net).__name__} has lazy layers, whose weights the first pass makes, and {label} needs them now: "
            "call the network on one batch first"
        )
    if not any(p.requires_grad for p in net.parameters()):
        raise StfsebError(f"{type(net).__name__} has no trainable parameters: unfreeze some, or give another net")
    for name, module in net.named_modules():
        if isinstance(module, _BatchNorm) and not module.track_running_stats:
            warnings.warn(
                f"layer '{name}' ({type(module).__name__}) has track_running_stats=False: predictions of a row will "
                "depend on the rows that are predicted with it, whatever the method",
                GroupingWarning,
                stacklevel=4,
            )
