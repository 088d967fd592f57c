"""When an image looks unfamiliar: a threshold on the confidence, set on held-out familiar images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.errors import StfsebError
from stfseb.evaluation import metrics
from stfseb.evaluation import ood as unfamiliarity
from stfseb.evaluation.inputs import Split, chunks

if TYPE_CHECKING:
    from stfseb.evaluation.evaluate import SamplesLogits


def scores(
    method: SamplesLogits, images: Split, samples: int, seed: int, batch_size: int = 256
) -> tuple[metrics.Array, metrics.Array]:
    """Return averaged log-probabilities (N, L) and unfamiliarity (N,), -log of the maximum probability."""
    log_probs, found = [], []
    for x, _ in chunks(images, "images", batch_size, labels=False, classes=None):
        logits = method.sample_logits(x, samples, seed=seed)
        sampled = torch.log_softmax(logits.cpu().double(), dim=-1).numpy()
        log_probs.append(metrics.log_mean_probs(sampled))
        found.append(unfamiliarity.msp(sampled))
    return np.concatenate(log_probs), np.concatenate(found)


def fit_threshold(
    method: SamplesLogits, familiar: Split, *, false_alarms: float = 0.05, samples: int = 10, seed: int = 0
) -> dict[str, Any]:
    """Return the score above which an image looks unfamiliar: `false_alarms` of the familiar ones do.

    The result is JSON-able and goes into `method.calibration["unfamiliar"]`.
    """
    if not 0.0 < false_alarms < 1.0:
        raise StfsebError(f"false_alarms={false_alarms}: give a fraction between 0 and 1")
    _, found = scores(method, familiar, samples, seed)
    return {
        "score": "msp",
        "threshold": float(np.quantile(found, 1.0 - false_alarms)),
        "false_alarms": false_alarms,
        "images": len(found),
        "samples": samples,
        "seed": seed,
    }
