"""Answering only when certain: the error rate among answered inputs against how many are answered.

Inputs enter from the most to the least certain. Where uncertainties tie, every figure is the mean over all orders
of the tied rows, so that nothing depends on the order of the data.

El-Yaniv and Wiener, On the foundations of noise-free selective classification, JMLR 2010;
Geifman and El-Yaniv, Selective classification for deep neural networks, https://arxiv.org/abs/1705.08500 (AURC).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.errors import StfsebError
from stfseb.evaluation.inputs import Split, chunks
from stfseb.likelihoods import Classification
from stfseb.methods.calibrated import tempered
from stfseb.networks.memory import memory_kept

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from stfseb.evaluation.metrics import Array
    from stfseb.methods.base import Method


@dataclass(frozen=True)
class RiskCoverage:
    """The risk-coverage curve: `risk[i]` is the error rate among the `coverage[i]` most certain."""

    coverage: Array
    """1/n, 2/n, ..., 1."""
    risk: Array
    """Expected error rate among that many."""
    familiar: Array
    """The fraction of the familiar inputs that is among them (`coverage` itself where all are familiar)."""

    @property
    def aurc(self) -> float:
        """The area under the curve, mean_i risk[i]; lower is better."""
        return float(self.risk.mean())

    def risk_at(self, coverage: float, *, of_familiar: bool = False) -> float:
        """Return the error rate when (at least) this fraction of the inputs, or of the familiar ones, is answered.

        In a mix of which a fraction f is familiar, answering `coverage` > f of the whole forces answers to unfamiliar
        inputs: the risk is then at least 1 - f / coverage, however well they are told apart. A coverage of the
        familiar inputs, as `Method.abstain` sets it, has no such floor.
        """
        if not 0.0 < coverage <= 1.0:
            raise StfsebError(f"coverage={coverage}: give a fraction above 0, at most 1")
        answered = self.familiar if of_familiar else self.coverage
        return float(self.risk[int(np.searchsorted(answered, coverage - 1e-9))])


def risk_coverage(uncertainty: ArrayLike, errors: ArrayLike, familiar: ArrayLike | None = None) -> RiskCoverage:
    """Return the curve of N inputs with these uncertainties and errors (0 or 1, or any loss).

    `familiar` tells which of them are (all, by default).
    """
    values, losses = np.asarray(uncertainty, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    if values.ndim != 1 or values.shape != losses.shape or not len(values):
        raise StfsebError(f"uncertainty {values.shape} and errors {losses.shape} must be of one length, at least 1")
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    known = np.ones(len(values)) if familiar is None else np.asarray(familiar, dtype=np.float64)
    mean, share = (np.bincount(group, weights=w) / count for w in (losses, known))
    position = np.arange(1, len(values) + 1)
    return RiskCoverage(
        position / len(values),
        np.cumsum(np.repeat(mean, count)) / position,
        np.cumsum(np.repeat(share, count)) / known.sum(),
    )


@torch.no_grad()
@memory_kept()
def selective(
    method: Method,
    test: Split,
    unfamiliar: Split | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
) -> RiskCoverage:
    """Return the risk-coverage curve of a classifier on `test`, mixed with `unfamiliar` images where given.

    Every answer to an unfamiliar image is an error: only not answering is right. `risk_at(0.9, of_familiar=True)`
    is then the error rate of a model that answers 90 % of the images it was made for.
    """
    if not isinstance(method.likelihood, Classification):
        raise StfsebError(f"errors are counted for classes, but the likelihood is {method.likelihood.name}")
    uncertainty, errors, familiar = [], [], []
    parts: list[tuple[Any, bool]] = [(test, True)] + ([] if unfamiliar is None else [(unfamiliar, False)])
    for split, labelled in parts:
        for x, y in chunks(split, "test" if labelled else "unfamiliar", batch_size, labels=labelled, classes=None):
            outputs = tempered(method.calibration, method.likelihood, method.sample_logits(x, samples, seed=seed))
            uncertainty.append(method.likelihood.uncertainty(outputs).cpu().numpy())
            answer = method.likelihood.predict(outputs).argmax(-1).cpu()
            errors.append(np.ones(len(x)) if y is None else (answer != y).numpy())
            familiar.append(np.full(len(x), labelled))
    return risk_coverage(np.concatenate(uncertainty), np.concatenate(errors), np.concatenate(familiar))
