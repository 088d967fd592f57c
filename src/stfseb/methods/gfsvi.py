"""GFSVI: generalised function-space variational inference with a Gaussian process prior.

    (1/S) sum_s sum_batch CE(theta_s) + (beta/M) sum_l D_l,      M = num_data / batch
    D_l = 1/2 [ m_l' R2^{-1} m_l + tr(R2^{-1} R1) - N_c - log det R1 + log det R2 ],
    R1 = J_l diag(s^2) J_l' + e I,    R2 = K + e I,    e = gamma mean(diag K)

D_l is the regularised KL between the law of the linearised network at N_c context points, mean m_l = f_l(.; mu)
and covariance J_l diag(s^2) J_l', and the prior GP(0, k), class by class. The linearisation is used in the
divergence only: the data term samples the network itself. There is no weight prior. The kernel is fitted to
the training labels before training (`prepare`; see `kernel_fit`).

Where the Jacobians of all classes do not fit into a budget, or the network is no chain of plain layers, D_l is
differentiated for a few classes at a time as soon as it is known, and none of their Jacobians is held while the data
term runs.

Cinquin and Bamler, Regularized KL-divergence for well-defined function-space variational inference in
Bayesian neural networks, 2024, https://arxiv.org/abs/2406.04317
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import jvp

from stfseb.errors import StfsebError, unknown
from stfseb.inputs import as_tensor
from stfseb.likelihoods import Categorical
from stfseb.methods.base import Terms
from stfseb.methods.chain_linearisation import ChainLinearisation, chain_linearisation
from stfseb.methods.context import Context, Draw
from stfseb.methods.divergence import GaussianDivergence, with_gradients
from stfseb.methods.function_term import check_functional_scale, function_weight
from stfseb.methods.gp_prior import GPPrior
from stfseb.methods.kernel_fit import KernelFit, cached_fit
from stfseb.methods.linearisation import Linearisation
from stfseb.methods.mean_field import MeanFieldMethod, check_mean_field
from stfseb.methods.memory import available_bytes
from stfseb.methods.settings import Settings, check_count, check_positive, newer
from stfseb.networks.dropout import NoDropout
from stfseb.networks.functional import call_with

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stfseb.likelihoods import Likelihood
    from stfseb.methods.base import Method

LINEARISATIONS = ("full", "last_layer", "subset")
PREDICTIONS = ("network", "linearised")
_CLASSES_BUDGET = 1536 * 2**20  # bytes: as many classes at once as this holds, at least one


@dataclass(frozen=True)
class GFSVISettings(Settings):
    """Settings of `GFSVI`; those of the posterior are explained in `MFVISettings`.

    Attributes:
        kernel: of the prior, on flattened pixels: "matern52", "matern32", "matern12" or "rbf".
        a_eps: of the Dirichlet transform of the labels; it sets the prior's amplitude.
        gamma: regularisation of both covariances, relative to the mean of K's diagonal.
        num_context: context points in each step (N_c).
        samples: weight samples (S).
        linearise: "full" (all parameters), "last_layer" (those of the output layer; the scales of the others see
            the data term only) or "subset" (all parameters, `subset_classes` random classes a step, scaled up).
        subset_classes: classes a step for "subset".
        kernel_steps: Adam steps of the kernel's fit.
        kernel_batch: training points in each of them.
        kernel_lr: their learning rate.
        kl_scale: beta, the factor of the divergence; 1 is the method's objective.
        functional_scale: how often it counts: "epoch" (1/M), "batch" (once per minibatch), or a number of times
            per minibatch; 0 removes it.
        prediction: "network" (weight samples in the network) or "linearised" (in its linearisation at mu).
        context_copies: distorted copies of each context image that join the set; see `STFSEBSettings`.
    """

    kernel: str = "matern52"
    a_eps: float = 0.01
    gamma: float = 1e-6
    num_context: int = 32
    samples: int = 10
    linearise: str = "full"
    subset_classes: int | None = None
    kernel_steps: int = 500
    kernel_batch: int = 512
    kernel_lr: float = 0.05
    kl_scale: float = 1.0
    functional_scale: float | str = "epoch"
    prediction: str = "network"
    rel_sigma_init: float = 0.1
    estimator: str = "reparameterisation"
    vectorise: bool | None = None
    context_copies: int = newer(0)

    def __post_init__(self) -> None:
        self.kernel_fit  # noqa: B018  (it checks what it is made of)
        check_positive(gamma=self.gamma)
        check_count(num_context=self.num_context)
        check_count(0, context_copies=self.context_copies)
        check_mean_field(self.samples, self.rel_sigma_init, self.kl_scale, self.estimator)
        check_functional_scale(self.functional_scale)
        if self.linearise not in LINEARISATIONS:
            raise unknown("linearise", str(self.linearise), LINEARISATIONS)
        if self.prediction not in PREDICTIONS:
            raise unknown("prediction", str(self.prediction), PREDICTIONS)
        if (self.linearise == "subset") != (self.subset_classes is not None):
            raise StfsebError(
                f"linearise='{self.linearise}' with subset_classes={self.subset_classes}: "
                "give subset_classes with linearise='subset', and only then"
            )
        if self.subset_classes is not None:
            check_count(subset_classes=self.subset_classes)

    @property
    def kernel_fit(self) -> KernelFit:
        """Return how the kernel is fitted."""
        return KernelFit(self.kernel, self.a_eps, self.kernel_steps, self.kernel_batch, self.kernel_lr)

    @property
    def label(self) -> str:
        """Return the method's name with every shortcut that these settings take."""
        shortcuts = {"last_layer": ["last layer"], "subset": [f"{self.subset_classes} classes a step"]}
        notes = shortcuts.get(self.linearise, [])
        if self.kernel_fit.steps < KernelFit.steps or self.kernel_fit.batch < KernelFit.batch:
            notes = [*notes, f"{self.kernel_steps} kernel steps on {self.kernel_batch} points"]
        return f"GFSVI ({', '.join(notes)})" if notes else "GFSVI"


