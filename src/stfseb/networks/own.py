"""Networks of a user's own: a Python file, and the class or function in it that returns an `nn.Module`.

The file is run when a network is built from it and at no other time: reading a task or a model runs nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stfseb.data.network_entry import NetworkFile, read_source
from stfseb.errors import StfsebError, unknown
from stfseb.networks.registry import OWN, build, own_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DIGITS = 12  # of a fingerprint, in messages


class OtherNetworkWarning(UserWarning):
    """The file of a model's network is not the one that the model was trained with."""


def make_own(network: NetworkFile, settings: dict[str, Any], offered: dict[str, Any]) -> nn.Module:
    """Return a fresh network of the file.

    Args:
        network: the file and the name in it.
        settings: arguments of the class or function.
        offered: further arguments, of which it gets those that are among its parameters by name.
    """
    make = _find(_module(Path(network.path), network.sha256), network.file, network.make)
    named = _parameters(make)
    arguments = {**{key: value for key, value in offered.items() if key in named}, **settings}
    about: dict[str, Any] = {
        "file": network.file,
        "make": network.make,
        "sha256": network.sha256,
        "arguments": arguments,
    }
    if (seed := _fresh_seed()) is not None:
        about["seed"] = seed
    return _called(make, about, network.path)


def rebuild(spec: dict[str, Any], path: Path, shape: Sequence[int] | None = None) -> nn.Module:
    """Return the network (for an ensemble the list of them) that a saved model describes, from its file at `path`.

    A file that has changed since is used all the same, with an `OtherNetworkWarning`. Layers that wait for their first
    images get one of this shape.
    """
    if spec.get("network") == "list":
        return nn.ModuleList(rebuild(member, path, shape) for member in spec["members"])
    if own_file(spec) is None:  # an ensemble may be of both kinds
        return build(spec)
    digest = hashlib.sha256(read_source(path)).hexdigest()
    if digest != spec["sha256"]:
        warnings.warn(
            f"{path} (sha256 {digest[:_DIGITS]}...) is not the file that the model was trained with, {spec['file']} "
            f"(sha256 {spec['sha256'][:_DIGITS]}...): the network is as the file is now",
            OtherNetworkWarning,
            stacklevel=3,
        )
    make = _find(_module(path, digest), path.name, spec["make"])
    # With the fingerprint of the training's file, also where this one is another: the model may be saved again.
    about = {**{key: spec[key] for key in ("file", "make", "sha256")}, "arguments": dict(spec["arguments"])}
    with torch.random.fork_rng(devices=[]):
        if "seed" in spec:  # tensors that the network draws and that are not among its weights are drawn again
            about["seed"] = int(spec["seed"])
            torch.default_generator.manual_seed(about["seed"])
        net = _called(make, about, str(path))
        if shape is not None and any(map(is_lazy, [*net.parameters(), *net.buffers()])):
            _forward(net, tuple(shape), f"{spec['make']} of {path.name}", str(path))
    return net


def check_output(net: nn.Module, network: NetworkFile, shape: tuple[int, int, int], classes: int) -> None:
    """Raise unless the network turns two images of this shape into two rows of as many numbers as there are classes."""
    name, size = f"{network.make} of {network.file}", "x".join(map(str, shape))
    out = _forward(net, shape, name, network.path)
    if not isinstance(out, torch.Tensor):
        raise StfsebError(f"{name} gives a {type(out).__name__}: let forward return a tensor of logits (N, {classes})")
    if tuple(out.shape) != (2, classes):
        raise StfsebError(
            f"{name} turns 2 images of {size} into {tuple(out.shape)}, the task's classes ask for (2, {classes}): give "
            "it a last layer with as many outputs, for example by a parameter named classes"
        )


def _forward(net: nn.Module, shape: tuple[int, ...], name: str, path: str) -> Any:
    """Return what the network makes of two grey images; layers that wait for their first have their shapes then."""
    like = next(net.parameters(), torch.empty(0))
    modes = [(module, module.training) for module in net.modules()]
    net.eval()  # one image has no batch statistics, and nothing is to be learnt from these
    try:
        with torch.no_grad():
            return net(torch.full((2, *shape), 0.5, dtype=like.dtype, device=like.device))
    except Exception as error:
        size = "x".join(map(str, shape))
        raise StfsebError(f"{name} cannot take images of {size}: {_in_words(error, path)}") from error
    finally:
        for module, mode in modes:
            module.training = mode


