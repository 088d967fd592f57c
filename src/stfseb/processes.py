"""The Student's t process: a prior over functions, its samples, and its posterior at new points."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Gamma, MultivariateNormal

from stfseb.distributions import MultivariateStudentT, degrees_of_freedom
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable


class StudentTProcess:
    """TP(dof, mean, kernel): at any finite set of points, a multivariate Student's t.

    `dof=math.inf` is the Gaussian process. Reference: Shah, Wilson and Ghahramani (2014).

    Args:
        dof: degrees of freedom, above 2.
        mean: function from inputs (n, ...) to (n,), or None for zero.
        kernel: function from inputs (n, ...) and (m, ...) to covariances (n, m): one of `stfseb.kernels`, a
            gpytorch kernel, or anything callable. It is the covariance of the process, not its scale.

    Observation noise, wherever a method takes `noise`, is a variance (one number or one per point) added to
    the diagonal of the covariance, so that it shares the heavy tail of the function, as in the reference. In
    the posterior it is in the same units as before: what the data say about the common scale rescales both.
    """

    def __init__(
        self,
        dof: float | Tensor,
        mean: Callable[[Tensor], Tensor] | None,
        kernel: Callable[[Tensor, Tensor], Any],
    ) -> None:
        self.dof = _plain_if_infinite(degrees_of_freedom(dof))
        self.mean = mean
        self.kernel = kernel
        self._noise_scale: float | Tensor = 1.0

    @property
    def gaussian(self) -> bool:
        """Whether this is a Gaussian process."""
        return isinstance(self.dof, float) and math.isinf(self.dof)

    def marginal(self, x: Tensor, noise: float | Tensor = 0.0) -> MultivariateStudentT | MultivariateNormal:
        """Return the distribution of the function (plus noise) at the points x (n, ...)."""
        covariance = self._covariance(x, noise)
        factor = _cholesky(covariance)
        loc = self._mean(x, covariance)
        if self.gaussian:
            return MultivariateNormal(loc, scale_tril=factor)
        return MultivariateStudentT(self.dof, loc, covariance_tril=factor)

    def sample(self, x: Tensor, n: int = 1, noise: float | Tensor = 0.0) -> Tensor:
        """Draw n functions at the points x, (n, len(x)).

        A root by eigenvalues stands in for Cholesky's, since covariances of smooth functions are singular
        to rounding on any fine grid, and adding jitter would change the prior.
        """
        covariance = self._covariance(x, noise).detach()
        values, vectors = torch.linalg.eigh(covariance.double())
        root = (vectors * values.clamp(min=0).sqrt()).to(covariance)
        draws = torch.randn(n, len(values), dtype=root.dtype, device=root.device) @ root.mT
        if not self.gaussian:
            dof = torch.as_tensor(self.dof, dtype=root.dtype, device=root.device).detach()
            draws = draws * Gamma(dof / 2, (dof - 2) / 2).sample((n, 1)).rsqrt()
        functions: Tensor = self._mean(x, covariance).detach() + draws
        return functions

    def posterior(self, x: Tensor, y: Tensor, noise: float | Tensor = 0.0) -> StudentTProcess:
        """Return the process given observations y (n,) at x (n, ...), itself a Student's t process.

        With residuals e = y - mean(x), K the covariance of y, and beta = e' K^-1 e:
        dof' = dof + n, mean' = mean + k(., x) K^-1 e, and
        kernel' = (dof - 2 + beta)/(dof - 2 + n) (k - k(., x) K^-1 k(x, .)).
        """
        if y.shape != x.shape[:1]:
            raise StfsebError(f"give one observation per point: y {tuple(y.shape)} but x {tuple(x.shape)}")
        covariance = self._covariance(x, noise)
        factor = _cholesky(covariance)
        residual = (y - self._mean(x, covariance)).unsqueeze(-1)
        white = torch.linalg.solve_triangular(factor, residual, upper=False)
        weights = torch.linalg.solve_triangular(factor.mT, white, upper=True).squeeze(-1)
        scale: float | Tensor = 1.0
        if not self.gaussian:
            scale = (self.dof - 2 + white.square().sum()) / (self.dof - 2 + len(y))

        def mean(new: Tensor) -> Tensor:
            cross = _dense(self.kernel(new, x))
            shifted: Tensor = self._mean(new, cross) + cross @ weights
            return shifted

        def kernel(a: Tensor, b: Tensor) -> Tensor:
            left = torch.linalg.solve_triangular(factor, _dense(self.kernel(x, a)), upper=False)
            right = torch.linalg.solve_triangular(factor, _dense(self.kernel(x, b)), upper=False)
            remaining: Tensor = scale * (_dense(self.kernel(a, b)) - left.mT @ right)
            return remaining

        process = StudentTProcess(self.dof + len(y), mean, kernel)
        process._noise_scale = self._noise_scale * scale
        return process

    def _mean(self, x: Tensor, like: Tensor) -> Tensor:
        return like.new_zeros(len(x)) if self.mean is None else self.mean(x)

    def _covariance(self, x: Tensor, noise: float | Tensor) -> Tensor:
        covariance = _dense(self.kernel(x, x))
        if isinstance(noise, float | int) and noise == 0:
            return covariance
        variances = torch.as_tensor(noise, dtype=covariance.dtype, device=covariance.device)
        variances = variances * self._noise_scale
        return covariance + torch.diag_embed(variances.expand(len(x)))


def _plain_if_infinite(dof: float | Tensor) -> float | Tensor:
    """Return the number for an infinite tensor: the Gaussian's formulas are others, and not limits to compute."""
    if isinstance(dof, Tensor) and not torch.compiler.is_compiling():
        with suppress(RuntimeError):  # inside vmap there is no value to read
            return math.inf if bool(torch.isinf(dof).all()) else dof
    return dof


def _dense(matrix: Any) -> Tensor:
    """Return a plain tensor, from gpytorch's lazily evaluated ones too."""
    dense: Tensor = matrix if isinstance(matrix, Tensor) else matrix.to_dense()
    return dense


def _cholesky(covariance: Tensor) -> Tensor:
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(covariance)
    if bool(info.any()):
        raise StfsebError(
            f"the covariance of {covariance.shape[-1]} points is not positive definite in {covariance.dtype}"
            ": use float64 inputs, fewer or distinct points, or noise > 0"
        )
    return factor
