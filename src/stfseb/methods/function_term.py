"""What the methods with a function term share: how often it counts, and the next context points."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from stfseb.methods.context import Context, Draw


def check_functional_scale(scale: float | str) -> None:
    """Raise unless `scale` is "batch", "epoch" or a number of at least zero."""
    valid = scale in ("batch", "epoch") if isinstance(scale, str) else math.isfinite(scale) and scale >= 0
    if not valid:
        raise StfsebError(f"functional_scale={scale!r}: give 'batch', 'epoch' or a number of at least 0")


def function_weight(scale: float | str, rows: int, num_data: int, batch_size: int | None) -> float:
    """Return kappa, the factor of the function term for `rows` rows of a step of `batch_size` rows.

    "batch" counts the term once per minibatch, "epoch" once per epoch (1/M), a number that many times per
    minibatch. The parts of one step add up to the whole.
    """
    if scale == "epoch":
        return rows / num_data
    kappa = 1.0 if scale == "batch" else float(scale)
    return kappa if batch_size is None else kappa * rows / batch_size


def next_draw(context: Context | None, x: Tensor, parameters: Iterable[Tensor], batch_size: int | None) -> Draw:
    """Return the context of this step; parts of one step, between two updates of `parameters`, share it."""
    if context is None:
        raise StfsebError(
            "this method has no context images (a loaded model keeps only their fingerprint): "
            "construct it anew with context=... to train it"
        )
    return context.next(x, None if batch_size is None else sum(p._version for p in parameters))
