"""What the methods with a function term share: how often it counts, around which mean, and why it failed."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stfseb.errors import StfsebError
from stfseb.function_prior import FunctionPrior
from stfseb.methods.settings import is_weight
from stfseb.networks.constant import detached, moved, owner, quietly, reachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.methods.base import Method


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

    It is a constant of the prior: a module (or a method of one) is copied as it is now, kept out of the method's
    parameters, and run in evaluation mode in the images' precision; no mean draws dropout.
    """

    def __init__(self, mean: float | Callable[[Tensor], Tensor] | None) -> None:
        if not (mean is None or callable(mean) or math.isfinite(mean)):
            raise StfsebError(f"prior_mean={mean}: give a finite number, or a callable from images to values")
        self.mean = mean
        if callable(mean):
            with suppress(StfsebError):  # one that cannot be copied is used where it is
                self.mean = detached(mean)
        own = owner(self.mean)
        copied = own is not None and own is not owner(mean)
        if own is not None and copied:
            own.eval()
        # Modules that are not ours, which a function calls, get their modes back after each call.
        self.modules = reachable(self.mean) if callable(mean) and not copied else []

    def __call__(self, values: Tensor, images: Tensor) -> Tensor:
        """Return the values relative to the mean."""
        if self.mean is None:
            return values
        if not callable(self.mean):
            return values - self.mean
        with quietly(self.modules):
            expected = self._expected(images)
        if expected.shape not in (values.shape[-2:], values.shape[-1:]):
            raise StfsebError(
                f"prior_mean gave values of shape {tuple(expected.shape)} for {len(images)} context points: "
                f"return {tuple(values.shape[-2:])} or {tuple(values.shape[-1:])}"
            )
        return values - expected.to(values)

    def _expected(self, images: Tensor) -> Tensor:
        assert callable(self.mean)
        own = owner(self.mean)
        if own is not None and any(p.is_floating_point() and p.dtype != images.dtype for p in own.parameters()):
            own.to(images.device)
            with suppress(RuntimeError):  # unless it sees to its inputs' precision itself
                return self.mean(images)
        moved(self.mean, images)
        return self.mean(images)


@torch.no_grad()
def prior_failure(method: Method) -> str:
    """Return why the function prior of a method whose terms are not finite cannot be, or nothing.

    Tried at the context points with the largest features, where K's condition number is the largest. It waits for the
    device: only for a method that has failed already.
    """
    context, ratio = method.context, method.prior_ratio()
    if context is None or context.images is None or context.images_only or ratio is None or not method.uses_context:
        return ""
    taus = float(method.hyper("tau1")), float(method.hyper("tau2"))
    features = context.features(method.like)
    if not (all(map(math.isfinite, taus)) and torch.isfinite(features).all()):
        return ""
    largest = features[features.square().sum(1).topk(context.num_context).indices]
    return FunctionPrior(largest, *taus, math.inf, bias_variance=float(ratio[1])).failure()
