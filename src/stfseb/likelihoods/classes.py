"""Likelihoods of discrete targets: one class of several, one of two, and any number of labels."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stfseb.errors import StfsebError
from stfseb.likelihoods.base import Likelihood, where_readable, wide

# torch leaves rows of this label out, -100 unless told otherwise: one that no label is, so that none goes unseen.
_NO_LABEL = torch.iinfo(torch.int32).min


class Classification(Likelihood):
    """One class a row: `class_log_probs` says what the outputs mean, the rest follows."""

    @abstractmethod
    def class_log_probs(self, outputs: Tensor) -> Tensor:
        """Return log p(class | f_s(x_i)), (S, B, classes)."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-probabilities at the labels."""
        self.check_shapes(y, outputs.shape[-1])
        log_probs = self.class_log_probs(outputs)
        where_readable(lambda labels: _check_range(labels, log_probs.shape[-1]), y)
        return log_probs.gather(-1, y.long().expand(log_probs.shape[:2])[..., None]).squeeze(-1)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the mean over samples of the class probabilities, (B, classes)."""
        return self.class_log_probs(outputs).exp().mean(0)

    def uncertainty(self, outputs: Tensor) -> Tensor:
        """Return log(1 - max_k p(k | x)), in log space so that confident rows stay apart."""
        log_probs = self.class_log_probs(outputs).double().logsumexp(0)
        others = log_probs.sort(-1).values[:, :-1]
        return others.logsumexp(-1) - log_probs.logsumexp(-1)

    def check_kind(self, y: Tensor) -> None:
        """Raise unless `y` is one whole number a row: 0.7 is no class, and a row of ones and zeros not one."""
        if y.is_floating_point() or y.ndim != 1:
            remedy = "y.long()" if y.ndim == 1 else "the number of each row's class"
            raise StfsebError(f"labels must be integers of shape (N,), not {y.dtype} {tuple(y.shape)}: give {remedy}")

    def _check_labels(self, y: Tensor, classes: int) -> None:
        self.check_kind(y)
        _check_range(y, classes)


class Categorical(Classification):
    """Softmax over classes: log p(y = k | f) = f_k - logsumexp(f)."""

    name: ClassVar[str] = "categorical"

    def class_log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log-softmax."""
        return F.log_softmax(wide(outputs), dim=-1)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-softmax at the labels (one fused kernel: this is every training step)."""
        samples, rows, classes = outputs.shape
        where_readable(lambda labels: _check_range(labels, classes), y)
        labels = y.long().expand(samples, rows).reshape(-1)
        flat = wide(outputs).reshape(-1, classes)
        loss = F.cross_entropy(flat, labels, ignore_index=_NO_LABEL, reduction="none")
        return -loss.view(samples, rows)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the mean over samples of the softmax probabilities."""
        return F.softmax(wide(outputs), dim=-1).mean(0)

    def pooled(self, outputs: Tensor) -> Tensor:
        """Return the logarithm of the averaged probabilities, up to a constant: log sum_s softmax(f_s)."""
        return self.class_log_probs(outputs).logsumexp(0, keepdim=True)

    def check_targets(self, y: Tensor, outputs: int) -> None:
        """Raise unless `y` holds integer labels in 0 .. outputs - 1, and there are two at least."""
        if outputs == 1:
            raise StfsebError(
                "the network has one output, and one class always has probability 1: give it an output a class, or "
                "likelihood=Binary() for yes or no, GaussianRegression() for numbers (stfseb.likelihoods)"
            )
        self._check_labels(y, outputs)


