"""MFVI: mean-field variational inference over weights (Bayes by Backprop).

    (1/S) sum_s sum_batch CE(theta_s) + (beta/M) KL( N(mu, s^2) || N(0, sigma^2 I) ),    M = num_data / batch
    KL = sum_i [ log(sigma / s_i) + (s_i^2 + mu_i^2) / (2 sigma^2) - 1/2 ]

The KL is closed-form and summed over every parameter, biases included; dropout layers are the identity.

Blundell et al., Weight uncertainty in neural networks, ICML 2015, https://arxiv.org/abs/1505.05424
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stfseb.methods.base import Terms
from stfseb.methods.mean_field import MeanFieldMethod, check_mean_field
from stfseb.methods.settings import Settings, check_positive

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stfseb.likelihoods import Likelihood
    from stfseb.methods.context import Draw


@dataclass(frozen=True)
class MFVISettings(Settings):
    """Settings of `MFVI`.

    Attributes:
        sigma: standard deviation of the prior.
        samples: weight samples in training and, unless told otherwise, in prediction (S).
        rel_sigma_init: initial posterior standard deviation relative to that of each tensor's initial values.
        temperature: beta, the factor of the KL; 1 is the evidence lower bound.
        estimator: of the data term's gradient. "reparameterisation": one weight sample for all rows;
            "flipout": signs decorrelate the rows (linear and convolution layers); "local": outputs of linear
            layers are drawn instead of their weights. What an estimator does not cover is sampled once for
            all rows, and a warning names it. Prediction always draws weights.
        vectorise: run the samples as one vmap (True), one after the other (False) or by device (None: vmap
            on CUDA, where it is faster; a loop on the CPU, where that is).
    """

    sigma: float = 1.0
    samples: int = 10
    rel_sigma_init: float = 0.1
    temperature: float = 1.0
    estimator: str = "reparameterisation"
    vectorise: bool | None = None

    def __post_init__(self) -> None:
        check_positive(sigma=self.sigma)
        check_mean_field(self.samples, self.rel_sigma_init, self.temperature, self.estimator)


class MFVI(MeanFieldMethod):
    """Mean-field Gaussian variational inference with an isotropic Gaussian prior on every parameter."""

    key = "mfvi"
    label = "MFVI"
    settings_type = MFVISettings
    live_names = ("sigma",)
    settings: MFVISettings

    def __init__(
        self,
        net: nn.Module,
        sigma: float = 1.0,
        samples: int = 10,
        *,
        rel_sigma_init: float = 0.1,
        temperature: float = 1.0,
        estimator: str = "reparameterisation",
        vectorise: bool | None = None,
        likelihood: Likelihood | None = None,
    ) -> None:
        settings = MFVISettings(sigma, samples, rel_sigma_init, temperature, estimator, vectorise)
        super().__init__(net, settings, likelihood)

    def terms(self, x: Tensor, y: Tensor, draw: Draw | None, share: float, part: float) -> Terms:
        """Return the Monte Carlo negative log-likelihood and the KL's share of this minibatch."""
        del draw, part  # no function term
        data = -self.likelihood.log_prob(self.run_data(x), y).mean(0).sum()
        weights = self.kl() * (self.settings.temperature * share)
        return Terms(data, data.new_zeros(()), weights)
