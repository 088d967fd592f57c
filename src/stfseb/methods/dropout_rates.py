"""The dropout rates of a model, which are no weights but decide what it predicts: kept, and compared on loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.methods.ensemble import Ensemble
from stfseb.methods.mc_dropout import DropoutMethod
from stfseb.networks.dropout import DROPOUT_MODULES, named_rates
from stfseb.networks.registry import own_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stfseb.methods.base import Method


def dropout_rates(method: Method) -> dict[str, float]:
    """Return the rates by layer that predictions depend on: of the members of an ensemble, and none of MAP, say."""
    if isinstance(method, Ensemble):
        members = enumerate(method.members)
        return {f"{i}.{name}": rate for i, member in members for name, rate in dropout_rates(member).items()}
    return named_rates(method.net) if isinstance(method, DropoutMethod) else {}


def restore_rates(method: Method, meta: dict[str, Any]) -> None:
    """Give the dropout modules of a network that was rebuilt here the rates that it was saved with."""
    saved = meta.get("dropout") or {}
    for prefix, one in _around(method):
        for name, module in one.net.named_modules():
            if isinstance(module, DROPOUT_MODULES) and (name := f"{prefix}{name}") in saved:
                module.p = float(saved[name])


def _around(method: Method, prefix: str = "") -> Iterator[tuple[str, Method]]:
    """Yield the methods around networks, members of ensembles too, with what their layers' names begin with."""
    if not isinstance(method, Ensemble):
        yield prefix, method
        return
    for i, member in enumerate(method.members):
        yield from _around(member, f"{prefix}{i}.")


def check_rates(method: Method, meta: dict[str, Any]) -> None:
    """Raise unless a loaded method has the dropout rates that its model was saved with."""
    saved = meta.get("dropout")
    if saved is None:  # models of before do not say
        return
    now = dropout_rates(method)
    if now.keys() != saved.keys() and _in_order(now) == _in_order(saved):
        return  # layers that were only renamed
    wrong = [name for name in {**saved, **now} if now.get(name, 0.0) != saved.get(name, 0.0)]
    if not wrong:
        return
    name, more = wrong[0], f" (and {len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
    call = _as_made(meta["network"])
    raise StfsebError(
        f"layer '{name}' has {_said(now, name)}, in the saved model {_said(saved, name)}{more}: make the network with "
        f"the rates it was trained with{call}, or predictions would be another model's"
    )


def _in_order(rates: dict[str, float]) -> list[float]:
    return [rate for rate in rates.values() if rate]


def _said(rates: dict[str, float], name: str) -> str:
    return f"dropout rate {rates[name]:g}" if name in rates else "no dropout"


def _as_made(spec: dict[str, Any]) -> str:
    """Return the call that made a network from a user's file."""
    made = own_file(spec) or {}
    given = made.get("arguments")
    if not isinstance(given, dict):
        return ""
    return f", {made['make']}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
