"""What is measured of a trained method beside its record: shifted images, numbers of samples, tails, a temperature.

A run's folder gets one file for each part that was measured, `rotation.json`, `corruption.json`, `samples.json`,
`tails.json` and `temperature.json`, beside its record. Weight samples have the seed of the record's evaluation, so
that turning by 0 degrees gives its numbers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.errors import unknown
from stfseb.evaluation import metrics, ood
from stfseb.evaluation.calibration import fit_temperature, probabilities_of
from stfseb.evaluation.evaluate import batch_size_of, evaluate
from stfseb.evaluation.sample_counts import COUNTS, sample_counts
from stfseb.evaluation.shifts import rotate
from stfseb.evaluation.tails import context_tails, weight_tails
from stfseb.experiments.machine import code_version, machine
from stfseb.likelihoods import Categorical
from stfseb.methods.calibrated import mapped, tempered

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from stfseb.data.images import ImageSet
    from stfseb.data.tasks import TaskData
    from stfseb.evaluation.metrics import Array
    from stfseb.methods.base import Method

__all__ = ["COUNTS", "PARTS", "measure_part"]

PARTS = ("rotation", "corruption", "samples", "tails", "temperature")
_OUTPUTS = 2000  # images whose outputs are fitted
_SEED = 0  # of the weight samples, as in `evaluate`


def measure_part(part: str, method: Method, data: TaskData, samples: int) -> dict[str, Any]:
    """Return what `part` (one of `PARTS`) says about a trained method, as JSON knows it.

    Rotation: `sets` maps each angle of the task, as text, to `acc`, `nll`, `ece` and the mean `confidence`.
    Corruption: `sets` maps "TYPE/SEVERITY" to `acc`, `nll`, `ece`, `confidence` and `auroc`, the chance that a
    corrupted image looks less familiar (maximum softmax probability) than a clean one; `clean` has the same of
    the clean test images. A task without the shift has no sets. Samples: `sets` maps each of `COUNTS` to the
    metrics of `stfseb.evaluate` with so many Monte Carlo samples, smaller numbers averaged over up to ten disjoint
    groups of the largest (see `sample_counts`). Tails: `sets` maps "weights" (all, each tensor
    at unit scale), "context" and "test" (single outputs at context and test images) to the fitted Student's t,
    `inverse_dof` 0 where a Gaussian fits best. Temperature: the one `temperature` that gives the validation images
    the lowest NLL (`validation_nll_before` and `_after` it), and with it the `metrics` of `stfseb.evaluate`.
    Every part names the `code` and `device` that measured it, corruption also the `fingerprint` of its images.
    """
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    found = _MEASURES[part](method, data, samples)
    made = {"code": code_version(), "device": machine(method.like.device)["device"]}
    return {"part": part, "samples": samples, **found, **made}


def _rotation(method: Method, data: TaskData, samples: int) -> dict[str, Any]:
    labels, images = _labels(data.test), data.test.images.to(method.like.device)
    sets = {}
    for angle in data.task.shifts.rotation:
        turned = rotate(images, angle)
        sets[f"{angle:g}"] = _quality(_log_probs(method, turned, samples), labels)
    return {"interpolation": "bilinear", "sets": sets}


def _corruption(method: Method, data: TaskData, samples: int) -> dict[str, Any]:
    suite = data.task.shifts.corruption
    if suite is None:
        return {"suite": None, "sets": {}, "notes": []}
    labels = _labels(data.test)
    clean = _log_probs(method, data.test.images, samples)
    familiar = ood.msp(clean[None])
    sets: dict[str, dict[str, float]] = {}
    notes: dict[str, None] = {}
    pixels = hashlib.sha256()
    for (kind, severity), images in data.corrupted().items():
        found = _log_probs(method, images.images, samples)
        quality = _quality(found, labels)
        sets[f"{kind}/{severity}"] = {**quality, "auroc": ood.auroc(familiar, ood.msp(found[None]))}
        notes[images.note] = None
        pixels.update(f"{kind}/{severity}:{images.fingerprint}".encode())
    said = {"notes": [note for note in notes if note], "fingerprint": pixels.hexdigest()[:16]}
    return {"suite": suite.suite, "sets": sets, "clean": _quality(clean, labels), **said}


def _counts(method: Method, data: TaskData, samples: int) -> dict[str, Any]:
    del samples
    found = sample_counts(method, data.test, data.ood, counts=COUNTS, seed=_SEED)
    return {"sets": {str(n): row for n, row in found.items()}}


def _tails(method: Method, data: TaskData, samples: int) -> dict[str, Any]:
    del samples
    context = data.train if data.context is None else data.context
    named = {row.name: row for row in weight_tails(method)}
    found = {"weights": named["all, unit scale"]}
    for name, images in (("context", context), ("test", data.test)):
        found[name] = {row.name: row for row in context_tails(method, images.images[:_OUTPUTS])}["all classes"]
    sets = {name: {**row.as_dict(), "inverse_dof": 1.0 / row.dof} for name, row in found.items()}
    return {"sets": sets, "tensors": [row.as_dict() for row in named.values()]}


def _temperature(method: Method, data: TaskData, samples: int) -> dict[str, Any]:
    assert data.validation.labels is not None
    fitted = fit_temperature(method, data.validation, data.validation.labels, samples, _SEED)
    with probabilities_of(method, fitted):  # alone: a calibration that the method has is not stacked under it
        found = evaluate(method, data.test, data.ood, samples=samples, seed=_SEED)
    return {
        "temperature": fitted["temperature"],
        "of": fitted["of"],
        "validation_nll_before": fitted["nll_before"],
        "validation_nll_after": fitted["nll_after"],
        "metrics": found,
    }


_MEASURES: dict[str, Callable[[Method, TaskData, int], dict[str, Any]]] = {
    "rotation": _rotation,
    "corruption": _corruption,
    "samples": _counts,
    "tails": _tails,
    "temperature": _temperature,
}


def _quality(log_probs: Array, labels: NDArray[np.int64]) -> dict[str, float]:
    probs = np.exp(log_probs)
    return {
        "acc": metrics.accuracy(probs, labels),
        "nll": metrics.nll(log_probs, labels),
        "ece": metrics.ece(probs, labels),
        "confidence": float(probs.max(axis=1).mean()),
    }


@torch.no_grad()
def _log_probs(method: Method, images: Tensor, samples: int) -> Array:
    """Return the logarithm of the averaged probabilities, (N, L) in float64.

    Only this is kept of the samples: a suite has hundreds of thousands of images.
    """
    likelihood = getattr(method, "likelihood", None) or Categorical()
    device = method.like.device
    parts = []
    for chunk in images.split(batch_size_of(method)):
        logits = method.sample_logits(chunk, samples, seed=_SEED)
        logits = logits.cpu() if device.type == "mps" else logits  # which has no float64
        values = likelihood.class_log_probs(tempered(method.calibration, likelihood, logits.double()))
        mean = torch.logsumexp(values, dim=0) - float(np.log(len(values)))
        parts.append(mapped(method.calibration, mean.exp()).log() if _has_maps(method) else mean)
    found: Array = torch.cat(parts).cpu().numpy()
    return found


def _has_maps(method: Method) -> bool:
    return "maps" in method.calibration.get("probabilities", {})


def _labels(images: ImageSet) -> NDArray[np.int64]:
    assert images.labels is not None  # a test set has them
    found: NDArray[np.int64] = images.labels.cpu().numpy()
    return found