def _fresh_seed() -> int | None:
    """Return the seed of torch's default generator, None where something has been drawn since it was seeded."""
    seed = torch.initial_seed()
    return seed if torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state()) else None


def _module(path: Path, sha256: str) -> ModuleType:
    """Return the file as a module, run once a process for each of its versions."""
    name = f"stfseb_network_{hashlib.sha256(f'{path} {sha256}'.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    source = read_source(path)
    if hashlib.sha256(source).hexdigest() != sha256:
        raise StfsebError(f"network file '{path}' has changed since the command was started: start it again")
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # what looks a class's module up finds it
    try:
        # Many files seed, or draw, when they are imported. That is once a process, by whichever run comes first: its
        # weights are to be those of its seed all the same, and what the file draws is to be equal in every process.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        remedy = "mend the file, which must run by itself"
        if isinstance(error, ModuleNotFoundError):
            remedy = "install it, or put what is needed into the same file"
        raise StfsebError(
            f"network file '{path.name}' does not import: {_in_words(error, str(path))}: {remedy}"
        ) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find(module: ModuleType, file: str, make: str) -> Callable[..., Any]:
    found = getattr(module, make, None)
    if found is None:
        own = [name for name, value in vars(module).items() if _is_own(value, module)]
        if not own:
            raise StfsebError(f"network file '{file}' has no '{make}', nor any other class or function: write one")
        raise unknown(f"class or function of {file}", make, own)
    if not callable(found) or isinstance(found, nn.Module):
        raise StfsebError(f"{make} of {file} is a {type(found).__name__}: name a class or function that makes networks")
    if not _is_own(found, module):  # else a model could name, say, torch.load
        raise StfsebError(f"{make} of {file} is imported there: write a function in {file} that calls it, name that")
    maker: Callable[..., Any] = found
    return maker


def _is_own(value: Any, module: ModuleType) -> bool:
    """Tell whether something is a class or function of the file itself; networks may be imported."""
    while isinstance(value, partial):
        value = value.func
    network = inspect.isclass(value) and issubclass(value, nn.Module)
    return callable(value) and (network or getattr(value, "__module__", "") == module.__name__)


def _parameters(make: Callable[..., Any]) -> list[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        return [p.name for p in inspect.signature(make).parameters.values() if p.kind in by_name]
    except (TypeError, ValueError):  # written in another language
        return []


def _called(make: Callable[..., Any], about: dict[str, Any], path: str) -> nn.Module:
    """Return the network that `make` returns, with how it was made; `path` is where its lines are told from."""
    arguments, file, name = about["arguments"], about["file"], about["make"]
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        known = ", ".join(_parameters(make)) or "none"
        raise StfsebError(f"{name} of {file} cannot be called as {name}({given}): {error}; it takes {known}") from None
    except ValueError:  # no signature: the call itself tells
        pass
    try:
        net = make(**arguments)
    except (Exception, SystemExit) as error:
        raise StfsebError(f"{name}({given}) of {file} fails: {_in_words(error, path)}") from error
    if not isinstance(net, nn.Module):
        what = "None" if net is None else f"a {type(net).__name__}"
        raise StfsebError(f"{name} of {file} returns {what}, not a torch.nn.Module: let it return the network")
    if OWN in vars(net):
        raise StfsebError(f"{name} of {file} returns the same network again: let it make a fresh one at each call")
    setattr(net, OWN, {"class": type(net).__qualname__, **about})
    return net


def _in_words(error: BaseException, file: str) -> str:
    """Return an error in one line: its kind, the last line of the user's file on its way, and what it says."""
    if isinstance(error, SyntaxError):
        line = error.lineno
    else:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = lines[-1] if lines else None
    said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:200]
    return f"{type(error).__name__}{f' in line {line}' if line else ''}{f': {said}' if said else ''}"
