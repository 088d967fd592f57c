"""What the methods with a function term share: how often it counts."""

from __future__ import annotations

import math

from stfseb.errors import StfsebError


def check_functional_scale(scale: float | str) -> None:
    """Raise unless `scale` is "batch", "epoch" or a number of at least zero."""
    valid = scale in ("batch", "epoch") if isinstance(scale, str) else math.isfinite(scale) and scale >= 0
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
