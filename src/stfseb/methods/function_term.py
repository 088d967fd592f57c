"""What the methods with a function term share: how often it counts, and around which mean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stfseb.errors import StfsebError
from stfseb.methods.settings import is_weight

if TYPE_CHECKING:
    from collections.abc import Callable


def check_functional_scale(scale: float | str) -> None:
    """Raise unless `scale` is "batch", "epoch" or a number of at least zero."""
    valid = scale in ("batch", "epoch") or is_weight(scale)
    if not valid:
        raise StfsebError(f"functional_scale={scale!r}: give 'batch', 'epoch' or a number of at least 0")


def function_weight(scale: float | str, share: float, part: float) -> float:
    """Return kappa, the factor of the function term; see `Method.terms` for `share` and `part`.

    "batch" counts the term once per minibatch, "epoch" once per epoch (1/M), a number that many times per
    minibatch. The parts of one step add up to the whole.
    """
    if scale == "epoch":
        return share
    return part if scale == "batch" else part * float(scale)


def name_of(function: Any) -> str:
    """Return the name under which a callable is shown in settings."""
    return str(getattr(function, "__name__", type(function).__name__))


class PriorMean:
    """m, the mean of the function prior: called with values (..., N_c, L) and images, gives values - m(images).

    A module as mean function is kept out of the method's parameters: it is a constant of the prior.
    """

    def __init__(self, mean: float | Callable[[Tensor], Tensor] | None) -> None:
        if not (mean is None or callable(mean) or math.isfinite(mean)):
            raise StfsebError(f"prior_mean={mean}: give a finite number, or a callable from images to values")
        self.mean = mean

    def __call__(self, values: Tensor, images: Tensor) -> Tensor:
        """Return the values relative to the mean."""
        if self.mean is None:
            return values
        if not callable(self.mean):
            return values - self.mean
        with torch.no_grad():
            expected = self.mean(images)
        if expected.shape not in (values.shape[-2:], values.shape[-1:]):
            raise StfsebError(
                f"prior_mean gave values of shape {tuple(expected.shape)} for {len(images)} context points: "
                f"return {tuple(values.shape[-2:])} or {tuple(values.shape[-1:])}"
            )
        return values - expected.to(values)
