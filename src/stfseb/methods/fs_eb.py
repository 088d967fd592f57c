"""FS-EB: function-space empirical Bayes with Gaussian priors.

Variational form (`variant="vi"`), for a minibatch of B examples of a data set of N = M B examples:

    (1/S) sum_s [ sum_batch CE(theta_s) + kappa/2 sum_l c_l^s ] + (beta/M) KL( N(mu, s^2) || N(0, sigma^2 I) ),
    c_l^s = f_l' K^{-1} f_l,     K = tau1 (h h' + b 11') + tau2 I,

theta_s one weight sample for data and context rows alike, f_l the logits of class l at N_c context points,
h the features of a frozen copy of the network. MAP form (`variant="map"`): theta instead of theta_s, S = 1,
and (1/M) ||theta||^2 / (2 sigma^2) instead of the KL. log|K| is constant and left out.

kappa = 1 and b = 0 by default, as in ST-FS-EB, so that one tau grid means the same for both;
`official=True` is the released code's scaling and kernel, kappa = 1/M and b = 1.

Rudner et al., Function-space regularization in neural networks: a probabilistic perspective, ICML 2023,
https://arxiv.org/abs/2312.17162
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError, unknown
from stfseb.methods.base import Terms
from stfseb.methods.context import Context, Draw
from stfseb.methods.function_term import check_functional_scale, function_weight
from stfseb.methods.mean_field import MeanFieldMethod, check_mean_field
from stfseb.methods.settings import Settings, check_count, check_layer, check_positive, newer
from stfseb.weight_prior import WeightPrior

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from stfseb.function_prior import FunctionPrior
    from stfseb.likelihoods import Likelihood

VARIANTS = ("vi", "map")


@dataclass(frozen=True)
class FSEBSettings(Settings):
    """Settings of `FSEB`; those of the posterior are explained in `MFVISettings`.

    Attributes:
        sigma: standard deviation of the weight prior.
        tau1: variance of the linear model on the features.
        tau2: variance of the noise on top of it.
        num_context: context points in each step (N_c).
        samples: weight samples (S); the MAP form always has one.
        variant: "vi" (mean-field posterior) or "map" (one set of weights, as released).
        official: take kappa and the kernel's bias from the released code.
        functional_scale: kappa. "batch": once per minibatch; "epoch": once per epoch (1/M); a number: that many
            times per minibatch; 0 removes the term. None: "epoch" with `official`, else "batch".
        bias_variance: b, the variance of a common offset relative to tau1. None: 1 with `official`, else 0.
        normalise_features: divide h by its root mean square norm over the context set.
        extractor: where h comes from: "init", "independent" or a callable, shown here by name.
        features: the layer whose output h is (None: the input of the last Linear).
        context_copies: distorted copies of each context image that join the set; see `STFSEBSettings`.
    """

    sigma: float = 1.0
    tau1: float = 1.0
    tau2: float = 100.0
    num_context: int = 32
    samples: int = 10
    variant: str = "vi"
    official: bool = False
    functional_scale: float | str | None = None
    bias_variance: float | None = None
    normalise_features: bool = False
    extractor: str = "init"
    features: str | None = None
    rel_sigma_init: float = 0.1
    temperature: float = 1.0
    estimator: str = "reparameterisation"
    vectorise: bool | None = None
    context_copies: int = newer(0)

    def __post_init__(self) -> None:
        check_positive(sigma=self.sigma, tau1=self.tau1, tau2=self.tau2)
        check_count(num_context=self.num_context)
        check_count(0, context_copies=self.context_copies)
        check_mean_field(self.samples, self.rel_sigma_init, self.temperature, self.estimator)
        if self.variant not in VARIANTS:
            raise unknown("variant", str(self.variant), VARIANTS)
        check_functional_scale(self.kappa)
        check_layer(self.features)
        if not (math.isfinite(self.bias) and self.bias >= 0):
            raise StfsebError(f"bias_variance={self.bias_variance}: must be a number of at least 0")

    @property
    def kappa(self) -> float | str:
        """Return how often the function term counts."""
        if self.functional_scale is None:
            return "epoch" if self.official else "batch"
        return self.functional_scale

    @property
    def bias(self) -> float:
        """Return the variance of the kernel's common offset, relative to tau1."""
        return float(self.official) if self.bias_variance is None else float(self.bias_variance)


