"""The naive way: what a first implementation does, as the yardstick of every speed claim.

Eager float32, a DataLoader, a Python loop over the Monte Carlo samples, and all that belongs to the context anew in
every step: features, factorisations, and for GFSVI the Jacobian of every output by every weight. The objective is the
method's own at its default settings, written out a second time from torch's layers and distributions; only dropout
masks of context rows differ (drawn row by row).
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.func import functional_call, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

from stfseb.errors import StfsebError, unknown
from stfseb.function_prior import FunctionPrior
from stfseb.inputs import scaled
from stfseb.networks.precision import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stfseb.methods.base import Method

DROPOUT = ("stfseb", "mcdropout", "outlierexposure")
MEAN_FIELD = ("mfvi", "fseb", "gfsvi")
METHODS = (*DROPOUT, *MEAN_FIELD, "map")


class NaiveTraining:
    """Training steps of a method done the naive way; `step()` makes one."""

    def __init__(self, method: Method, x: Tensor, y: Tensor, batch_size: int, *, augment: Any = None) -> None:
        if method.key not in METHODS:
            raise unknown("method of the naive way", method.key, METHODS)
        if len(x) < batch_size:
            raise StfsebError(f"batch_size={batch_size} exceeds the {len(x)} images: lower it")
        self.method, self.num_data, self.batch_size, self.augment = method, len(x), batch_size, augment
        self.device = method.like.device
        self.loader = DataLoader(
            TensorDataset(x.float() / 255.0, y), batch_size=batch_size, shuffle=True, drop_last=True
        )
        self.optimiser = torch.optim.Adam([p for p in method.parameters() if p.requires_grad], lr=5e-4)
        self.samples = method.samples
        self.batches = self._forever()
        self.extractor: Any = copy.deepcopy(method.net).eval()[:-1]  # type: ignore[index]

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self.loader

    def step(self) -> None:
        """Make one step: a pass and a backward pass through a sum over samples."""
        x, y = next(self.batches)
        x, y = x.to(self.device), y.to(self.device)
        if self.augment is not None:
            x = self.augment(x)
        with running("float32", self.device):
            total = self.objective(x, y)
            self.optimiser.zero_grad()
            (total / self.batch_size).backward()
        self.optimiser.step()

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the objective of a minibatch, in nats summed over it."""
        key, settings, share = self.method.key, self._settings, len(x) / self.num_data
        total = self._weights() * share
        rows, prior = x, None
        if self.method.uses_context:
            context = self._context(x)
            if key == "gfsvi":
                total = total + self._divergence(context) * share
            else:
                rows = torch.cat([x, context])
            if key in ("stfseb", "fseb"):
                with torch.no_grad():
                    features = self.extractor(context)
                dof = settings.nu_function if key == "stfseb" else math.inf
                prior = FunctionPrior(features, settings.tau1, settings.tau2, dof)
        for _ in range(self.samples):
            logits = self._pass(rows)
            total = total + F.cross_entropy(logits[: len(x)], y, reduction="sum") / self.samples
            outside = logits[len(x) :]
            if prior is not None:
                total = total + prior.penalty(outside) / self.samples
            elif key == "outlierexposure":
                undecided = -F.log_softmax(outside, dim=-1).mean()
                total = total + undecided * (settings.strength * len(x) / self.samples)
        return total

    @property
    def _settings(self) -> Any:
        return self.method.settings

    def _context(self, x: Tensor) -> Tensor:
        assert self.method.context is not None
        images: Any = self.method.context.images
        chosen = torch.randperm(len(images))[: self._settings.num_context]
        return scaled(images[chosen.to(images.device)], x)

    def _pass(self, rows: Tensor) -> Tensor:
        """Return the logits of one sample."""
        net = self.method.net
        if self.method.key in DROPOUT:
            out: Tensor = net.train()(rows)
        elif self.method.key in MEAN_FIELD:
            out = functional_call(net.eval(), self.draw(), (rows,))
        else:
            out = net.eval()(rows)
        return out

    def draw(self) -> dict[str, Tensor]:
        """Return one weight sample of a mean-field posterior, by name."""
        method: Any = self.method
        scales = method.scales()
        return {name: mean + scales[name] * torch.randn_like(mean) for name, mean in method.means().items()}

    def _weights(self) -> Tensor:
        """Return what the weights cost in a whole epoch: their prior's energy, or the KL from it."""
        method: Any = self.method
        settings, key = self._settings, method.key
        total: Tensor = method.like.new_zeros(())
        if key == "gfsvi":
            return total
        if key in ("mfvi", "fseb"):
            scales = method.scales()
            for name, mean in method.means().items():
                prior = Normal(torch.zeros_like(mean), settings.sigma)
                total = total + kl_divergence(Normal(mean, scales[name]), prior).sum()
            return total
        for p in method.net.parameters():
            squares = (p / settings.sigma).square()
            dof = settings.nu_weights if key == "stfseb" else math.inf
            energy = squares / 2 if math.isinf(dof) else (dof + 1) / 2 * torch.log1p(squares / dof)
            total = total + energy.sum()
        if key in DROPOUT and isinstance(settings.prior_weight, str):
            rate = next(module.p for module in method.net.modules() if isinstance(module, torch.nn.Dropout))
            return total * float(rate if settings.prior_weight == "rate" else 1 - rate)
        return total * float(settings.prior_weight if key in DROPOUT else 1.0)

    def _divergence(self, context: Tensor) -> Tensor:
        """Return the regularised KL of the linearised network from the Gaussian process, all Jacobians at once."""
        method: Any = self.method
        net, means, scales = method.net.eval(), method.means(), method.scales()

        def outputs(weights: dict[str, Tensor], image: Tensor) -> Tensor:
            out: Tensor = functional_call(net, weights, (image[None],))[0]
            return out

        jacobians = vmap(jacrev(outputs), (None, 0))(means, context)
        prior = method.prior.covariance(context)
        nugget = self._settings.gamma * prior.diagonal().mean() * torch.eye(len(context)).to(prior)
        covariance = nugget
        for name, jacobian in jacobians.items():  # (N_c, L, shape of the weight)
            weighted = (jacobian * scales[name]).flatten(2).transpose(0, 1).to(prior)
            covariance = covariance + weighted @ weighted.mT
        mean = net(context).T.to(prior)
        ours = MultivariateNormal(mean, covariance)
        return kl_divergence(ours, MultivariateNormal(torch.zeros_like(mean), prior + nugget)).sum().to(method.like)
