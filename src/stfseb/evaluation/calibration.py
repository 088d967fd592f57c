"""Calibration on held-out data: a temperature, or an isotonic map for each class.

Temperature: T > 0 minimises the NLL of p^(1/T), normalised, with p the Monte Carlo average of softmax(f_s); for one
sample that is softmax(f / T) (Guo et al., On calibration of modern neural networks, ICML 2017,
https://arxiv.org/abs/1706.04599). It comes after averaging: samples that disagree leave their average unsure, which
no temperature of the single samples mends (Rahaman and Thiery, Uncertainty quantification and deep ensembles,
NeurIPS 2021, https://arxiv.org/abs/2007.08792). One number: it needs few rows and never changes the most probable
class. Isotonic: for each class, a non-decreasing map from its averaged
probability to how often it was right, then normalised (Zadrozny and Elkan, KDD 2002). It needs thousands of rows.
The maps stay within [1/(n + 2), 1 - 1/(n + 2)]: n rows cannot show that something never happens.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stfseb.errors import StfsebError, unknown
from stfseb.evaluation.evaluate import batch_size_of
from stfseb.evaluation.inputs import Split, chunks
from stfseb.inputs import as_tensor
from stfseb.likelihoods import Classification, Regression
from stfseb.methods.calibrated import AVERAGE, PROBABILITIES
from stfseb.methods.decisions import ABSTAIN, CONFORMAL, HELD_OUT, NLL, UNFAMILIAR, held_out_scores
from stfseb.methods.memory import sized
from stfseb.networks.memory import memory_kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stfseb.evaluation.metrics import Array
    from stfseb.methods.base import Method

KINDS = ("temperature", "isotonic")
_LOG_RANGE = 5.0  # temperatures between exp(-5) and exp(5)


def calibrate(
    method: Method,
    held_out: Split,
    kind: str = "temperature",
    *,
    samples: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Fit a calibration of `method`'s probabilities on `held_out` and keep it in the method.

    From then on `predict_proba`, `decide`, `evaluate` and saved models use it; `sample_logits` stays raw. Rules
    that were set on the probabilities as they were before (`abstain`, `ood_threshold`, prediction sets) are
    dropped: set them again, prediction sets on rows that were not used here. The rows given here take the place
    of the validation rows for `abstain()` and `ood_threshold()`.

    Args:
        method: a trained classifier (one class, two classes or labels; not regression).
        held_out: (x, y) that training has not seen, or an image set, Dataset or DataLoader.
        kind: "temperature" or "isotonic".
        samples: Monte Carlo samples (by default the method's own).
        seed: of the masks.

    Returns:
        What was fitted and the NLL before and after, on the held-out rows themselves.
    """
    if kind not in KINDS:
        raise unknown("calibration", kind, KINDS)
    if isinstance(method.likelihood, Regression):
        raise StfsebError(
            f"the {method.likelihood.name} likelihood has no probabilities to calibrate: learn its noise, learn=True"
        )
    samples = method.samples if samples is None else samples
    outputs, y = sampled_outputs(method, held_out, samples, seed)
    fitted: dict[str, Any] = {"kind": kind, "rows": len(y), "samples": samples, "seed": seed}
    if kind == "temperature":
        fitted |= _fitted_temperature(method, outputs, y)
    else:
        fitted |= {"nll_before": _nll(method, outputs, y), "maps": _isotonic_maps(method, outputs, y)}
    for stale in (UNFAMILIAR, ABSTAIN, CONFORMAL):
        method.calibration.pop(stale, None)
    method.calibration[PROBABILITIES] = fitted
    single = isinstance(method.likelihood, Classification)
    rows = chunks(held_out, "held_out", 256, labels=True, classes=None, real=not single)
    of_training = {k: v for k, v in method.calibration.get(HELD_OUT, {}).items() if k == NLL}
    method.calibration[HELD_OUT] = held_out_scores(method, rows, samples, seed) | of_training
    return dict(fitted)


