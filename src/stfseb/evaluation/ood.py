"""How well a score tells unfamiliar (out-of-distribution) images from familiar ones.

Every score grows with unfamiliarity, and the unfamiliar images are the positives throughout: AUROC would be
the same the other way round, AUPR and FPR95 would not. Scores come from the sample log-probabilities,
(S, N, L), and give one number an image, (N,). Everything is float64, ties are handled exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from stfseb.evaluation.metrics import Array, log_mean_probs

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Score = Callable[[Array], Array]


def msp(sample_log_probs: ArrayLike) -> Array:
    """Return log(1 - max_l p(l|x)), which ranks images exactly as minus the maximum softmax probability.

    Summing the other classes in log space keeps confident images apart: as probabilities, logits more than
    37 apart all read 1.0 in float64 (17 apart in float32), and their ties would distort every rank statistic.
    """
    values = log_mean_probs(sample_log_probs)
    others = np.sort(values, axis=1)[:, :-1]
    highest = others[:, -1]
    complement: Array = highest + np.log(np.exp(others - highest[:, None]).sum(axis=1))
    return complement


def entropy(sample_log_probs: ArrayLike) -> Array:
    """Return the entropy of the averaged probabilities in nats, -sum_l p log p: all uncertainty."""
    values = log_mean_probs(sample_log_probs)
    total: Array = -(np.exp(values) * values).sum(axis=1)
    return total


def mutual_information(sample_log_probs: ArrayLike) -> Array:
    """Return the mutual information of prediction and weights, mean_s KL(p_s || mean p): model uncertainty.

    Written as a mean of divergences rather than as a difference of entropies, which cancels. It is zero for
    a single sample, so that a deterministic network has no such score (its AUROC is 0.5).
    """
    values = np.asarray(sample_log_probs, dtype=np.float64)
    gaps = values - log_mean_probs(values)
    information: Array = (np.exp(values) * gaps).sum(axis=2).mean(axis=0)
    return np.maximum(information, 0.0)


SCORES: dict[str, Score] = {"msp": msp, "entropy": entropy, "mutual_information": mutual_information}


def auroc(familiar: ArrayLike, unfamiliar: ArrayLike) -> float:
    """Return P(score of unfamiliar > score of familiar), ties counted half: the midrank AUROC."""
    below = np.sort(np.asarray(familiar, dtype=np.float64))
    scores = np.asarray(unfamiliar, dtype=np.float64)
    strictly = np.searchsorted(below, scores, side="left")
    or_equal = np.searchsorted(below, scores, side="right")
    return float((strictly + or_equal).mean() / (2 * len(below)))


def auroc_error(value: float, familiar: int, unfamiliar: int) -> float:
    """Return the standard error of an AUROC of so many images, by Hanley and McNeil (Radiology 143, 1982).

    With A the AUROC, n familiar and m unfamiliar images, and the probabilities that two unfamiliar images both look
    less familiar than a familiar one, Q1 = A / (2 - A), and that one does than two familiar ones, Q2 = 2 A^2 / (1 + A):
    ``sqrt((A (1 - A) + (m - 1) (Q1 - A^2) + (n - 1) (Q2 - A^2)) / (n m))``, exact for exponentially distributed
    scores. It asks for no scores, so it can be had of a recorded AUROC. At A = 1 it is 0.
    """
    both, one = value / (2 - value), 2 * value**2 / (1 + value)
    spread = (unfamiliar - 1) * (both - value**2) + (familiar - 1) * (one - value**2)
    return math.sqrt(max(0.0, value * (1 - value) + spread) / (familiar * unfamiliar))


def aupr(familiar: ArrayLike, unfamiliar: ArrayLike) -> float:
    """Return the average precision, sum_t (R_t - R_{t-1}) P_t over distinct thresholds, OOD positive."""
    thresholds, members = np.unique(np.asarray(unfamiliar, dtype=np.float64), return_counts=True)
    thresholds, members = thresholds[::-1], members[::-1]
    true = np.cumsum(members)
    below = np.sort(np.asarray(familiar, dtype=np.float64))
    false = len(below) - np.searchsorted(below, thresholds, side="left")
    return float((members * true / (true + false)).sum() / true[-1])


def fpr95(familiar: ArrayLike, unfamiliar: ArrayLike) -> float:
    """Return the fraction of familiar images flagged at the highest threshold that flags 95 % of unfamiliar.

    An image is flagged when its score is at or above the threshold (OOD positive; FPR at TPR >= 0.95).
    """
    scores = np.sort(np.asarray(unfamiliar, dtype=np.float64))[::-1]
    needed = -(-95 * len(scores) // 100)  # integers: 0.95 n can round past a whole number
    return float((np.asarray(familiar, dtype=np.float64) >= scores[needed - 1]).mean())


def roc(familiar: ArrayLike, unfamiliar: ArrayLike, points: int = 200) -> tuple[Array, Array]:
    """Return false and true positive rates at no more than `points` vertices of the exact ROC curve.

    The vertices kept are about equally spaced along the curve, both ends included.
    """
    low, high = (np.sort(np.asarray(v, dtype=np.float64)) for v in (familiar, unfamiliar))
    thresholds = np.unique(np.concatenate([low, high]))[::-1]
    fpr = np.append(0.0, 1.0 - np.searchsorted(low, thresholds, side="left") / len(low))
    tpr = np.append(0.0, 1.0 - np.searchsorted(high, thresholds, side="left") / len(high))
    keep = thin(fpr + tpr, points)
    return fpr[keep], tpr[keep]


def thin(position: Array, points: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return at most `points` indices about equally spaced in the increasing `position`, both ends kept."""
    if len(position) <= points:
        return np.arange(len(position))
    wanted = np.linspace(position[0], position[-1], points)
    keep = np.unique(np.searchsorted(position, wanted, side="left"))
    keep[0], keep[-1] = 0, len(position) - 1
    return keep
