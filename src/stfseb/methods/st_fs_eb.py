"""ST-FS-EB: function-space empirical Bayes regularisation with Student's t priors.

Minimised for a minibatch of B examples of a data set of N = M B examples:

    (1/S) sum_s [ sum_batch CE(theta_s) + kappa (nu_f + N_c)/2 sum_l log1p(c_l^s / (nu_f - 2)) ]
    + (w / M) (nu_w + 1)/2 sum_i log1p(theta_i^2 / (nu_w sigma^2)),
    c_l^s = f_l' K^{-1} f_l,     K = tau1 h h' + tau2 I,

Where settings of a prior are learnt (`learn`), its term is the whole negative log density, normaliser included.

theta_s one dropout mask, f_l the logits of class l at N_c context points, h the features of a frozen
copy of the network. Dropout has no density, so the value is a MAP-like surrogate, not a bound on the
evidence. Context rows share one mask per sample (c is joint over them); data rows draw their own.

Hao and Kuruoglu, Function-space empirical Bayes regularisation with Student's t priors, UAI 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stfseb.distributions import PARAMETRISATIONS, Parametrisation
from stfseb.errors import StfsebError, unknown
from stfseb.methods.base import Terms
from stfseb.methods.context import Context, Draw
from stfseb.methods.function_term import PriorMean, check_functional_scale, function_weight, name_of
from stfseb.methods.learning import COVARIANCE_DOF, DOF, SCALE, VARIANCE, Learnt, checked_names
from stfseb.methods.mc_dropout import DropoutMethod, check_prior_weight, prior_weight
from stfseb.methods.settings import Settings, check_count, check_dof, check_layer, check_positive, newer
from stfseb.networks.dropout import Block
from stfseb.weight_prior import WeightPrior

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from stfseb.function_prior import FunctionPrior
    from stfseb.likelihoods import Likelihood


@dataclass(frozen=True)
class STFSEBSettings(Settings):
    """Settings of `STFSEB`; the rare switches are explained here, in one place.

    Attributes:
        dof: degrees of freedom of both priors, `math.inf` for Gaussian ones.
        sigma: scale of the weight prior.
        tau1: variance of the linear model on the features.
        tau2: variance of the noise on top of it.
        num_context: context points in each step (N_c).
        samples: Monte Carlo samples in training and, unless told otherwise, in prediction (S).
        dof_function: degrees of freedom of the function prior alone (None: `dof`).
        dof_weights: degrees of freedom of the weight prior alone (None: `dof`).
        functional_scale: kappa. "batch": once per minibatch, as printed in the paper; "epoch": once per
            epoch (len(x) / num_data), as FS-EB reads it; a number: that many times per minibatch; 0
            removes the term.
        prior_weight: w. "rate", "keep" or a number; see `MCDropout`.
        parametrisation: "covariance" (c / (nu - 2), the paper's; needs dof > 2), "scale" (c / nu) or
            "curvature" (c / (nu + N_c): the Gaussian's curvature at the mode for every nu).
        context_mask: "shared" (one mask per sample for all context rows) or "row".
        normalise_features: divide h by its root mean square norm over the context set, so that tau1 means
            the same for every initialiser.
        extractor: where h comes from: "init" (a copy of the network at construction; "pretrained" is the same, of
            a network that comes with weights), "independent" (a copy initialised anew, as its constructor would),
            "he" (anew by He's rule, whose features are about ten times as large) or a callable, shown here by name.
        features: the layer whose output h is (None: the input of the last Linear).
        prior_mean: m, what the outputs are pulled towards: f - m has the prior. None or 0 is the paper's, even
            odds for every class; in regression zero must mean the targets' mean, so standardise them or give it
            here. A number, or a callable from context images to values (N_c, L) or (L,), shown here by name.
        learn: settings that are trained with the weights, starting from the values given here: "dof" (one for
            both priors), or "dof_weights" and "dof_function" apart; "tau" (both taus); "sigma". Their prior's
            term then has its normaliser. Nothing by default; see the page on dof and tau before using it.
        context_copies: distorted copies of each context image that join the set (turned, zoomed, shifted, some
            inverted; see `stfseb.data.augmentation.distorted`), against contexts that are too narrow.
    """

    dof: float = 5.0
    sigma: float = 1.0
    tau1: float = 1.0
    tau2: float = 100.0
    num_context: int = 32
    samples: int = 10
    dof_function: float | None = None
    dof_weights: float | None = None
    functional_scale: float | str = "batch"
    prior_weight: float | str = "rate"
    parametrisation: Parametrisation = "covariance"
    context_mask: str = "shared"
    normalise_features: bool = False
    extractor: str = "init"
    features: str | None = None
    prior_mean: float | str | None = None
    learn: tuple[str, ...] = ()
    context_copies: int = newer(0)

    def __post_init__(self) -> None:
        check_positive(sigma=self.sigma, tau1=self.tau1, tau2=self.tau2)
        check_count(num_context=self.num_context, samples=self.samples)
        check_count(0, context_copies=self.context_copies)
        check_prior_weight(self.prior_weight)
        if self.parametrisation not in PARAMETRISATIONS:
            raise unknown("parametrisation", self.parametrisation, PARAMETRISATIONS)
        if self.context_mask not in ("shared", "row"):
            raise unknown("context_mask", self.context_mask, ("shared", "row"))
        check_functional_scale(self.functional_scale)
        check_layer(self.features)
        check_dof(dof=self.dof, dof_function=self.dof_function, dof_weights=self.dof_weights)
        # Without a function term the weight prior's are all there are, defined above 0.
        if self.functional_scale != 0 and self.parametrisation == "covariance" and not self.nu_function > 2:
            raise StfsebError(
                f"dof={self.nu_function}: the covariance form needs dof > 2; "
                "use a larger one, math.inf, or parametrisation='scale'"
            )
        object.__setattr__(self, "learn", checked_names(self.learn))
        self._check_learn()

    def _check_learn(self) -> None:
        if "dof" in self.learn and not (self.dof_function is None and self.dof_weights is None):
            raise StfsebError("learn='dof' is one value for both priors: leave dof_function and dof_weights at None")
        if self.functional_scale == 0 and {"tau", "dof_function"} & set(self.learn):
            raise StfsebError(f"learn={self.learn}: there is no function term to learn from (functional_scale=0)")
        if self.prior_weight == 0 and {"sigma", "dof_weights"} & set(self.learn):
            raise StfsebError(f"learn={self.learn}: there is no weight prior to learn from (prior_weight=0)")

    @classmethod
    def plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return settings written in one way, what is learnt in one order."""
        found = super().plain(given)
        if isinstance(found.get("learn"), str | list | tuple):
            found["learn"] = list(checked_names(found["learn"]))
        return found

    @property
    def nu_function(self) -> float:
        """Return the function prior's degrees of freedom."""
        return self.dof if self.dof_function is None else self.dof_function

    @property
    def nu_weights(self) -> float:
        """Return the weight prior's degrees of freedom."""
        return self.dof if self.dof_weights is None else self.dof_weights


class STFSEB(DropoutMethod):
    """Function-space empirical Bayes with Student's t priors and an MC dropout posterior.

    Args:
        net: any `nn.Module` with dropout that returns logits (N, L); held by reference.
        context: unlabelled images unlike the training data (tensor, array, image set or data set of the
            network's input shape), or "train" for rows of the minibatch.
        dof: degrees of freedom nu of both priors.
        sigma: scale of the weight prior.
        tau1: variance of the linear model on the features.
        tau2: variance of the noise on top of it.
        num_context: context points in each step.
        samples: Monte Carlo samples.
        extractor: "init", "independent", "he", or a callable from images to features (a pretrained backbone).
        features: name of the layer whose output is h; by default the input of the last Linear.
        prior_mean: what the outputs are pulled towards at context points, zero by default: a number, or a
            callable from context images to values.
        likelihood: what the outputs mean; categorical by default.
        switches: the rare settings; see `STFSEBSettings`.
    """

    key = "stfseb"
    label = "ST-FS-EB"
    lazy = False
    settings_type = STFSEBSettings
    live_names = ("nu_function", "nu_weights", "sigma", "tau1", "tau2")
    live_settings = ("dof", "dof_function", "dof_weights", "sigma", "tau1", "tau2")
    settings: STFSEBSettings

    def __init__(
        self,
        net: nn.Module,
        context: Any = None,
        dof: float = 5.0,
        sigma: float = 1.0,
        tau1: float = 1.0,
        tau2: float = 100.0,
        num_context: int = 32,
        samples: int = 10,
        *,
        extractor: str | Callable[[Tensor], Tensor] = "init",
        features: str | None = None,
        prior_mean: float | Callable[[Tensor], Tensor] | None = None,
        likelihood: Likelihood | None = None,
        **switches: Any,
    ) -> None:
        known = STFSEBSettings.names()
        for switch in switches:
            if switch not in known:
                raise unknown("setting", switch, known)
        settings = STFSEBSettings(
            dof,
            sigma,
            tau1,
            tau2,
            num_context,
            samples,
            extractor=extractor if isinstance(extractor, str) else name_of(extractor),
            features=features,
            prior_mean=name_of(prior_mean) if callable(prior_mean) else prior_mean,
            **switches,
        )
        super().__init__(net, settings, likelihood)
        self.learning = _learning(settings, self.like)
        self.centred = PriorMean(prior_mean)
        if context is not None or settings.functional_scale != 0:
            self.context = Context.of(net, context, extractor, settings)

    @classmethod
    def restore(cls, net: nn.Module, settings: STFSEBSettings, likelihood: Likelihood) -> STFSEB:
        """Return a method that can predict but not train: the context's images are not saved."""
        method = cls(net, functional_scale=0, prior_weight=1.0, likelihood=likelihood)
        method.settings = settings
        method.learning = _learning(settings, method.like)
        return method

    # What is learnt ----------------------------------------------------------------------------------

    def hyper(self, name: str) -> Any:
        """Return a continuous setting: the number, the tensor that stands for it, or what it has been learnt to be."""
        if self.learning is not None:
            own = {"nu_function": "dof_function", "nu_weights": "dof_weights"}.get(name, name)
            for learnt in (own, "dof") if own.startswith("dof") else (own,):
                if learnt in self.learning:
                    return self.learning.value(learnt)
        return super().hyper(name)

    def learnt(self) -> dict[str, float]:
        """Return the learnt settings and their current values."""
        return {} if self.learning is None else self.learning.values()

    def complaints(self) -> list[str]:
        """Return a line for each learnt value that has reached a bound."""
        found = {} if self.learning is None else self.learning.at_bounds()
        return [
            f"{name} was learnt to its bound, {value:.4g}: the data do not hold it, so fix it, or learn less"
            for name, value in found.items()
        ]

    @property
    def spectral(self) -> bool:
        """Tell whether the function term needs K's determinant or a K that changes in every step."""
        return bool({"dof", "dof_function", "tau"} & set(self.settings.learn)) and self.uses_context

    def captured_key(self) -> tuple[Any, ...]:
        """Return all that a captured step is made for; what is learnt has its starting point built in."""
        built_in = self.settings.as_dict().items() if self.settings.learn else ()
        return *super().captured_key(), repr(sorted(built_in, key=str)), self.centred.mean

    # The objective -----------------------------------------------------------------------------------

    def terms(self, x: Tensor, y: Tensor, draw: Draw | None, share: float, part: float) -> Terms:
        """Return the terms of the minibatch; see the module's formula."""
        settings = self.settings
        if draw is not None:
            shared = settings.context_mask == "shared"
            data_logits, context_logits, rates = self.run_with_context(
                x, draw.images, settings.samples, shared=shared, masks=draw.masks
            )
            kappa = function_weight(settings.functional_scale, share, part)
            prior, values = self.function_prior(draw), self.centred(context_logits, draw.images)
            energy = -prior.log_prob(values) if self.spectral else prior.penalty(values)
            function = energy.mean(0) * kappa
        else:
            data_logits, rates = self.folded(x, settings.samples, [Block(len(x), shared=False)])
            function = data_logits.new_zeros(())
        data = -self.likelihood.log_prob(data_logits, y).mean(0).sum()
        weight = prior_weight(settings.prior_weight, rates) * share
        weight_prior = WeightPrior(self.hyper("nu_weights"), self.hyper("sigma"))
        learnt = {"dof", "dof_weights", "sigma"} & set(settings.learn)
        theta = self.trainable()
        weights = -weight_prior.log_prob(theta) if learnt else weight_prior.penalty(theta)
        return Terms(data, function, weights * weight)

    @property
    def uses_context(self) -> bool:
        """Tell whether the function term is on."""
        return self.settings.functional_scale != 0

    def function_prior(self, draw: Draw) -> FunctionPrior:
        """Return the prior on the outputs at the context points of a draw."""
        tau1, tau2, dof = self.hyper("tau1"), self.hyper("tau2"), self.hyper("nu_function")
        if self.spectral:
            draw = draw.decomposed()
        return draw.function_prior(tau1, tau2, dof, parametrisation=self.settings.parametrisation)

    def prior_ratio(self) -> tuple[Any, Any]:
        """Return tau1/tau2; the kernel has no bias."""
        return self.hyper("tau1") / self.hyper("tau2"), 0.0


def _learning(settings: STFSEBSettings, like: Tensor) -> Learnt | None:
    """Return the learnt values at their starting points, on the network's device."""
    covariance = settings.parametrisation == "covariance" and settings.functional_scale != 0
    function_dof = COVARIANCE_DOF if covariance else DOF
    known = {
        "dof": {"dof": (settings.dof, function_dof)},
        "dof_function": {"dof_function": (settings.nu_function, function_dof)},
        "dof_weights": {"dof_weights": (settings.nu_weights, DOF)},
        "tau": {"tau1": (settings.tau1, VARIANCE), "tau2": (settings.tau2, VARIANCE)},
        "sigma": {"sigma": (settings.sigma, SCALE)},
    }
    chosen = {name: entry for group in settings.learn for name, entry in known[group].items()}
    if not chosen:
        return None
    return Learnt(chosen).to(like.device)
