"""The prior over weights: independent zero-mean Student's t on every parameter, in *scale* form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stfseb.distributions import degrees_of_freedom, double, energy, hyperparameter, log_normaliser, workplace
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Iterable


class WeightPrior:
    """theta_i ~ ST(dof, 0, sigma^2), each with penalty (dof + 1)/2 log1p(theta_i^2 / (dof sigma^2)).

    `sigma` is the scale, so the variance is dof sigma^2/(dof - 2) where it exists: another convention than
    the function prior's covariance, kept as the paper writes it. `dof=math.inf` is N(0, sigma^2).

    Args:
        dof: degrees of freedom, above 0.
        sigma: scale, above 0. Both are numbers or 0-d tensors; gradients flow into tensors, and to learn
            them `log_prob` is the function to use (`penalty` alone would drive sigma to infinity).
    """

    def __init__(self, dof: float | Tensor, sigma: float | Tensor) -> None:
        self.dof = degrees_of_freedom(dof, "scale")
        self.sigma = hyperparameter("sigma", sigma, remedy="it is the scale of the weights")

    def penalty(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return -log_prob up to constants in the parameters, a scalar."""
        return self._penalty(_flat(parameters))

    def log_prob(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the log density of all parameters, a scalar, with one normaliser for each of them."""
        theta = _flat(parameters)
        dof, sigma = double(self.dof), double(self.sigma)
        if not isinstance(dof, Tensor):
            dof = torch.full((), dof, dtype=torch.float64, device=workplace(theta))
        log_sigma = sigma.log() if isinstance(sigma, Tensor) else math.log(sigma)
        constant = theta.numel() * (log_normaliser(dof, 1, "scale") - log_sigma)
        return constant.to(theta) - self._penalty(theta)

    def _penalty(self, theta: Tensor) -> Tensor:
        # Divided first: sigma^2 and theta^2 alone can leave float32's range, their ratio does not.
        return energy((theta / self.sigma).square(), self.dof, 1, "scale").sum()


def _flat(parameters: Iterable[Tensor]) -> Tensor:
    """Return all parameters as one vector, in float32 at least: a few kernels for any number of tensors."""
    tensors = [p.reshape(-1) for p in parameters]
    if not tensors:
        raise StfsebError("the weight prior was given no parameters: pass net.parameters()")
    flat = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    return flat.to(torch.promote_types(flat.dtype, torch.float32))