class FSEB(MeanFieldMethod):
    """Function-space empirical Bayes with Gaussian priors, variational or MAP.

    Args:
        net: any `nn.Module` that returns logits (N, L); held by reference.
        context: unlabelled images unlike the training data, or "train" for rows of the minibatch.
        sigma: standard deviation of the weight prior.
        tau1: variance of the linear model on the features.
        tau2: variance of the noise on top of it.
        num_context: context points in each step.
        samples: weight samples.
        extractor: "init", "independent", or a callable from images to features (a pretrained backbone).
        features: name of the layer whose output is h; by default the input of the last Linear.
        likelihood: what the outputs mean; categorical by default.
        switches: the rare settings; see `FSEBSettings`.
    """

    key = "fseb"
    label = "FS-EB"
    settings_type = FSEBSettings
    live_names = ("sigma", "tau1", "tau2")
    settings: FSEBSettings

    def __init__(
        self,
        net: nn.Module,
        context: Any = None,
        sigma: float = 1.0,
        tau1: float = 1.0,
        tau2: float = 100.0,
        num_context: int = 32,
        samples: int = 10,
        *,
        extractor: str | Callable[[Tensor], Tensor] = "init",
        features: str | None = None,
        likelihood: Likelihood | None = None,
        **switches: Any,
    ) -> None:
        named = extractor if isinstance(extractor, str) else getattr(extractor, "__name__", type(extractor).__name__)
        known = FSEBSettings.names()
        for switch in switches:
            if switch not in known:
                raise unknown("setting", switch, known)
        settings = FSEBSettings(sigma, tau1, tau2, num_context, samples, extractor=named, features=features, **switches)
        super().__init__(net, settings, likelihood, point=settings.variant == "map")
        if context is not None or settings.kappa != 0:
            self.context = Context.of(net, context, extractor, settings)

    @classmethod
    def restore(cls, net: nn.Module, settings: FSEBSettings, likelihood: Likelihood) -> FSEB:
        """Return a method that can predict but not train: the context's images are not saved."""
        method = cls(net, functional_scale=0, variant=settings.variant, likelihood=likelihood)
        method.settings = settings
        return method

    @property
    def samples(self) -> int:
        """Return how many Monte Carlo samples prediction takes by default."""
        return 1 if self.point else self.settings.samples

    def terms(self, x: Tensor, y: Tensor, draw: Draw | None, share: float, part: float) -> Terms:
        """Return the terms of the minibatch; see the module's formula."""
        settings = self.settings
        if draw is not None:
            theta = self.draw_weights(self.samples, draw.masks)
            outputs, outside = self.run_with_context(x, draw.images, theta)
            kappa = function_weight(settings.kappa, share, part)
            function = self.function_prior(draw).penalty(outside).mean(0) * kappa
        else:
            outputs = self.run_data(x, self.draw_weights(1) if self.point else None)
            function = outputs.new_zeros(())
        data = -self.likelihood.log_prob(outputs, y).mean(0).sum()
        if self.point:
            weights = WeightPrior(math.inf, self.hyper("sigma")).penalty(self.trainable()) * share
        else:
            weights = self.kl() * (settings.temperature * share)
        return Terms(data, function, weights)

    @property
    def uses_context(self) -> bool:
        """Tell whether the function term is on."""
        return self.settings.kappa != 0

    def function_prior(self, draw: Draw) -> FunctionPrior:
        """Return the prior on the outputs at the context points of a draw."""
        return draw.function_prior(self.hyper("tau1"), self.hyper("tau2"), math.inf, bias_variance=self.settings.bias)

    def prior_ratio(self) -> tuple[Any, Any]:
        """Return tau1/tau2 and the variance of the kernel's common offset."""
        return self.hyper("tau1") / self.hyper("tau2"), self.settings.bias
