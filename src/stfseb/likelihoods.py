"""What the outputs of a network mean: a replaceable piece, so that methods never ask.

A likelihood turns outputs (S, B, L) and targets (B, ...) into log densities (S, B), and outputs into
the prediction that the Monte Carlo average makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from stfseb.errors import StfsebError


class Likelihood(ABC):
    """p(y | f(x)), factorised over rows."""

    name: str

    @abstractmethod
    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | f_s(x_i)) as (S, B) from outputs (S, B, L)."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Return the Monte Carlo average of the prediction, (B, ...), from outputs (S, B, L)."""

    @abstractmethod
    def check_targets(self, y: Tensor, outputs: int) -> None:
        """Raise a one-line error unless `y` can be a target of a network with that many outputs."""


class Categorical(Likelihood):
    """Softmax over classes: log p(y = k | f) = f_k - logsumexp(f)."""

    name = "categorical"

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-softmax at the labels."""
        samples, rows, classes = outputs.shape
        labels = y.expand(samples, rows).reshape(-1)
        loss = F.cross_entropy(outputs.reshape(-1, classes), labels, reduction="none")
        return -loss.view(samples, rows)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the mean over samples of the softmax probabilities."""
        return F.softmax(outputs, dim=-1).mean(0)

    def check_targets(self, y: Tensor, outputs: int) -> None:
        """Raise unless `y` holds integer labels in 0 .. outputs - 1."""
        if y.is_floating_point() or y.dtype == torch.bool or y.ndim != 1:
            raise StfsebError(f"labels must be integers of shape (N,), not {y.dtype} {tuple(y.shape)}")
        if len(y) and (int(y.min()) < 0 or int(y.max()) >= outputs):
            bad = int(y.min()) if int(y.min()) < 0 else int(y.max())
            raise StfsebError(f"label {bad} is outside the network's {outputs} classes (0 to {outputs - 1})")


LIKELIHOODS: dict[str, type[Likelihood]] = {Categorical.name: Categorical}
