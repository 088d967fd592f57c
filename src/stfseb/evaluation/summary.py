"""What plots and pages need of one evaluation, small enough for a record on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stfseb.evaluation import metrics, ood

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stfseb.evaluation.metrics import Array

HISTOGRAM_BINS = 50
EXTREMES = 8


@dataclass(frozen=True)
class Predictions:
    """What is kept of the network's answers on one set of N images."""

    log_probs: Array
    """Logarithm of the averaged probabilities, (N, L)."""
    scores: dict[str, Array]
    """Unfamiliarity by score name (see `ood.SCORES`), (N,) each."""
    samples: int
    """Weight samples the averages are over."""
    image_shape: tuple[int, ...] = ()
    """Shape of one image, (C, H, W)."""

    @property
    def confidence(self) -> Array:
        """The highest averaged probability, (N,)."""
        confidence: Array = np.exp(self.log_probs.max(axis=1))
        return confidence

    @property
    def classes(self) -> NDArray[np.intp]:
        """The most probable class, (N,)."""
        classes: NDArray[np.intp] = self.log_probs.argmax(axis=1)
        return classes


def summarise(
    test: Predictions, labels: NDArray[np.int64], unfamiliar: Mapping[str, Predictions], *, bins: int = 15
) -> dict[str, Any]:
    """Return what the figures show, ready for JSON.

    `reliability` bins; `confidence`: counts in 50 equal bins of the highest probability; `roc` by OOD set
    (score MSP); `risk_coverage`: error among the most confident fraction of the test images; `extremes`: the
    8 most and least certain test images and the 8 most confident images of each OOD set, by row number.
    """
    return {
        "samples": test.samples,
        "bins": bins,
        "reliability": _rounded(metrics.reliability(np.exp(test.log_probs), labels, bins).as_dict()),
        "confidence": {
            "bins": HISTOGRAM_BINS,
            "test": _histogram(test),
            "ood": {name: _histogram(found) for name, found in unfamiliar.items()},
        },
        "roc": {name: _roc(test, found) for name, found in unfamiliar.items()},
        "risk_coverage": _risk_coverage(test, labels),
        "extremes": {
            "test": {
                "most": _extremes(test, labels),
                "least": _extremes(test, labels, least=True),
            },
            "ood": {name: {"most": _extremes(found)} for name, found in unfamiliar.items()},
        },
    }


def _histogram(found: Predictions) -> list[int]:
    counts, _ = np.histogram(np.minimum(found.confidence, 1.0), bins=HISTOGRAM_BINS, range=(0.0, 1.0))
    return [int(c) for c in counts]


def _roc(test: Predictions, found: Predictions) -> dict[str, list[float]]:
    fpr, tpr = ood.roc(test.scores["msp"], found.scores["msp"])
    return {"fpr": _round(fpr), "tpr": _round(tpr)}


def _risk_coverage(test: Predictions, labels: NDArray[np.int64]) -> dict[str, Any]:
    """Error rate among the images at or below each score; equal scores enter together."""
    order = np.argsort(test.scores["msp"], kind="stable")
    score = test.scores["msp"][order]
    errors = np.cumsum(test.classes[order] != labels[order])
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    covered = last + 1
    coverage, risk = covered / len(score), errors[last] / covered
    keep = ood.thin(coverage, 200)
    return {"coverage": _round(coverage[keep]), "risk": _round(risk[keep])}


def _extremes(
    found: Predictions, labels: NDArray[np.int64] | None = None, *, least: bool = False
) -> list[dict[str, Any]]:
    order = np.argsort(-found.scores["msp"] if least else found.scores["msp"], kind="stable")[:EXTREMES]
    confidence, classes = found.confidence, found.classes
    rows = []
    for i in order:
        row = {"index": int(i), "confidence": round(float(confidence[i]), 6), "prediction": int(classes[i])}
        if labels is not None:
            row["label"] = int(labels[i])
        rows.append(row)
    return rows


def _round(values: Array) -> list[float]:
    return [round(float(v), 6) for v in values]


def _rounded(bins: dict[str, Any]) -> dict[str, Any]:
    return {
        key: [v if v is None or isinstance(v, int) else round(v, 6) for v in values] for key, values in bins.items()
    }
