"""A method's settings, and the checks that they share."""

from __future__ import annotations

import math
from dataclasses import asdict, field, fields
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from stfseb.errors import StfsebError, unknown


class Settings:
    """Base of the frozen dataclasses that hold a method's settings."""

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON knows them (infinity as a string)."""
        values = {k: v.item() if hasattr(v, "item") else v for k, v in asdict(self).items()}  # type: ignore[call-overload]
        return {k: "inf" if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the settings."""
        return tuple(one.name for one in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def later(cls) -> dict[str, Any]:
        """Return the `newer` settings with their defaults."""
        return {one.name: one.default for one in fields(cls) if one.metadata.get("newer")}  # type: ignore[arg-type]

    @classmethod
    def plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return some of the settings as JSON knows them, equal ones written alike; an unknown name is refused.

        Their values are not judged: that is done where they are used. A `newer` one at its default is left out.
        """
        kinds = {one.name: str(one.type) for one in fields(cls)}  # type: ignore[arg-type]
        for name in given:
            if name not in kinds:
                raise unknown("setting", name, kinds)
        found = {name: _plain(value, kinds[name]) for name, value in given.items()}
        later = cls.later()
        return {name: value for name, value in found.items() if name not in later or value != later[name]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        """Undo `as_dict`."""
        return cls(**{k: math.inf if v == "inf" else v for k, v in values.items()})


def newer(default: Any) -> Any:
    """Return the field of a setting that methods once did not have: at its default, runs are those of before."""
    return field(default=default, metadata={"newer": True})


def _plain(value: Any, kind: str) -> Any:
    """Return a number as its field's type has it: 3.0 where it is a float, 3 where it may also be a count or a word."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    number = float(value)
    if number == math.inf:
        return "inf"
    return int(number) if number.is_integer() and kind not in ("float", "float | None") else number


def is_weight(value: Any) -> bool:
    """Tell whether `value` is a finite number of at least zero."""
    return isinstance(value, Real) and math.isfinite(value) and float(value) >= 0


def check_positive(**values: Any) -> None:
    """Raise for the first value that is not a positive, finite number."""
    for name, value in values.items():
        if not isinstance(value, Real) or not (math.isfinite(value) and float(value) > 0):
            raise StfsebError(f"{name}={value}: must be a positive number")


def check_dof(**values: Any) -> None:
    """Raise for the first value that is neither None nor degrees of freedom, a number or a tensor of one."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, Real | Tensor) and float(value) > 0):
            raise StfsebError(f"{name}={value!r}: degrees of freedom must be a positive number (math.inf for Gaussian)")


def check_layer(features: Any) -> None:
    """Raise unless `features` names a layer, or is None."""
    if not isinstance(features, str | None):
        raise StfsebError(f"features={features!r}: give the name of a layer, as net.named_modules() has it")


def check_count(least: int = 1, /, **values: Any) -> None:
    """Raise for the first value that is not a whole number of at least `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise StfsebError(f"{name}={value}: must be a whole number of at least {least}")