class GFSVI(MeanFieldMethod):
    """Function-space variational inference with a Gaussian process prior and a regularised KL.

    Args:
        net: any `nn.Module` that returns logits (N, L); held by reference.
        context: unlabelled images at which the prior looks, or "train" for rows of the minibatch.
        kernel: of the prior.
        a_eps: of the Dirichlet transform.
        gamma: relative regularisation of the covariances.
        num_context: context points in each step.
        samples: weight samples.
        likelihood: what the outputs mean; the kernel's fit needs the categorical one. For others set the kernel,
            `method.prior.set(length_scale, variance)`: what is set by hand is never fitted.
        cache: folder of kernel fits; by default STFSEB_CACHE or the user's cache; False: memory only.
        switches: the rare settings; see `GFSVISettings`.
    """

    key = "gfsvi"
    label = "GFSVI"
    settings_type = GFSVISettings
    live_names = ("gamma", "a_eps")
    live_settings = ("gamma", "a_eps", "kernel")  # the kernel is evaluated before an epoch, outside of its steps
    settings: GFSVISettings

    def __init__(
        self,
        net: nn.Module,
        context: Any = None,
        kernel: str = "matern52",
        a_eps: float = 0.01,
        gamma: float = 1e-6,
        num_context: int = 32,
        samples: int = 10,
        *,
        likelihood: Likelihood | None = None,
        cache: str | Path | bool | None = None,
        **switches: Any,
    ) -> None:
        known = GFSVISettings.names()
        for switch in switches:
            if switch not in known:
                raise unknown("setting", switch, known)
        settings = GFSVISettings(kernel, a_eps, gamma, num_context, samples, **switches)
        super().__init__(net, settings, likelihood)
        self.__dict__["label"] = settings.label  # what a table shows says what was cut short
        self.prior = GPPrior(kernel)
        self.cache = cache
        if context is not None or settings.functional_scale != 0:
            self.context = Context(net, context, num_context, extractor=None, copies=settings.context_copies)
        self._linearisation: Linearisation | ChainLinearisation | None = None

    @classmethod
    def restore(cls, net: nn.Module, settings: GFSVISettings, likelihood: Likelihood) -> GFSVI:
        """Return a method that can predict but not train: the context's images are not saved."""
        method = cls(net, kernel=settings.kernel, functional_scale=0, likelihood=likelihood)
        method.settings = settings
        method.__dict__["label"] = settings.label
        return method

    def take_over(self, other: Method) -> None:
        """Become `other`, its kernel included; `prepare` then fits that."""
        super().take_over(other)
        assert isinstance(other, GFSVI)
        self.prior.kernel, self.prior.by_hand = other.prior.kernel, other.prior.by_hand

    def prepare(self, x: Tensor, y: Tensor) -> None:
        """Fit the prior's kernel to the training data, or take the fit of the same data from the cache.

        A kernel that was set by hand stays as it is, in a saved and loaded model too.
        """
        if self.settings.functional_scale == 0:
            return
        if self.prior.by_hand or "set" in self.provenance.get("kernel", {}):
            values = {"length_scale": float(self.prior.length_scale), "variance": float(self.prior.variance)}
            self.provenance["kernel"] = {**values, "set": "by hand"}
            return
        x, y = as_tensor(x, "x"), as_tensor(y, "y")
        if not isinstance(self.likelihood, Categorical):
            raise StfsebError(
                f"the kernel is fitted to class labels, but the likelihood is {self.likelihood.name}: "
                "set it yourself, method.prior.set(length_scale, variance) before training"
            )
        self.likelihood.check_targets(y, self.outputs(x))
        fitted = cached_fit(x, y, self.outputs(x), self.settings.kernel_fit, self.cache)
        self.prior.take(fitted)
        self.provenance["kernel"] = {
            "length_scale": fitted.length_scale,
            "variance": fitted.variance,
            "log_likelihood": fitted.log_likelihood,
        }

    def terms(self, x: Tensor, y: Tensor, draw: Draw | None, share: float, part: float) -> Terms:
        """Return the terms of the minibatch; see the module's formula."""
        settings = self.settings
        function, theta = x.new_zeros(()), None
        if draw is not None:
            function = self.divergence(draw) * (
                settings.kl_scale * function_weight(settings.functional_scale, share, part)
            )
            theta = self.draw_weights(settings.samples, draw.masks)
        data = -self.likelihood.log_prob(self.run_data(x, theta), y).mean(0).sum()
        return Terms(data, function, data.new_zeros(()))

    @property
    def uses_context(self) -> bool:
        """Tell whether the divergence is on."""
        return self.settings.functional_scale != 0 and self.settings.kl_scale != 0

    def divergence(self, draw: Draw) -> Tensor:
        """Return sum_l D_l at the context points of a draw.

        Never in bf16: log det sees what rounding does to J. Where a step runs in bf16 or TF32 on CUDA, J is
        computed in TF32, whose rounding (relative 5e-4) moves eigenvalues of J J' by less than a millionth of
        the largest, the size of the regularisation; in float32 it is exact single precision. The products of
        Jacobians, and all that follows, are float64.
        """
        with torch.autocast(draw.images.device.type, enabled=False):
            linearised = self._linearised(draw.images)
            reference = self._reference(draw)
            classes, factor = self._classes(linearised.outputs, draw)
            together = len(classes)
            if not linearised.last_layer:
                once, each = linearised.bytes_needed(len(draw.images), self.like.element_size())
                together = max(1, min(together, (_CLASSES_BUDGET - once) // each))
            if together == len(classes) and isinstance(linearised, ChainLinearisation):
                law = linearised.law(draw.images, self.scales(), classes, create_graph=True)
                total = reference(*law)
            else:
                total = self._by_pieces(linearised, reference, draw.images, classes.split(together))
            return (total * factor).to(self.like)

    def _reference(self, draw: Draw) -> GaussianDivergence:
        gamma = self.hyper("gamma")
        if draw.factor is None or draw.whitener is None:
            return GaussianDivergence(self.prior.covariance(draw.images), gamma)
        nugget = gamma * self.prior.variance.to(draw.factor)  # the kernel is stationary: its diagonal is the variance
        return GaussianDivergence.factored(draw.factor, draw.whitener, nugget, gamma)

    def context_factors(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors and inverses of the prior's covariances at sets of points (k, N_c, ...)."""
        reference = GaussianDivergence(self.prior.covariances(images.flatten(2)), self.hyper("gamma"))
        return reference.factor, reference.precision

    def _classes(self, outputs: int, draw: Draw) -> tuple[Tensor, float]:
        """Return the classes of this step, and the factor that makes up for those left out."""
        everything = torch.arange(outputs, device=draw.images.device)
        if self.settings.linearise != "subset":
            return everything, 1.0
        wanted = self.settings.subset_classes or 0
        if wanted > outputs:
            raise StfsebError(f"subset_classes={wanted} exceeds the network's {outputs} outputs: lower it")
        order = torch.randperm(outputs, generator=draw.masks, device=everything.device)
        return everything[order[:wanted]], outputs / wanted

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it takes gradients, which a compiler does not follow
    def _by_pieces(
        self, linearised: Any, reference: GaussianDivergence, images: Tensor, pieces: Sequence[Tensor]
    ) -> Tensor:
        """Return the sum over pieces of the classes, one piece's graph at a time, with its gradient attached."""

        def part(classes: Tensor, create_graph: bool) -> Tensor:
            return reference(*linearised.law(images, self.scales(), classes, create_graph=create_graph))

        return with_gradients(part, pieces, [*self.trainable(), *self.raw_scales.values()])

    def _linearised(self, x: Tensor) -> Linearisation | ChainLinearisation:
        if self._linearisation is None:
            last_layer = self.settings.linearise == "last_layer"
            made: Linearisation | ChainLinearisation | None = None
            if not last_layer:
                made = chain_linearisation(self.net, x[:1])
            made = made or Linearisation(self.net, x[:1], last_layer=last_layer)
            need = sum(made.bytes_needed(len(x), self.like.element_size()))
            free = available_bytes(x.device)
            if free is not None and need > free:
                raise StfsebError(
                    f"num_context={len(x)}: one class's covariance needs about {need / 1e9:.1f} GB and "
                    f"{free / 1e9:.1f} GB are free on {x.device.type}: lower num_context, or use linearise='last_layer'"
                )
            self._linearisation = made
        return self._linearisation

    def _draw(self, x: Tensor, samples: int, seed: int) -> Tensor:
        if self.settings.prediction == "network":
            return super()._draw(x, samples, seed)
        theta = self.draw_weights(samples, torch.Generator(x.device).manual_seed(seed))
        means = {name: p.detach() for name, p in self.means().items()}

        def run(parameters: dict[str, Tensor]) -> Tensor:
            with NoDropout():
                return call_with(self.net, parameters, x, self._places)

        drawn = []
        for row in theta:
            step = {name: value - means[name] for name, value in self._named(row).items()}
            # Not in bf16, as in training; some of torch's formulas (group norm) mix types in tangents there and fail.
            with torch.autocast(x.device.type, enabled=False):
                drawn.append(sum(jvp(run, (means,), (step,))))
        return torch.stack(drawn)
