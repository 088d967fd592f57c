"""The mean-field Gaussian posterior over the parameters of any module, shared by MFVI, FS-EB and GFSVI.

    q(theta) = N(mu, diag(s^2)),   s = softplus(r),   theta_s = mu + s eps_s,   eps_s ~ N(0, I)

mu are the network's own parameters; r are parameters of the method, one tensor for each of the network's.
A weight sample is run by a functional call, so that no layer is converted. Each sample serves all rows.

Parameters that do not require gradients when the method is made, integer ones among them, are constants; a network
that is frozen, unfrozen or given other layers afterwards is refused. Tied parameters are one parameter. A network
whose buffers change in a forward pass (batch norm in training) runs its samples one after the other, so the
buffers see S updates a step.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from stfseb.errors import StfsebError, unknown
from stfseb.methods.base import Method, evaluating
from stfseb.methods.layer_calls import single_use_calls
from stfseb.methods.perturbed import FLIPOUT, LOCAL, PerturbedLayers, covered
from stfseb.methods.settings import Settings, check_count, check_positive
from stfseb.networks.batch_statistics import Together
from stfseb.networks.folding import deterministic, has_batch_statistics, returned, single, without_dropout
from stfseb.networks.functional import call_with, places
from stfseb.networks.stacked import stacked_chain

if TYPE_CHECKING:
    from stfseb.likelihoods import Likelihood

ESTIMATORS = ("reparameterisation", LOCAL, FLIPOUT)


def check_mean_field(samples: int, rel_sigma_init: float, temperature: float, estimator: str) -> None:
    """Raise for a setting of the posterior that cannot be used."""
    check_count(samples=samples)
    check_positive(rel_sigma_init=rel_sigma_init)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise StfsebError(f"temperature={temperature}: must be a number of at least 0")
    if estimator not in ESTIMATORS:
        raise unknown("estimator", str(estimator), ESTIMATORS)


def gaussian_kl(mean: Tensor, scale: Tensor, sigma: float | Tensor) -> Tensor:
    """Return KL( N(mean, scale^2) || N(0, sigma^2) ) summed over all elements."""
    ratio = scale / sigma
    return (ratio.square() + (mean / sigma).square() - 1.0 - 2.0 * ratio.log()).sum() / 2


class MeanFieldMethod(Method):
    """What the methods whose posterior is mean-field Gaussian share: scales, weight samples, the KL."""

    lazy = False

    def __init__(
        self, net: nn.Module, settings: Settings, likelihood: Likelihood | None, *, point: bool = False
    ) -> None:
        super().__init__(net, settings, likelihood)
        for name, parameter in net.named_parameters():
            if parameter.requires_grad and not parameter.is_floating_point():
                raise StfsebError(f"parameter '{name}' has type {parameter.dtype}: the posterior needs real numbers")
        self.point = point  # one set of weights: a MAP estimate in the same clothes
        self.raw_scales = nn.ParameterDict()
        if not point:
            for name, scale in initial_scales(net, self.settings.rel_sigma_init).items():
                self.raw_scales[name.replace(".", "/")] = nn.Parameter(inverse_softplus(scale))
        trained = {} if point else {name: p for name, p in net.named_parameters() if p.requires_grad}
        self._shapes = {name: p.shape for name, p in trained.items()}
        self._stateful: dict[bool, bool] = {}
        self._covered: list[Any] | None = None
        self._together = Together()
        self._chain = stacked_chain(net)
        self._places = places(net)

    # The posterior -----------------------------------------------------------------------------------

    def means(self) -> dict[str, Tensor]:
        """Return mu by the names of the network's parameters."""
        named: dict[str, Tensor] = dict(self.net.named_parameters())
        found = {name: p for name, p in named.items() if p.requires_grad}
        if not found:  # frozen as a whole, to predict
            found = {name: named[name] for name in self._shapes or named if name in named}
        if not self.point and {name: p.shape for name, p in found.items()} != self._shapes:
            raise self._changed(found)
        return found

    def scales(self) -> dict[str, Tensor]:
        """Return s, the posterior's standard deviations, by the names of the network's parameters."""
        self.means()  # which tells whether they are still those of the network's parameters
        return {name.replace("/", "."): F.softplus(raw) for name, raw in self.raw_scales.items()}

    def kl(self) -> Tensor:
        """Return KL(q || N(0, sigma^2 I)) in nats, summed over all parameters."""
        mean = torch.cat([p.flatten() for p in self.means().values()])
        return gaussian_kl(mean, F.softplus(self._flat_raw()), self.hyper("sigma"))

    def draw_weights(self, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return theta (samples, parameters), every parameter of q flattened in the order of `means`."""
        mean = torch.cat([p.flatten() for p in self.means().values()])
        if self.point:
            return mean.expand(samples, -1)
        noise = torch.randn(samples, len(mean), dtype=mean.dtype, device=mean.device, generator=generator)
        return torch.addcmul(mean, F.softplus(self._flat_raw()), noise)

    def _flat_raw(self) -> Tensor:
        return torch.cat([self.raw_scales[name.replace(".", "/")].flatten() for name in self.means()])

    def _changed(self, found: dict[str, Tensor]) -> StfsebError:
        """Return the error for a network whose trainable parameters are no longer those with scales."""
        name, known = type(self).__name__, self._shapes
        differences = {
            f"trainable, but not when {name} was made": [n for n in found if n not in known],
            "no longer trainable": [n for n in known if n not in found],
            "of another shape": [n for n in found if n in known and found[n].shape != known[n]],
        }
        parts = [
            f"{what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            for what, names in differences.items()
            if names
        ]
        return StfsebError(
            f"{type(self.net).__name__} has changed since its posterior was made ({'; '.join(parts)}): "
            f"freeze, unfreeze and replace layers first, then make {name} anew"
        )

    @property
    def vectorised(self) -> bool:
        """Tell whether passes run under vmap."""
        return True

    # Running the network -----------------------------------------------------------------------------

    def run_weights(self, x: Tensor, theta: Tensor) -> Tensor:
        """Return the outputs (S, rows, L) of the network under the weights `theta` (S, parameters)."""
        if self.point:
            return deterministic(self.net, x).expand(len(theta), -1, -1)
        if self._stacks(x):
            assert self._chain is not None
            return single(self._chain(x, self._stacked(theta), len(theta)))
        if self._vectorises(x):
            out: Tensor = vmap(lambda row: self._call(self._named(row), x), randomness="different")(theta)
            return out
        return torch.stack([self._call(self._named(row), x) for row in theta])

    def run_estimator(self, x: Tensor) -> Tensor:
        """Return outputs (S, rows, L) by local reparameterisation or flipout: right row by row, not jointly."""
        samples, estimator = self.settings.samples, self.settings.estimator
        calls = self._calls(x)
        scales, means = self.scales(), self.means()
        ours = {name for call in calls for name in (call.weight, call.bias) if name is not None}
        by_id = {
            id(means[call.weight]): (scales[call.weight], None if call.bias is None else scales[call.bias])
            for call in calls
        }
        outputs = []
        for _ in range(samples):
            rest = {
                name: mean + scales[name] * torch.randn_like(mean) for name, mean in means.items() if name not in ours
            }
            with PerturbedLayers(estimator, by_id):
                outputs.append(self._call(rest, x))
        return torch.stack(outputs)

    def run_with_context(self, x: Tensor, context: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of data rows and of context rows, each (S, rows, L).

        Context rows see each weight sample as one function. Batch norm takes its statistics from data rows only (see
        `networks.batch_statistics`); where the two cannot go together, context rows see the running averages.
        """
        if self.settings.estimator == ESTIMATORS[0]:
            rows = torch.cat([x, context])

            def joint() -> Tensor:
                return self.run_weights(rows, theta)

            averaged = has_batch_statistics(self.net)
            out = self._together(self.net, len(x), len(rows), 1, joint) if averaged else joint()
            if out is not None:
                return out[:, : len(x)], out[:, len(x) :]
        data = self.run_data(x, theta)
        with evaluating(self.net):
            return data, self.run_weights(context, theta)

    def run_data(self, x: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return the outputs of data rows, (S, rows, L), under the method's gradient estimator."""
        if self.settings.estimator != ESTIMATORS[0] and not self.point:
            return self.run_estimator(x)
        return self.run_weights(x, self.draw_weights(self.settings.samples) if theta is None else theta)

    def _draw(self, x: Tensor, samples: int, seed: int) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(seed)
        return self.run_weights(x, self.draw_weights(samples, generator))

    def _call(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        with without_dropout(self.net, substituted=True):
            return returned(call_with(self.net, parameters, x, self._places))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        means = self.means()
        parts = flat.split([p.numel() for p in means.values()])
        return {name: part.view(p.shape).to(p.dtype) for (name, p), part in zip(means.items(), parts, strict=True)}

    def _stacked(self, theta: Tensor) -> dict[str, Tensor]:
        means = self.means()
        parts = theta.split([p.numel() for p in means.values()], dim=1)
        return {name: part.unflatten(1, p.shape) for (name, p), part in zip(means.items(), parts, strict=True)}

    def _calls(self, x: Tensor) -> list[Any]:
        if self._covered is None:
            estimator = self.settings.estimator
            self._covered = covered(single_use_calls(self.net, x[:1]), estimator)
            ours = {name for call in self._covered for name in (call.weight, call.bias)}
            rest = [name for name in self.means() if name not in ours]
            if rest:
                warnings.warn(
                    f"estimator='{estimator}' does not apply to {len(rest)} parameters ({', '.join(rest[:4])}"
                    f"{', ...' if len(rest) > 4 else ''}): they are sampled once for all rows",
                    stacklevel=5,
                )
        return self._covered

    def _stacks(self, x: Tensor) -> bool:
        """Tell whether all samples run as one batch with stacked weights: chains in bf16 on CUDA."""
        bf16 = x.device.type == "cuda" and torch.is_autocast_enabled("cuda")
        return self._chain is not None and bf16 and self.settings.vectorise is not False

    def _vectorises(self, x: Tensor) -> bool:
        """Tell whether to run all samples as one vmap: on CUDA, unless told otherwise or buffers change."""
        wanted = self.settings.vectorise
        if wanted is False or (wanted is None and x.device.type != "cuda"):
            return False
        training = self.net.training
        if training not in self._stateful:
            self._stateful[training] = changes_buffers(self.net, x[:2])
        if self._stateful[training] and wanted:
            raise StfsebError(
                f"vectorise=True, but buffers of {type(self.net).__name__} change in its forward pass, which one "
                "pass for all samples cannot do: leave vectorise=None, or replace batch norm by group norm"
            )
        return not self._stateful[training]


def inverse_softplus(value: Tensor) -> Tensor:
    """Return r with softplus(r) = value > 0."""
    return value + torch.log(-torch.expm1(-value))


@torch.no_grad()
def initial_scales(net: nn.Module, relative: float) -> dict[str, Tensor]:
    """Return `relative` times the standard deviation of each tensor as it is now, for every element.

    A constant tensor (zero biases, unit norm weights) takes its root mean square, and where that is zero
    or there is only one number, the standard deviation of all parameters together.
    """
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    pooled = float(torch.cat([p.flatten().double() for p in parameters.values()]).std(correction=0)) or 1.0
    scales = {}
    for name, p in parameters.items():
        spread = 0.0
        if p.numel() > 1:
            spread = float(p.double().std(correction=0)) or float(p.double().square().mean().sqrt())
        scales[name] = torch.full_like(p, relative * (spread or pooled), memory_format=torch.contiguous_format)
    return scales


@torch.no_grad()
def changes_buffers(net: nn.Module, x: Tensor) -> bool:
    """Run the network once and tell whether a buffer changed; every buffer is put back as it was."""
    owners = [(module, name, b) for module in net.modules() for name, b in module._buffers.items() if b is not None]
    before = [buffer.clone() for _, _, buffer in owners]
    deterministic(net, x)
    changed = False
    for (module, name, buffer), old in zip(owners, before, strict=True):
        # By value: batch norm's kernels write its running statistics without raising their version.
        if module._buffers[name] is not buffer or not torch.equal(buffer, old):
            changed = True
            module._buffers[name] = buffer.copy_(old)
    return changed
