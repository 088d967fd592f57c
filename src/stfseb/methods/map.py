"""Maximum a posteriori: one set of weights under a Gaussian prior.

    sum_batch CE(theta) + (1/M) ||theta||^2 / (2 sigma^2),      M = num_data / batch

Biases are included (isotropic prior), dropout layers are the identity. With Adam on the mean loss it
equals a (coupled) weight decay of 1 / (N sigma^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stfseb.methods.base import Method, Terms
from stfseb.methods.settings import Settings, check_positive
from stfseb.networks.folding import deterministic
from stfseb.weight_prior import WeightPrior

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stfseb.likelihoods import Likelihood
    from stfseb.methods.context import Draw


@dataclass(frozen=True)
class MAPSettings(Settings):
    """Settings of `MAP`: the prior's standard deviation."""

    sigma: float = 1.0

    def __post_init__(self) -> None:
        check_positive(sigma=self.sigma)


class MAP(Method):
    """Maximum a posteriori estimation with an isotropic Gaussian prior on every parameter."""

    key = "map"
    label = "MAP"
    settings_type = MAPSettings
    live_names = ("sigma",)

    def __init__(self, net: nn.Module, sigma: float = 1.0, *, likelihood: Likelihood | None = None) -> None:
        super().__init__(net, MAPSettings(sigma), likelihood)

    def terms(self, x: Tensor, y: Tensor, draw: Draw | None, share: float, part: float) -> Terms:
        """Return the summed negative log-likelihood and the prior's share of this minibatch."""
        del draw, part  # no function term
        data = -self.likelihood.log_prob(deterministic(self.net, x)[None], y).sum()
        weights = WeightPrior(math.inf, self.hyper("sigma")).penalty(self.trainable()) * share
        return Terms(data, data.new_zeros(()), weights)

    def _draw(self, x: Tensor, samples: int, seed: int) -> Tensor:
        del seed  # every sample is the one network
        return deterministic(self.net, x).expand(samples, -1, -1)
