"""Likelihoods of real targets: y = f(x) + noise, with Gaussian or Student's t noise.

The prediction is the mixture of S components around the outputs of the S sampled functions: its mean is their
average, its variance the noise's plus the spread of the functions, its quantiles come by bisection (they lie
between the lowest and the highest of the components').
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError
from stfseb.likelihoods.base import Likelihood, wide

_BISECTIONS = 60  # halves any bracket to float64's resolution


class Regression(Likelihood):
    """Noise of one scale for each of D targets, around a network of D outputs.

    Args:
        noise: scale of the noise, in the units of the targets; where learnt, its initial value.
        learn: learn the scale (one for each target) with the network.
        targets: D.
    """

    log_noise: Tensor

    def __init__(self, noise: float = 1.0, *, learn: bool = True, targets: int = 1) -> None:
        super().__init__()
        if not (math.isfinite(noise) and noise > 0):
            raise StfsebError(f"noise={noise}: the scale of the noise must be a positive number")
        if targets < 1:
            raise StfsebError(f"targets={targets}: give at least 1")
        self.initial_noise, self.learn, self.targets = float(noise), learn, targets
        value = torch.full((targets,), math.log(noise))
        if learn:
            self.log_noise = nn.Parameter(value)
        else:
            self.register_buffer("log_noise", value)

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"noise": self.initial_noise, "learn": self.learn, "targets": self.targets}

    @property
    def noise(self) -> Tensor:
        """The scale of the noise, (D,)."""
        return self.log_noise.exp()

    # What a distribution of the noise defines, all for noise of scale 1 ------------------------------

    @abstractmethod
    def _log_density(self, z: Tensor) -> Tensor:
        """Return the log density of standard noise."""

    @abstractmethod
    def _cdf(self, z: Tensor) -> Tensor:
        """Return the distribution function of standard noise, for float64 on the CPU."""

    @abstractmethod
    def _quantile(self, probability: float) -> float:
        """Undo `_cdf`."""

    @abstractmethod
    def _variance(self) -> Tensor:
        """Return the variance of standard noise (infinite where it does not exist)."""

    # What follows ------------------------------------------------------------------------------------

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log density of the targets, summed over D."""
        self.check_shapes(y, outputs.shape[-1])
        outputs = wide(outputs)
        residual = y.reshape(outputs.shape[1:]).to(outputs.dtype) - outputs
        return (self._log_density(residual / self.noise) - self.log_noise).sum(-1)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the mean of the mixture, (B, D)."""
        return wide(outputs).mean(0)

    def std(self, outputs: Tensor) -> Tensor:
        """Return the standard deviation of the mixture, (B, D): sqrt(noise^2 var + spread of the functions)."""
        spread = outputs.double().var(0, correction=0)
        return (self.noise.double().square() * self._variance().double() + spread).sqrt().to(wide(outputs).dtype)

    def quantile(self, outputs: Tensor, probability: float) -> Tensor:
        """Return the mixture's quantile, (B, D)."""
        if not 0.0 < probability < 1.0:
            raise StfsebError(f"probability={probability}: give a number between 0 and 1")
        noise = self.noise.detach().double().cpu()
        centres = outputs.detach().double().cpu()
        ends = centres + noise * self._quantile(probability)
        low, high = ends.min(0).values, ends.max(0).values
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            below = self._cdf((middle - centres) / noise).mean(0) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return ((low + high) / 2).to(outputs.device, wide(outputs).dtype)

    def interval(self, outputs: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the central interval that holds `level` of the mixture, (B, D) each."""
        if not 0.0 < level < 1.0:
            raise StfsebError(f"level={level}: give a number between 0 and 1, for example 0.95")
        tail = (1.0 - level) / 2
        return self.quantile(outputs, tail), self.quantile(outputs, 1.0 - tail)

    def uncertainty(self, outputs: Tensor) -> Tensor:
        """Return log of the spread: the mean over targets of log(noise^2 + variance of the functions) / 2."""
        spread = outputs.double().var(0, correction=0)
        return (self.noise.detach().double().square() + spread).log().mean(-1) / 2

    def check_shapes(self, y: Tensor, outputs: int) -> None:
        """Raise unless `y` is (N,) or (N, D), and the network has D outputs."""
        if outputs != self.targets:
            raise StfsebError(
                f"the network has {outputs} outputs and the likelihood {self.targets} targets: "
                f"give {type(self).__name__}(targets={outputs}), or a network of {self.targets} outputs"
            )
        if y.shape[1:] not in ((self.targets,), () if self.targets == 1 else (self.targets,)):
            raise StfsebError(f"targets of shape {tuple(y.shape)} do not fit: give (N, {self.targets})")

    def check_targets(self, y: Tensor, outputs: int) -> None:
        """Raise unless `y` is finite real numbers, (N,) or (N, D), and the network has D outputs."""
        self.check_shapes(y, outputs)
        if not y.is_floating_point():
            raise StfsebError(f"targets have dtype {y.dtype}: give floating point numbers")
        if not bool(torch.isfinite(y).all()):
            raise StfsebError("targets have NaN or infinite values: remove those rows")


class GaussianRegression(Regression):
    """y_d = f_d(x) + N(0, noise_d^2)."""

    name: ClassVar[str] = "gaussian"

    def _log_density(self, z: Tensor) -> Tensor:
        return -(z.square() + math.log(2 * math.pi)) / 2

    def _cdf(self, z: Tensor) -> Tensor:
        below: Tensor = torch.special.ndtr(z)
        return below

    def _quantile(self, probability: float) -> float:
        return float(torch.special.ndtri(torch.tensor(probability, dtype=torch.float64)))

    def _variance(self) -> Tensor:
        return torch.ones((), dtype=torch.float64)


class StudentTRegression(Regression):
    """y_d = f_d(x) + noise_d ST(dof, 0, 1): outliers cost a logarithm instead of a square.

    Args:
        noise: scale of the noise, as in `Regression`.
        dof: degrees of freedom; where learnt, the initial value, and it stays above 2 (a finite variance).
        learn: learn the scale.
        learn_dof: learn the degrees of freedom (one number for all targets).
        targets: D.
    """

    name: ClassVar[str] = "student_t"
    raw_dof: Tensor

    def __init__(
        self,
        noise: float = 1.0,
        dof: float = 5.0,
        *,
        learn: bool = True,
        learn_dof: bool = False,
        targets: int = 1,
    ) -> None:
        super().__init__(noise, learn=learn, targets=targets)
        least = 2.0 if learn_dof else 0.0
        if not (math.isfinite(dof) and dof > least):
            raise StfsebError(f"dof={dof}: give a number above {least:g} (GaussianRegression is the limit)")
        self.initial_dof, self.learn_dof = float(dof), learn_dof
        self._floor = least
        value = torch.tensor(math.log(dof - least))
        if learn_dof:
            self.raw_dof = nn.Parameter(value)
        else:
            self.register_buffer("raw_dof", value)

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {**super().settings(), "dof": self.initial_dof, "learn_dof": self.learn_dof}

    @property
    def dof(self) -> Tensor:
        """The degrees of freedom, a scalar."""
        return self._floor + self.raw_dof.exp()

    def _log_density(self, z: Tensor) -> Tensor:
        dof = self.dof
        constant = torch.lgamma((dof + 1) / 2) - torch.lgamma(dof / 2) - (dof * math.pi).log() / 2
        return constant - (dof + 1) / 2 * torch.log1p(z.square() / dof)

    def _cdf(self, z: Tensor) -> Tensor:
        from scipy.special import stdtr  # torch has no incomplete beta function

        return torch.from_numpy(stdtr(float(self.dof.detach()), z.numpy()))

    def _quantile(self, probability: float) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(float(self.dof.detach()), probability))

    def _variance(self) -> Tensor:
        dof = self.dof
        return torch.where(dof > 2, dof / (dof - 2), math.inf)
