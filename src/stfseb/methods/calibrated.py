"""Applying what was fitted on held-out data to a method's predictions (fitting it is evaluation's work).

`method.calibration["probabilities"]` holds either a temperature, which divides the outputs of every sample, or
one non-decreasing map a class for the averaged probabilities (isotonic regression), as JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

PROBABILITIES = "probabilities"


def tempered(calibration: dict[str, Any], outputs: Tensor) -> Tensor:
    """Return outputs / T, where a temperature was fitted."""
    temperature = calibration.get(PROBABILITIES, {}).get("temperature", 1.0)
    return outputs if temperature == 1.0 else outputs / temperature


def mapped(calibration: dict[str, Any], probs: Tensor) -> Tensor:
    """Return the probabilities (N, L) through the isotonic maps, where they were fitted, normalised anew."""
    maps = calibration.get(PROBABILITIES, {}).get("maps")
    if maps is None:
        return probs
    columns = [_interpolate(probs[:, k].double(), m["from"], m["to"]) for k, m in enumerate(maps)]
    values = torch.stack(columns, dim=1)
    return (values / values.sum(1, keepdim=True)).to(probs.dtype)


def _interpolate(values: Tensor, knots: list[float], heights: list[float]) -> Tensor:
    """Interpolate linearly between knots, constant beyond them."""
    x = torch.tensor(knots, dtype=values.dtype, device=values.device)
    y = torch.tensor(heights, dtype=values.dtype, device=values.device)
    if len(x) == 1:
        return y.expand_as(values)
    right = torch.searchsorted(x, values.contiguous()).clamp(1, len(x) - 1)
    width = (x[right] - x[right - 1]).clamp_min(torch.finfo(values.dtype).tiny)
    along = ((values - x[right - 1]) / width).clamp(0.0, 1.0)
    return y[right - 1] + along * (y[right] - y[right - 1])
