"""From images to what the service says of them: the words of `stfseb predict`, and the samples behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import StfsebError
from stfseb.evaluation.conformal import prediction_sets
from stfseb.experiments.predict import in_words
from stfseb.likelihoods import Classification
from stfseb.methods.calibrated import tempered
from stfseb.methods.decisions import CONFORMAL

if TYPE_CHECKING:
    from torch import Tensor

    from stfseb.methods.base import Method


class Answers:
    """A classifier that answers in JSON; all rows see the masks that the model's own rules were set with."""

    def __init__(self, method: Method, samples: int | None = None) -> None:
        shape = method.provenance.get("input")
        if not shape or len(shape) != 3 or shape[1] != shape[2]:
            raise StfsebError("the model does not say what images it takes: train it with 'stfseb train' or 'compare'")
        if not isinstance(method.likelihood, Classification):
            raise StfsebError(f"only classifiers are served, not the {method.likelihood.name} likelihood")
        self.method = method.eval()
        self.shape: tuple[int, int, int] = (shape[0], shape[1], shape[2])
        own, self.seed = method.rule_draw()
        self.samples = samples or own
        names = method.provenance.get("class_names")
        self.classes = list(names) if names else [str(k) for k in range(self._columns())]

    def __call__(self, x: Tensor) -> list[dict[str, Any]]:
        """Return one answer a row of images (N, C, H, W) in [0, 1]."""
        method = self.method
        with torch.no_grad():
            outputs = method.sample_logits(x, self.samples, seed=self.seed)
            decisions = method.judge(tempered(method.calibration, method.likelihood, outputs))
            assert isinstance(method.likelihood, Classification)
            each = method.likelihood.class_log_probs(outputs).exp()
            spread = each.std(0, correction=0).tolist()
            samples = each.transpose(0, 1).tolist()
        sets = prediction_sets(method, x) if CONFORMAL in method.calibration else None
        rows = in_words(method, [""] * len(x), decisions, sets)
        for i, row in enumerate(rows):
            del row["image"]
            row["probabilities"] = dict(zip(self.classes, decisions.prediction[i].tolist(), strict=True))
            row["spread"] = dict(zip(self.classes, spread[i], strict=True))
            row["samples"] = samples[i]
        return rows

    def warm_up(self) -> None:
        """Run once, so that the first client does not wait for torch to start."""
        self(torch.zeros(2, *self.shape))

    def about(self) -> dict[str, Any]:
        """Say what is served."""
        return {
            "method": self.method.label,
            "classes": self.classes,
            "input": list(self.shape),
            "samples": self.samples,
            "task": self.method.provenance.get("task"),
        }

    def _columns(self) -> int:
        return int(self.method.predict_proba(torch.zeros(1, *self.shape), 1).shape[1])
