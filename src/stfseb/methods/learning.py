"""Settings of the priors that are learnt with the weights, by type-II maximum likelihood.

A learnt value v starts at its setting v0 and moves in the logarithm of its distance to the floor b (2 for dofs in
the covariance form, where the variance ends, 0 elsewhere),

    v = b + (v0 - b) exp(10 a),     a = 0 at the start,

so that Adam, whose steps are about its learning rate whatever the gradient's size, changes v - b by about ten
times the learning rate, relatively, in each step. Values stay within bounds: there a gradient that points outwards
is dropped, one that points back is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stfseb.distributions import double
from stfseb.errors import StfsebError, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LEARNABLE = ("dof", "dof_weights", "dof_function", "tau", "sigma")
_SPEED = 10.0
_NEAR = 1.02  # a value within this factor of a bound counts as being there


@dataclass(frozen=True)
class Range:
    """Where a learnt value may go: low < value < high, moving in the logarithm of value - floor."""

    low: float
    high: float
    floor: float = 0.0


COVARIANCE_DOF = Range(2.01, 1000.0, floor=2.0)
DOF = Range(0.1, 1000.0)
VARIANCE = Range(1e-8, 1e8)
SCALE = Range(1e-7, 1e4)


class LearningWarning(UserWarning):
    """A learnt value has gone as far as it may."""


class _Bounded(torch.autograd.Function):
    """clamp(a, low, high), with a gradient except where a descent step would lead further outside."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(raw)
        ctx.low, ctx.high = low, high
        return raw.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (raw,) = ctx.saved_tensors
        (gradient,) = gradients
        outwards = ((raw <= ctx.low) & (gradient > 0)) | ((raw >= ctx.high) & (gradient < 0))
        return torch.where(outwards, 0.0, gradient), None, None


class Learnt(nn.Module):
    """Positive numbers that are trained: `value(name)` is a float64 tensor, `values()` plain numbers.

    Args:
        chosen: where each begins and where it may go, by name.
    """

    def __init__(self, chosen: Mapping[str, tuple[float, Range]]) -> None:
        super().__init__()
        self.starts = {name: start for name, (start, _) in chosen.items()}
        self.ranges = {name: span for name, (_, span) in chosen.items()}
        for name, start in self.starts.items():
            span = self.ranges[name]
            if not span.low < start < span.high:
                raise StfsebError(
                    f"{name}={start:g} cannot be learnt: start between {span.low:g} and {span.high:g}, "
                    f"or leave '{name}' out of learn"
                )
        # float32, whatever the network's precision: bf16 would round the small steps away.
        self.raw = nn.ParameterDict({name: nn.Parameter(torch.zeros((), dtype=torch.float32)) for name in self.starts})

    def __contains__(self, name: str) -> bool:
        return name in self.starts

    def value(self, name: str) -> Tensor:
        """Return the current value, differentiable."""
        start, span = self.starts[name], self.ranges[name]
        low, high = (math.log((end - span.floor) / (start - span.floor)) for end in (span.low, span.high))
        moved = _Bounded.apply(double(self.raw[name]) * _SPEED, low, high)  # type: ignore[no-untyped-call]
        return span.floor + (start - span.floor) * torch.exp(moved)

    def values(self) -> dict[str, float]:
        """Return the current values."""
        with torch.no_grad():
            return {name: float(self.value(name)) for name in self.starts}

    def at_bounds(self) -> dict[str, float]:
        """Return the values that have reached a bound, by name."""
        found = {}
        for name, value in self.values().items():
            span = self.ranges[name]
            above = (value - span.floor) / (span.low - span.floor)
            if above <= _NEAR or (span.high - span.floor) / (value - span.floor) <= _NEAR:
                found[name] = value
        return found

    def extra_repr(self) -> str:
        """Show the values in `print(method)`."""
        return ", ".join(f"{name}={value:.4g}" for name, value in self.values().items())


def checked_names(learn: str | Iterable[str]) -> tuple[str, ...]:
    """Return what is to be learnt as a tuple of known names; a string lists them with commas."""
    parts = [part.strip() for part in learn.split(",") if part.strip()] if isinstance(learn, str) else list(learn)
    for part in parts:
        if part not in LEARNABLE:
            raise unknown("learnable setting", str(part), LEARNABLE)
    if "dof" in parts and ("dof_weights" in parts or "dof_function" in parts):
        raise StfsebError(f"learn={tuple(parts)}: 'dof' is one value for both priors; learn it, or the two apart")
    return tuple(name for name in LEARNABLE if name in parts)
