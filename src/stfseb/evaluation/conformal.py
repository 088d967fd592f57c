"""Prediction sets that hold the true class with a promised probability, whatever the network (split conformal).

For n calibration rows with scores s_i = s(x_i, y_i) the set of a new x is {k : s(x, k) <= q}, q the
ceil((n + 1) coverage)-th smallest score: it holds y with probability of at least `coverage`, and less than
1/(n + 1) more where scores do not tie, if the rows are exchangeable with the new one. Rows that training, early
stopping or `calibrate` have seen are not.

"lac": s = -log p(y|x), the smallest sets on average; on hard images they may be empty.
"aps": s = total probability of the classes at least as probable as y; larger sets on hard images, while those of
very certain ones may be empty. (To add the most probable class to every set keeps the promise, but exceeds it by far.)

Own code, because a saved model must carry the rule as two numbers in JSON: the libraries (MAPIE, crepes) wrap and
pickle scikit-learn estimators, and predicting would then need them.

Sadinle, Lei and Wasserman, JASA 2019 (LAC), https://arxiv.org/abs/1609.00451; Romano, Sesia and Candès, NeurIPS
2020 (APS), https://arxiv.org/abs/2006.02544.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.errors import StfsebError, unknown
from stfseb.evaluation.calibration import sampled_outputs
from stfseb.inputs import as_tensor
from stfseb.likelihoods import Classification
from stfseb.methods.calibrated import tempered
from stfseb.methods.decisions import CONFORMAL

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

    from stfseb.evaluation.inputs import Split
    from stfseb.evaluation.metrics import Array
    from stfseb.methods.base import Method

KINDS = ("lac", "aps")


def conformal_scores(log_probs: ArrayLike, kind: str = "lac") -> Array:
    """Return s(x, k) for every class, (N, L), from log-probabilities (N, L)."""
    if kind not in KINDS:
        raise unknown("conformal score", kind, KINDS)
    values = np.asarray(log_probs, dtype=np.float64)
    if kind == "lac":
        return -values
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(values, order, axis=1)
    # A class shares the total of the last class that ties with it, so that order among ties does not matter.
    total = np.cumsum(np.exp(ranked), axis=1)
    for k in range(values.shape[1] - 2, -1, -1):
        total[:, k] = np.where(ranked[:, k] == ranked[:, k + 1], total[:, k + 1], total[:, k])
    scores = np.empty_like(values)
    np.put_along_axis(scores, order, total, axis=1)
    return scores


def conformal_threshold(scores: ArrayLike, coverage: float) -> float:
    """Return q, the ceil((n + 1) coverage)-th smallest of n scores (infinite where n is too small for it)."""
    if not 0.0 < coverage < 1.0:
        raise StfsebError(f"coverage={coverage}: give a fraction between 0 and 1")
    values = np.sort(np.asarray(scores, dtype=np.float64))
    rank = math.ceil(round((len(values) + 1) * coverage, 9))
    return math.inf if rank > len(values) else float(values[rank - 1])


def fit_sets(
    method: Method,
    calibration: Split,
    coverage: float = 0.95,
    kind: str = "lac",
    *,
    samples: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Set up prediction sets of a classifier on (x, y) that nothing else has seen; the rule is saved with it."""
    if not isinstance(method.likelihood, Classification):
        raise StfsebError(f"prediction sets are of classes, but the likelihood is {method.likelihood.name}")
    samples = method.samples if samples is None else samples
    outputs, y = sampled_outputs(method, calibration, samples, seed)
    scores = conformal_scores(_log_probs(method, outputs), kind)[np.arange(len(y)), y.numpy()]
    threshold = conformal_threshold(scores, coverage)
    if math.isinf(threshold):
        needed = math.ceil(round(coverage / (1 - coverage), 9))
        raise StfsebError(f"coverage={coverage} needs at least {needed} calibration rows, not {len(y)}")
    method.calibration[CONFORMAL] = {
        "kind": kind,
        "coverage": coverage,
        "threshold": threshold,
        "rows": len(y),
        "samples": samples,
        "seed": seed,
    }
    return dict(method.calibration[CONFORMAL])


def prediction_sets(method: Method, x: Any) -> NDArray[np.bool_]:
    """Return which classes are in the set of each row, (N, L), by the rule of `fit_sets`."""
    rule = method.calibration.get(CONFORMAL)
    if rule is None:
        raise StfsebError("the method has no prediction sets: call fit_sets with rows that training has not seen")
    parts = []
    for part in as_tensor(x, "x").split(256):
        outputs = method.sample_logits(part, rule["samples"], seed=rule["seed"]).cpu().double()
        log_probs = _log_probs(method, outputs)
        parts.append(conformal_scores(log_probs, rule["kind"]) <= rule["threshold"])
    return np.concatenate(parts)


def _log_probs(method: Method, outputs: Tensor) -> Array:
    """Return the logarithm of the averaged, calibrated probabilities, (N, L)."""
    assert isinstance(method.likelihood, Classification)
    if "maps" in method.calibration.get("probabilities", {}):
        return method._prediction(outputs).log().numpy()
    values = method.likelihood.class_log_probs(tempered(method.calibration, method.likelihood, outputs))
    return (torch.logsumexp(values, 0) - math.log(len(values))).detach().numpy()