class Binary(Classification):
    """Two classes from one logit: log p(y = 1 | f) = -log(1 + exp(-f)).

    Predictions have two columns, P(0) and P(1), so that all that holds for classes holds here.
    """

    name: ClassVar[str] = "binary"

    def class_log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of 0 and 1, (S, B, 2)."""
        logit = wide(outputs)[..., 0]
        return torch.stack([F.logsigmoid(-logit), F.logsigmoid(logit)], dim=-1)

    def pooled(self, outputs: Tensor) -> Tensor:
        """Return the log odds of the averaged probability."""
        return _log_odds(outputs)

    def check_shapes(self, y: Tensor, outputs: int) -> None:
        """Raise unless the network has one output."""
        del y
        if outputs != 1:
            raise StfsebError(
                f"the network has {outputs} outputs, but the binary likelihood takes one logit: "
                "use Categorical() for classes, or MultiLabel() for several yes-or-no questions"
            )

    def check_targets(self, y: Tensor, outputs: int) -> None:
        """Raise unless `y` holds 0 and 1 and the network has one output."""
        self.check_shapes(y, outputs)
        self._check_labels(y, 2)


class MultiLabel(Likelihood):
    """L yes-or-no labels a row, independent given f: log p(y | f) = sum_l log sigmoid((2 y_l - 1) f_l).

    A label of -1 is unknown and left out. One output with targets (N, 1) is one task; `Binary` speaks of the
    same model as of two classes.
    """

    name: ClassVar[str] = "multilabel"

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum over known labels of their Bernoulli log-probabilities."""
        self.check_shapes(y, outputs.shape[-1])
        where_readable(_check_answers, y)
        signs = (2 * y - 1).to(wide(outputs).dtype)
        known = (y >= 0).to(signs.dtype)
        return (F.logsigmoid(signs * wide(outputs)) * known).sum(-1)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return P(y_l = 1 | x), (B, L)."""
        return torch.sigmoid(wide(outputs)).mean(0)

    def uncertainty(self, outputs: Tensor) -> Tensor:
        """Return log min(p_l, 1 - p_l) of the least certain label."""
        signed = outputs.double()
        log_odds = torch.stack([F.logsigmoid(signed), F.logsigmoid(-signed)]).logsumexp(1)
        return (log_odds.min(0).values - log_odds.logsumexp(0)).max(-1).values

    def pooled(self, outputs: Tensor) -> Tensor:
        """Return the log odds of each label's averaged probability: that labels go together is lost in it."""
        return _log_odds(outputs)

    def check_kind(self, y: Tensor) -> None:
        """Raise unless `y` has a row of labels an example."""
        if y.ndim != 2:
            raise StfsebError(f"labels of shape {tuple(y.shape)} do not fit: give (N, L), a column an output")

    def check_shapes(self, y: Tensor, outputs: int) -> None:
        """Raise unless `y` is (N, outputs)."""
        if y.ndim != 2 or y.shape[1] != outputs:
            raise StfsebError(f"labels of shape {tuple(y.shape)} do not fit: give (N, {outputs}), a column an output")

    def check_targets(self, y: Tensor, outputs: int) -> None:
        """Raise unless `y` is (N, outputs) of 0, 1 and -1 (unknown)."""
        self.check_shapes(y, outputs)
        _check_answers(y)


def _check_range(y: Tensor, classes: int) -> None:
    """Raise for a label that none of the classes has."""
    if not len(y):
        return
    low, high = (int(end) for end in torch.stack(y.aminmax()).tolist())
    if low < 0 or high >= classes:
        bad = low if low < 0 else high
        raise StfsebError(f"label {bad} is outside the network's {classes} classes (0 to {classes - 1})")


def _check_answers(y: Tensor) -> None:
    """Raise for a label that is not yes, no or unknown."""
    wrong = y[(y != 0) & (y != 1) & (y != -1)]
    if len(wrong):
        raise StfsebError(f"label {wrong[0].item():g}: give 1 (yes), 0 (no) or -1 (unknown)")


def _log_odds(outputs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the mean p over samples of sigmoid(f), (1, B, L), exact where p is next to 0 or 1."""
    outputs = wide(outputs)
    return F.logsigmoid(outputs).logsumexp(0, keepdim=True) - F.logsigmoid(-outputs).logsumexp(0, keepdim=True)