@torch.no_grad()
@memory_kept()
def sampled_outputs(method: Method, split: Split, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return raw outputs (S, N, L), float64 on the CPU, and targets."""
    outputs, targets = [], []
    single = isinstance(method.likelihood, Classification)
    for x, y in chunks(split, "held_out", 256, labels=True, classes=None, real=not single):
        assert y is not None
        found = method.sample_logits(x, samples, seed=seed).cpu().double()
        method.likelihood.check_targets(y, found.shape[2])
        outputs.append(found)
        targets.append(y.cpu())
    return torch.cat(outputs, 1), torch.cat(targets)


@torch.no_grad()
def raw_outputs(method: Method, images: Any, samples: int, seed: int = 0) -> Tensor:
    """Return raw outputs (S, N, L) of all images, in float64, on the device where it has that."""
    x = as_tensor(images, "images")
    outputs = method.sample_logits(x, samples, seed=seed, batch_size=sized(batch_size_of(method), x))
    return (outputs.cpu() if outputs.device.type == "mps" else outputs).double()


@torch.no_grad()
def fit_temperature(method: Method, images: Any, labels: Tensor, samples: int, seed: int = 0) -> dict[str, Any]:
    """Return the temperature of the lowest NLL on labelled images, whose outputs fit the device at once.

    It is that of the network's own outputs, whatever was fitted before; the method is left as it is. The result is
    what `calibrate` keeps as the calibration of probabilities, and what `probabilities_of` takes.
    """
    outputs = raw_outputs(method, images, samples, seed)
    found = _fitted_temperature(method, outputs, labels.to(outputs.device))
    return {"kind": "temperature", "rows": len(labels), "samples": samples, "seed": seed, **found}


def _fitted_temperature(method: Method, outputs: Tensor, y: Tensor) -> dict[str, Any]:
    temperature = best_temperature(method, outputs, y)
    before = _nll(method, outputs, y)
    after = before if temperature == 1.0 else _nll(method, method.likelihood.pooled(outputs) / temperature, y)
    return {"nll_before": before, "temperature": temperature, "of": AVERAGE, "nll_after": after}


@contextmanager
def probabilities_of(method: Method, fitted: dict[str, Any]) -> Iterator[None]:
    """Let a method predict with this calibration of its probabilities, alone, until the block ends."""
    own = method.calibration
    method.calibration = {PROBABILITIES: fitted}
    try:
        yield
    finally:
        method.calibration = own


def _nll(method: Method, outputs: Tensor, y: Tensor) -> float:
    return -float(method.likelihood.log_predictive(outputs, y).mean())


def best_temperature(method: Method, outputs: Tensor, y: Tensor) -> float:
    """Return the temperature of the lowest NLL for raw outputs (S, N, L), on whichever device they are.

    It is 1 where no other is better: outputs that are all equal have the same NLL at every temperature.
    """
    from scipy.optimize import minimize_scalar

    pooled = method.likelihood.pooled(outputs)
    found = minimize_scalar(
        lambda log: _nll(method, pooled / math.exp(log), y), bounds=(-_LOG_RANGE, _LOG_RANGE), method="bounded"
    )
    return float(math.exp(found.x)) if found.fun < _nll(method, outputs, y) else 1.0


def _isotonic_maps(method: Method, outputs: Tensor, y: Tensor) -> list[dict[str, list[float]]]:
    if not isinstance(method.likelihood, Classification):
        raise StfsebError(f"isotonic calibration needs one class a row, not {method.likelihood.name}: use temperature")
    probs = method.likelihood.predict(outputs).numpy()
    return [isotonic_map(probs[:, k], (y == k).double().numpy()) for k in range(probs.shape[1])]


def isotonic_map(scores: Array, hits: Array) -> dict[str, list[float]]:
    """Return the knots of the least-squares non-decreasing map from scores to hits, held off 0 and 1."""
    from scipy.optimize import isotonic_regression

    x, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, weights=hits) / counts
    heights = np.asarray(isotonic_regression(means, weights=counts.astype(np.float64)).x)
    edge = 1.0 / (len(scores) + 2)
    heights = np.clip(heights, edge, 1.0 - edge)
    # Only the ends of each flat step are needed.
    flat = heights[1:] == heights[:-1]
    keep = ~(np.append(False, flat) & np.append(flat, False))
    return {"from": x[keep].tolist(), "to": heights[keep].tolist()}
