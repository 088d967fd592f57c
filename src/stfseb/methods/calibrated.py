"""Applying what was fitted on held-out data to a method's predictions (fitting it is evaluation's work).

`method.calibration["probabilities"]` holds, as JSON, either a temperature T, by which averaged probabilities p become
p^(1/T), normalised, or one non-decreasing map a class for them (isotonic regression). Both act on the average:
of samples that disagree it stays unsure, however sharp each of them is made.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from stfseb.likelihoods import Likelihood

PROBABILITIES = "probabilities"
AVERAGE = "average"  # what a temperature is `of`; one that says nothing is older, and of each sample's outputs


def tempered(calibration: dict[str, Any], likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return outputs (1, N, L) that predict p^(1/T) where a temperature was fitted, else `outputs` (S, N, L)."""
    temperature = calibration.get(PROBABILITIES, {}).get("temperature", 1.0)
    return outputs if temperature == 1.0 else likelihood.pooled(outputs) / temperature


def still_valid(calibration: dict[str, Any]) -> dict[str, Any]:
    """Return what a saved model was calibrated with, less what does not mean the same any more, with a warning."""
    fitted = calibration.get(PROBABILITIES, {})
    if "temperature" not in fitted or fitted.get("of") == AVERAGE:
        return dict(calibration)
    warnings.warn(
        "the model's temperature was fitted to single samples, by an earlier version: it and the rules set with it are "
        "dropped; calibrate the model again",
        stacklevel=2,
    )
    return {}


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
