"""Functions that are constants of a prior: training changes nothing of them, and no dropout is drawn in them.

An extractor or a prior mean may be a module, a method of one (`net.forward_features`), `functools.partial` of either,
or any function that calls modules. The first three can be copied; of the last only what it reaches can be kept quiet.
"""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError
from stfseb.networks.dropout import NoDropout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Function = Callable[[Tensor], Tensor]


_COPIED = "_copied_by_stfseb"


def owner(function: Any) -> nn.Module | None:
    """Return the module that a function is, or of which it is a method."""
    while isinstance(function, functools.partial):
        function = function.func
    found = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return found if isinstance(found, nn.Module) else None


def detached(function: Function, net: nn.Module | None = None) -> Function:
    """Return a function that has a copy of its module as it is now, if it has one and shares tensors with `net`.

    Without `net` the module is copied in any case.
    """
    module = owner(function)
    if module is None or not (net is None or _tensors(module) & _tensors(net)):
        return function
    try:
        module = copy.deepcopy(module)
        module.__dict__[_COPIED] = True
    except Exception as error:  # a module may refuse to be copied in any way
        raise StfsebError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}), so that the prior would follow its "
            "training: give a module of its own, or a function"
        ) from error
    return _rebound(function, module)


def moved(function: Any, like: Tensor) -> None:
    """Move the module that a function is, or a copy that was made here, to the device and precision of `like`.

    The module of a user's own method stays where it is.
    """
    module = owner(function)
    if module is None or not (isinstance(function, nn.Module) or _COPIED in vars(module)):
        return
    if any(_elsewhere(value, like) for value in [*module.parameters(), *module.buffers()]):
        module.to(like.device, like.dtype)


def reachable(function: Any) -> list[nn.Module]:
    """Return the modules that a function may call: its own, arguments, variables around it and attributes."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            found[id(one)] = one
        else:
            waiting += [part for part in _parts(one) if callable(part)]
    return list(found.values())


@contextmanager
def quietly(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules in evaluation mode, draw no dropout, compute no gradients; leave the modes as they were."""
    modes = {module: module.training for top in modules for module in top.modules()}
    for module in modes:
        module.training = False
    try:
        with torch.no_grad(), NoDropout():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _tensors(module: nn.Module) -> set[int]:
    return {id(value) for value in [*module.parameters(), *module.buffers()]}


def _elsewhere(value: Tensor, like: Tensor) -> bool:
    return value.device != like.device or (value.is_floating_point() and value.dtype != like.dtype)


def _rebound(function: Any, module: nn.Module) -> Function:
    """Return the function with another module in place of its own."""
    if isinstance(function, functools.partial):
        return functools.partial(_rebound(function.func, module), *function.args, **function.keywords)
    return module if isinstance(function, nn.Module) else MethodType(function.__func__, module)


def _parts(function: Any) -> list[Any]:
    """Return what a callable has at hand: of a function its variables, of an object its attributes."""
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, MethodType):
        owned = function.__self__
        return [function.__func__, *([owned] if isinstance(owned, nn.Module) else _attributes(owned))]
    if not isinstance(function, FunctionType):
        return _attributes(function)
    if (function.__module__ or "").split(".")[0] == "torch":
        return []
    around = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [*around, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *named]


def _attributes(owned: Any) -> list[Any]:
    return [] if isinstance(owned, type) else list(getattr(owned, "__dict__", {}).values())


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises where the variable has no value yet
    except ValueError:
        return False
    return True
