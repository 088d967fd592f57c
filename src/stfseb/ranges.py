"""The range of the inputs that training saw, and a word where those of a prediction are on another scale.

Pixels from 0 to 255 given as floating point to a network that was trained on [0, 1] are predicted without an error,
and wrongly. Nothing but the range of the training inputs tells that from inputs that are standardised, or wide by
nature, so nothing else is compared; and only a difference of scale counts, not of a few standard deviations.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from stfseb.inputs import check_pixels

if TYPE_CHECKING:
    from torch import Tensor

    from stfseb.inputs import Span

FAR = 20.0  # times the width of the training range: 255 is that far from [0, 1] and from standardised pixels


class RangeWarning(UserWarning):
    """Inputs lie far outside the range that training saw."""


class SeenRange:
    """From where to where the training inputs went, as the network got them; unknown until `learn`."""

    def __init__(self, span: Span | None = None) -> None:
        self.span = span
        self._told: set[str] = set()
        self._judged: Span | None = None

    def learn(self, span: Span) -> None:
        """Keep the range of the training inputs; what was told of an earlier one is forgotten."""
        self.span, self._judged = span, None
        self._told.clear()

    def check(self, x: Tensor, what: str) -> None:
        """Raise unless `x` can be an input, and warn (once for each `what`) where its scale is not that of training.

        The range comes with the check for NaN, in one pass and, on a card, one wait for it; uint8 needs neither.
        """
        span = check_pixels(x, what)
        if self.span is None or span == self._judged:  # the same rows again, perhaps under another name
            return
        if words := _difference(x.dtype == torch.uint8, span, self.span):
            self._judged = span
            if what not in self._told:
                self._told.add(what)
                warnings.warn(f"{what} {words}", RangeWarning, stacklevel=3)


def _difference(pixels: bool, span: Span, seen: Span) -> str:
    """Say how the scale of inputs differs from that of training, and the remedy; nothing where it does not."""
    (low, high), (least, most) = span, seen
    width = most - least
    if pixels:
        if width <= FAR:
            return ""
        return (
            f"has uint8 pixels, which become 0 to 1, but training saw {least:g} to {most:g}: give floating point "
            "scaled as in training"
        )
    if width <= 0 or (low >= least - FAR * width and high <= most + FAR * width):
        return ""
    of_pixels = least >= 0 and most <= 1 and low >= 0 and high <= 255
    remedy = "divide by 255, or give uint8, which is scaled" if of_pixels else "scale it as in training"
    return f"has values from {low:g} to {high:g}, but training saw {least:g} to {most:g}: {remedy}"
