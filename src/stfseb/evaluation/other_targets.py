"""Evaluation where a row's target is not one class: real numbers, and any number of yes-or-no labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stfseb.evaluation import ood as unfamiliarity
from stfseb.evaluation.inputs import Split, chunks
from stfseb.likelihoods import MultiLabel, Regression
from stfseb.methods.calibrated import tempered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stfseb.evaluation.metrics import Array
    from stfseb.methods.base import Method

LEVEL = 0.95


@torch.no_grad()
def evaluate_targets(
    method: Method,
    test: Split,
    ood: Mapping[str, Split],
    *,
    samples: int | None,
    seed: int | None,
    batch_size: int,
) -> dict[str, float]:
    """Return the metrics of a regression or multi-label method, and how well it sets the sets of `ood` apart.

    Regression: `rmse`, `nll` (nats, of the Monte Carlo mixture), `coverage95` and `width95` (of the central
    95 % intervals), averaged over targets. Labels: `acc` and `brier` (mean over known labels) and `nll` (summed
    over them). For every set of `ood`, `auroc/NAME`, `aupr/NAME` and `fpr95/NAME` of the uncertainty.
    """
    likelihood = method.likelihood
    rows: dict[str, list[Tensor]] = {}
    familiar = []
    for x, y in chunks(test, "test", batch_size, labels=True, classes=None, real=True):
        assert y is not None
        outputs = tempered(method.calibration, likelihood, method.sample_logits(x, samples, seed=seed))
        likelihood.check_targets(y, outputs.shape[2])
        y = y.to(outputs.device)
        found = {"nll": -likelihood.log_predictive(outputs, y)}
        if isinstance(likelihood, Regression):
            found |= _regression(likelihood, outputs, y)
        elif isinstance(likelihood, MultiLabel):
            found |= _labels(likelihood, outputs, y)
        for name, values in found.items():
            rows.setdefault(name, []).append(values.double().cpu().flatten())
        familiar.append(likelihood.uncertainty(outputs).cpu().numpy())
    result = {name: float(torch.cat(parts).nanmean()) for name, parts in rows.items()}
    if "squared_error" in result:
        result = {"rmse": result.pop("squared_error") ** 0.5, **result}
    for name, split in ood.items():
        other = _uncertainties(method, split, f"ood '{name}'", samples, seed, batch_size)
        pair = np.concatenate(familiar), other
        result |= {
            f"auroc/{name}": unfamiliarity.auroc(*pair),
            f"aupr/{name}": unfamiliarity.aupr(*pair),
            f"fpr95/{name}": unfamiliarity.fpr95(*pair),
        }
    return result


def _regression(likelihood: Regression, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    y = y.reshape(outputs.shape[1:])
    low, high = likelihood.interval(outputs, LEVEL)
    return {
        "squared_error": (likelihood.predict(outputs) - y).square(),
        "coverage95": (low <= y) & (y <= high),
        "width95": high - low,
    }


def _labels(likelihood: MultiLabel, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    probs = likelihood.predict(outputs).double()
    unknown = torch.where(y < 0, torch.nan, 0.0)
    return {"acc": ((probs > 0.5) == (y > 0.5)) + unknown, "brier": (probs - y).square() + unknown}


def _uncertainties(
    method: Method, split: Any, name: str, samples: int | None, seed: int | None, batch_size: int
) -> Array:
    parts = []
    for x, _ in chunks(split, name, batch_size, labels=False, classes=None):
        outputs = tempered(method.calibration, method.likelihood, method.sample_logits(x, samples, seed=seed))
        parts.append(method.likelihood.uncertainty(outputs).cpu().numpy())
    return np.concatenate(parts)
