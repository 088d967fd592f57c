"""The validation score: the NLL of the Monte Carlo average, under masks that stay fixed for a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stfseb.likelihoods import Classification

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stfseb.methods.base import Method

_SEED = 20_231_117  # of the masks; fixed, so that their noise does not steer early stopping


class Score(NamedTuple):
    """Validation NLL (nats per example) and accuracy (NaN where the likelihood has none)."""

    nll: float
    accuracy: float


@torch.no_grad()
def validation_score(method: Method, batches: Iterable[tuple[Tensor, Tensor]], samples: int) -> Score:
    """Return the mean of -log( (1/S) sum_s p(y | f_s(x)) ) and the accuracy of the averaged probabilities."""
    total = torch.zeros((), dtype=torch.float64)
    right = torch.zeros((), dtype=torch.float64)
    rows = 0
    classifies = isinstance(method.likelihood, Classification)
    for x, y in batches:
        y = y.to(method.like.device)
        outputs = method.sample_logits(x, samples, seed=_SEED)
        total -= method.likelihood.log_predictive(outputs, y).sum().cpu()
        if classifies:
            right += (method.likelihood.predict(outputs).argmax(-1) == y).sum().cpu()
        rows += len(x)
    return Score(float(total) / rows, float(right) / rows if classifies else math.nan)
