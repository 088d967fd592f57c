"""Covariance functions k(x, x') for `StudentTProcess`: features of a network, RBF and Matern.

Each is a small frozen object that, called with inputs (n, ...) and (m, ...), returns the (n, m) matrix.
Hyper-parameters are numbers or tensors (which may require gradients). Inputs of more than two dimensions,
images for instance, are flattened; `length_scale` may be one number or one per input dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stfseb.distributions import hyperparameter
from stfseb.errors import StfsebError

Kernel = Callable[[Tensor, Tensor], Tensor]


def _distance(x: Tensor, y: Tensor, length_scale: float | Tensor) -> Tensor:
    x, y = (a.unsqueeze(-1) if a.ndim == 1 else a.flatten(1) for a in (x, y))
    # The faster route by matrix products loses half the digits between near points.
    return torch.cdist(x / length_scale, y / length_scale, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True)
class FeatureKernel:
    """k(x, x') = tau1 h(x) . h(x'): functions linear in the features of a network h."""

    features: Callable[[Tensor], Tensor]
    tau1: float | Tensor = 1.0

    def __post_init__(self) -> None:
        hyperparameter("tau1", self.tau1)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the (n, m) matrix of covariances."""
        return self.tau1 * self.features(x) @ self.features(y).mT


@dataclass(frozen=True)
class RBF:
    """k(x, x') = variance exp(-|x - x'|^2 / (2 length_scale^2)): very smooth functions."""

    length_scale: float | Tensor = 1.0
    variance: float | Tensor = 1.0

    def __post_init__(self) -> None:
        hyperparameter("length_scale", self.length_scale)
        hyperparameter("variance", self.variance)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the (n, m) matrix of covariances."""
        return self.variance * torch.exp(-_distance(x, y, self.length_scale).square() / 2)


@dataclass(frozen=True)
class Matern:
    """Matern covariance of smoothness 1/2, 3/2 or 5/2 (Rasmussen and Williams 2006, section 4.2)."""

    smoothness: float = 2.5
    length_scale: float | Tensor = 1.0
    variance: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if self.smoothness not in (0.5, 1.5, 2.5):
            raise StfsebError(f"Matern smoothness = {self.smoothness:g} is unknown: use 0.5, 1.5 or 2.5")
        hyperparameter("length_scale", self.length_scale)
        hyperparameter("variance", self.variance)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the (n, m) matrix of covariances."""
        r = math.sqrt(2 * self.smoothness) * _distance(x, y, self.length_scale)
        polynomial = 1 + r if self.smoothness == 1.5 else 1 + r + r.square() / 3
        decay = self.variance * torch.exp(-r)
        return decay if self.smoothness == 0.5 else decay * polynomial
