"""MC Dropout with outlier exposure: uniform targets on the context images, in place of a prior over functions.

    (1/S) sum_s [ sum_batch CE(theta_s) + lambda B mean_context H(u, p(. | x_c, theta_s)) ]
    + (w/M) ||theta||^2 / (2 sigma^2),      M = num_data / batch

H(u, p) = -(1/L) sum_l log p_l is the cross-entropy to the uniform distribution u. The control that tells what a
function-space prior does from what merely seeing the context images does.

Hendrycks, Mazeika and Dietterich, Deep anomaly detection with outlier exposure, ICLR 2019,
https://arxiv.org/abs/1812.04606
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from stfseb.errors import StfsebError
from stfseb.likelihoods import Categorical
from stfseb.methods.base import Terms
from stfseb.methods.context import Context, Draw
from stfseb.methods.mc_dropout import DropoutMethod, check_prior_weight, prior_weight
from stfseb.methods.settings import Settings, check_count, check_positive, newer
from stfseb.networks.dropout import Block
from stfseb.weight_prior import WeightPrior

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stfseb.likelihoods import Likelihood


@dataclass(frozen=True)
class OutlierExposureSettings(Settings):
    """Settings of `OutlierExposure`; `sigma`, `samples` and `prior_weight` as for `MCDropout`.

    Attributes:
        sigma: standard deviation of the weight prior.
        strength: lambda, the weight of a context image relative to a training image (0 removes the term).
        num_context: context images in each step.
        samples: Monte Carlo samples (S).
        prior_weight: "rate", "keep" or a number.
        context_copies: distorted copies of each context image that join the set; see `STFSEBSettings`.
    """

    sigma: float = 1.0
    strength: float = 0.5
    num_context: int = 32
    samples: int = 10
    prior_weight: float | str = "rate"
    context_copies: int = newer(0)

    def __post_init__(self) -> None:
        check_positive(sigma=self.sigma)
        check_count(num_context=self.num_context, samples=self.samples)
        check_count(0, context_copies=self.context_copies)
        check_prior_weight(self.prior_weight)
        if not (math.isfinite(self.strength) and self.strength >= 0):
            raise StfsebError(f"strength={self.strength}: must be a number of at least 0")


class OutlierExposure(DropoutMethod):
    """Monte Carlo dropout, trained to be undecided on the context images."""

    key = "outlierexposure"
    label = "MC Dropout + OE"
    settings_type = OutlierExposureSettings
    settings: OutlierExposureSettings

    def __init__(
        self,
        net: nn.Module,
        context: Any = None,
        sigma: float = 1.0,
        strength: float = 0.5,
        num_context: int = 32,
        samples: int = 10,
        *,
        prior_weight: float | str = "rate",
        context_copies: int = 0,
        likelihood: Likelihood | None = None,
    ) -> None:
        settings = OutlierExposureSettings(sigma, strength, num_context, samples, prior_weight, context_copies)
        super().__init__(net, settings, likelihood)
        if not isinstance(self.likelihood, Categorical):
            raise StfsebError(f"outlier exposure needs classes, but the likelihood is {self.likelihood.name}")
        self.weight_prior = WeightPrior(math.inf, sigma)
        if context is not None or strength != 0:
            self.context = Context(net, context, num_context, extractor=None, copies=context_copies)

    @classmethod
    def restore(cls, net: nn.Module, settings: OutlierExposureSettings, likelihood: Likelihood) -> OutlierExposure:
        """Return a method that can predict but not train: the context's images are not saved."""
        method = cls(net, strength=0, prior_weight=1.0, likelihood=likelihood)
        method.settings = settings
        method.weight_prior = WeightPrior(math.inf, settings.sigma)
        return method

    def terms(self, x: Tensor, y: Tensor, draw: Draw | None, share: float, part: float) -> Terms:
        """Return the terms of the minibatch; see the module's formula."""
        del part  # the function term grows with the rows of x, so that the parts of a step add up
        settings = self.settings
        if draw is None:
            logits, rates = self.folded(x, settings.samples, [Block(len(x), shared=False)])
            function = logits.new_zeros(())
        else:
            logits, outside, rates = self.run_with_context(
                x, draw.images, settings.samples, shared=False, masks=draw.masks
            )
            undecided = -F.log_softmax(outside, dim=-1).mean()
            function = undecided * (settings.strength * len(x))
        data = -self.likelihood.log_prob(logits, y).mean(0).sum()
        weight = prior_weight(settings.prior_weight, rates) * share
        return Terms(data, function, self.weight_prior.penalty(self.trainable()) * weight)

    @property
    def uses_context(self) -> bool:
        """Tell whether context images take part."""
        return self.settings.strength != 0
