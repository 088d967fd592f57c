"""How good the probabilities are on familiar images: accuracy, NLL, ECE, Brier, reliability.

Own code beside torchmetrics, in float64, for two reasons: its binary AUROC passes scores outside [0, 1]
through a float32 sigmoid and so makes ties where there were none, and its calibration error puts a
confidence of exactly 1.0 into a bin of its own. torchmetrics and scikit-learn are the oracles of the tests.

Shapes: S samples of the weights, N images, L classes. `probs` are the averaged probabilities, (N, L), and
`labels` is (N,); the NLL takes their logarithm from `log_mean_probs`, which does not underflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Array = NDArray[np.float64]
LOWEST_LOG_PROB = math.log(1e-10)


def log_mean_probs(sample_log_probs: ArrayLike) -> Array:
    """Return log p(y|x) = logsumexp_s log p(y|x, theta_s) - log S, shape (N, L), from (S, N, L)."""
    values = np.asarray(sample_log_probs, dtype=np.float64)
    highest = values.max(axis=0)
    mean: Array = highest + np.log(np.exp(values - highest).mean(axis=0))
    return mean


def accuracy(probs: ArrayLike, labels: ArrayLike) -> float:
    """Return the fraction of images whose most probable class is the label."""
    return float((np.asarray(probs).argmax(axis=1) == np.asarray(labels)).mean())


def nll(log_probs: ArrayLike, labels: ArrayLike) -> float:
    """Return -mean log p(y_i|x_i) of the averaged probabilities, each p held above 1e-10."""
    values = np.asarray(log_probs, dtype=np.float64)
    chosen = values[np.arange(len(values)), np.asarray(labels)]
    return float(-np.maximum(chosen, LOWEST_LOG_PROB).mean())


def brier(probs: ArrayLike, labels: ArrayLike) -> float:
    """Return the multiclass Brier score, mean_i sum_l (p_il - [y_i = l])^2, in [0, 2].

    The sum over classes is Brier's original form; some libraries halve it or divide it by L.
    """
    errors = np.array(probs, dtype=np.float64)
    errors[np.arange(len(errors)), np.asarray(labels)] -= 1.0
    return float((errors**2).sum(axis=1).mean())


@dataclass(frozen=True)
class Reliability:
    """Confidence against accuracy in equal-width bins, right-closed, the last one including 1.0."""

    edges: Array
    """Bin edges, (bins + 1,)."""
    count: NDArray[np.int64]
    """Images in each bin."""
    confidence: Array
    """Mean confidence in each bin, NaN where it is empty."""
    accuracy: Array
    """Accuracy in each bin, NaN where it is empty."""

    @property
    def ece(self) -> float:
        """The expected calibration error, sum_b (n_b / N) |accuracy_b - confidence_b|."""
        full = self.count > 0
        gaps = np.abs(self.accuracy[full] - self.confidence[full])
        return float((self.count[full] * gaps).sum() / self.count.sum())

    def as_dict(self) -> dict[str, Any]:
        """Return lists that JSON can hold, None where a bin is empty."""
        return {
            "edges": self.edges.tolist(),
            "count": self.count.tolist(),
            "confidence": [None if math.isnan(v) else v for v in self.confidence.tolist()],
            "accuracy": [None if math.isnan(v) else v for v in self.accuracy.tolist()],
        }


def reliability(probs: ArrayLike, labels: ArrayLike, bins: int = 15) -> Reliability:
    """Sort the images into bins ((b-1)/bins, b/bins] of their highest averaged probability."""
    values = np.asarray(probs, dtype=np.float64)
    confidence = values.max(axis=1)
    correct = values.argmax(axis=1) == np.asarray(labels)
    edges = np.linspace(0.0, 1.0, bins + 1)
    # Only inner edges are searched, so that 0 falls into the first bin and 1 (or its rounding) into the last.
    index = np.searchsorted(edges[1:-1], confidence, side="left")
    count = np.bincount(index, minlength=bins)
    some = np.where(count > 0, count, np.nan)
    return Reliability(
        edges=edges,
        count=count.astype(np.int64),
        confidence=np.bincount(index, weights=confidence, minlength=bins) / some,
        accuracy=np.bincount(index, weights=correct.astype(np.float64), minlength=bins) / some,
    )


def ece(probs: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Return the expected calibration error over equal-width, right-closed bins, as a fraction."""
    return reliability(probs, labels, bins).ece
