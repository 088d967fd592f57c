"""The prior over a network's outputs at the context points, as a density and as a penalty.

K = tau1 h h' + tau2 I = tau2 (I + G G') with G = sqrt(tau1/tau2) h. The bracket's smallest eigenvalue is 1,
so no jitter is ever needed; its condition number reaches 1e9 and more for ordinary settings, so everything
from the Gram matrix to c = f' K^-1 f is float64, whatever the network's precision. (Autocast leaves float64
alone.) With more points than features, c comes from the ridge problem

    tau2 c = min_u |f - G u|^2 + |u|^2,    u = (I + G'G)^-1 G' f,

a sum of squares, exact to second order in the error of u, where Woodbury's difference can turn negative.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stfseb.distributions import (
    PARAMETRISATIONS,
    Parametrisation,
    degrees_of_freedom,
    double,
    energy,
    fold,
    hyperparameter,
    kept_shape,
    log_normaliser,
    workplace,
)
from stfseb.errors import StfsebError, unknown


class FunctionPrior:
    """Independent Student's t processes over L outputs, seen at N_c context points.

    Every output l of `values` (..., N_c, L) has density MVT(dof, 0, K), K = tau1 (h h' + bias_variance 11')
    + tau2 I; `log_prob` and `penalty` give one number per leading index, summed over outputs.

    Args:
        features: h, (..., N_c, p), taken as constants. Leading dimensions are a batch of priors; they
            broadcast with those of `values` from the right, so R runs with S samples each take features
            (R, 1, N_c, p) and values (R, S, N_c, L). All values of one prior share one triangular solve.
        tau1: variance of the weights on the features.
        tau2: variance of the independent part.
        dof: degrees of freedom; `math.inf` is the Gaussian process prior of FS-EB.
        parametrisation: what K is, and so the penalty of c = f' K^-1 f per output:
            "covariance" (the paper's), (dof + N_c)/2 log1p(c/(dof - 2)), dof > 2;
            "scale", (dof + N_c)/2 log1p(c/dof);
            "curvature", (dof + N_c)/2 log1p(c/(dof + N_c)), c/2 near zero for every dof.
        bias_variance: variance of a common offset relative to tau1 (FS-EB's released code has 1).

    `tau1`, `tau2`, `dof` and `bias_variance` are numbers or tensors (0-d, or shaped like the batch of
    priors). Gradients flow into tensors; use `log_prob` to learn them, since `penalty` lacks the normaliser
    that keeps them in check. Nothing here reads a device tensor on the host.
    """

    def __init__(
        self,
        features: Tensor,
        tau1: float | Tensor,
        tau2: float | Tensor,
        dof: float | Tensor,
        *,
        parametrisation: Parametrisation = "covariance",
        bias_variance: float | Tensor = 0.0,
    ) -> None:
        self._set_hyperparameters(tau1, tau2, dof, parametrisation)
        self._scaled: Tensor | None = _scaled_features(features, self.tau1 / self.tau2, bias_variance)
        self.num_context = features.shape[-2]
        self._factor = _factor(self._scaled)
        self._whitener: Tensor | None = None
        self._spectrum: Tensor | None = None

    @staticmethod
    def factorise(features: Tensor, ratio: float | Tensor, bias_variance: float | Tensor = 0.0) -> Tensor:
        """Return the float64 Cholesky factors for features (..., N_c, p) and ratio = tau1/tau2.

        (..., n, n) with n = min(N_c, p): a training epoch's worth in one call, for `from_factor`.
        """
        return _factor(_scaled_features(features, ratio, bias_variance))

    @staticmethod
    def whiten(factor: Tensor) -> Tensor:
        """Return L^-1 for factors of `factorise`: products replace the triangular solves.

        A small product is several times faster than a small solve on a GPU, forward and backward.
        """
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
        return inverse

    @classmethod
    def from_factor(
        cls,
        factor: Tensor,
        tau1: float | Tensor,
        tau2: float | Tensor,
        dof: float | Tensor,
        *,
        features: Tensor | None = None,
        whitener: Tensor | None = None,
        parametrisation: Parametrisation = "covariance",
        bias_variance: float | Tensor = 0.0,
    ) -> FunctionPrior:
        """Return the prior for a factor of `factorise`, made with the same features and tau1/tau2.

        `features` are needed only with more context points than features (the ridge form); `whitener` is
        what `whiten` made of the factor, where a product is to replace the solve.
        """
        prior = cls.__new__(cls)
        prior._set_hyperparameters(tau1, tau2, dof, parametrisation)
        prior._whitener = whitener
        prior._factor = factor
        prior._scaled = prior._spectrum = None
        prior.num_context = factor.shape[-1]
        if features is not None:
            prior._scaled = _scaled_features(features, prior.tau1 / prior.tau2, bias_variance)
            prior.num_context = features.shape[-2]
            if factor.shape[-1] != min(prior._scaled.shape[-2:]):
                raise StfsebError(
                    f"a factor of shape {tuple(factor.shape)} does not belong to features of shape "
                    f"{tuple(prior._scaled.shape)}: pass what FunctionPrior.factorise returned for them"
                )
        return prior

    @staticmethod
    def decompose(features: Tensor, bias_variance: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
        """Return the eigenvectors U (..., N_c, N_c) and eigenvalues s (..., N_c) of h h' + bias_variance 11'.

        Neither depends on tau1 or tau2, so that both can be learnt without a factorisation a step: see
        `from_spectrum`.
        """
        scaled = _scaled_features(features, 1.0, bias_variance)
        spectrum, basis = torch.linalg.eigh(scaled @ scaled.mT)
        return basis, spectrum.clamp_min(0.0)

    @classmethod
    def from_spectrum(
        cls,
        basis: Tensor,
        spectrum: Tensor,
        tau1: float | Tensor,
        tau2: float | Tensor,
        dof: float | Tensor,
        *,
        parametrisation: Parametrisation = "covariance",
    ) -> FunctionPrior:
        """Return the prior for what `decompose` made of its features.

        c = sum_i (u_i' f)^2 / (tau1 s_i + tau2) and log|K| = sum_i log(tau1 s_i + tau2): the taus enter by
        elementwise operations alone, forwards and backwards.
        """
        prior = cls.__new__(cls)
        prior._set_hyperparameters(tau1, tau2, dof, parametrisation)
        ratio = prior.tau1 / prior.tau2
        prior._spectrum = spectrum * (ratio.unsqueeze(-1) if isinstance(ratio, Tensor) else ratio)
        prior._factor = basis
        prior._whitener = basis.mT * torch.rsqrt(1 + prior._spectrum).unsqueeze(-1)
        prior._scaled = None
        prior.num_context = basis.shape[-1]
        return prior

    def quadratic(self, values: Tensor) -> Tensor:
        """Return c = f' K^-1 f >= 0 for each output, (..., L)."""
        return self._quadratic(values).to(values.device, _result_dtype(values))

    def penalty(self, values: Tensor) -> Tensor:
        """Return -log_prob up to constants in `values`, (...): the function term of the training loss."""
        return self._penalty(values).to(values.device, _result_dtype(values))

    def log_prob(self, values: Tensor) -> Tensor:
        """Return the log density of the values, (...), with every constant."""
        _check_tensor(values, "values")
        dof = self.dof
        if not isinstance(dof, Tensor):
            dof = torch.full((), dof, dtype=torch.float64, device=self._factor.device)
        constant = log_normaliser(dof, self.num_context, self.parametrisation) - self.log_det / 2
        result = values.shape[-1] * constant - self._penalty(values)
        return result.to(values.device, _result_dtype(values))

    @property
    def log_det(self) -> Tensor:
        """log|K|, float64, one per prior."""
        log_tau2 = self.tau2.log() if isinstance(self.tau2, Tensor) else math.log(self.tau2)
        if self._spectrum is not None:
            return self.num_context * log_tau2 + torch.log1p(self._spectrum).sum(-1)
        if self._whitener is not None:  # L^-1; an engine may have no factor besides it
            return self.num_context * log_tau2 - 2 * self._whitener.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self.num_context * log_tau2 + 2 * self._factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @property
    def condition_number(self) -> Tensor:
        """An upper bound on K's condition number, 1 + tau1/tau2 sum |h_i|^2, one per prior.

        Never more than min(N_c, p) times too large, and close for features with one dominant direction.
        """
        if self._scaled is not None:
            return 1 + self._scaled.square().sum((-2, -1))
        if self._spectrum is not None:
            return 1 + self._spectrum.sum(-1)
        # |L|_F^2 = trace(I + G G')
        return 1 + self._factor.square().sum((-2, -1)) - self._factor.shape[-1]

    def failure(self) -> str:
        """Return why the factorisation failed, in words, or nothing where it did not; a value is read on the host."""
        if _all_finite(self._factor[..., 0, 0]):
            return ""
        worst, tau1, tau2 = (float(torch.as_tensor(v).max()) for v in (self.condition_number, self.tau1, self.tau2))
        return (
            f"K = tau1 h h' + tau2 I with tau1={tau1:g}, tau2={tau2:g} has a condition number of about {worst:.1e}, "
            "too large to factorise in float64: lower tau1, raise tau2, or scale the features (normalise_features=True)"
        )

    def _set_hyperparameters(
        self,
        tau1: float | Tensor,
        tau2: float | Tensor,
        dof: float | Tensor,
        parametrisation: Parametrisation,
    ) -> None:
        if parametrisation not in PARAMETRISATIONS:
            raise unknown("parametrisation", str(parametrisation), PARAMETRISATIONS)
        self.parametrisation: Parametrisation = parametrisation
        self.tau1 = double(hyperparameter("tau1", tau1, remedy="a variance is positive"))
        self.tau2 = double(hyperparameter("tau2", tau2, remedy="a variance is positive"))
        or_else = " or parametrisation='scale', defined above 0"
        self.dof = double(degrees_of_freedom(dof, parametrisation, or_else=or_else))

    def _penalty(self, values: Tensor) -> Tensor:
        dof = self.dof.unsqueeze(-1) if isinstance(self.dof, Tensor) else self.dof
        return energy(self._quadratic(values), dof, self.num_context, self.parametrisation).sum(-1)

    def _quadratic(self, values: Tensor) -> Tensor:
        _check_tensor(values, "values")
        if values.ndim < 2 or values.shape[-2] != self.num_context:
            raise StfsebError(
                f"values must be (..., {self.num_context}, outputs), one row per context point, "
                f"not {tuple(values.shape)}"
            )
        factor = self._factor
        batch = tuple(factor.shape[:-2])
        columns, unfold = fold(values.to(workplace(values), torch.float64), batch)
        kept = kept_shape(batch)
        factor = factor.reshape(*kept, *factor.shape[-2:])
        if self.num_context == factor.shape[-1]:
            squares = self._solved(factor, columns, kept).square().sum(-2)
        else:
            squares = self._ridge(factor, columns, batch, kept)
        tau2 = self.tau2.unsqueeze(-1) if isinstance(self.tau2, Tensor) else self.tau2
        return unfold(squares) / tau2

    def _solved(self, factor: Tensor, columns: Tensor, kept: tuple[int, ...]) -> Tensor:
        """Return L^-1 of the columns."""
        if self._whitener is not None:
            return self._whitener.reshape(*kept, *factor.shape[-2:]) @ columns
        solved: Tensor = torch.linalg.solve_triangular(factor, columns, upper=False)
        return solved

    def _ridge(self, factor: Tensor, columns: Tensor, batch: tuple[int, ...], kept: tuple[int, ...]) -> Tensor:
        if self._scaled is None:
            raise StfsebError("more context points than features: from_factor needs features= here")
        shape = self._scaled.shape[-2:]
        scaled = self._scaled.expand(*batch, *shape).reshape(*kept, *shape)
        half = self._solved(factor, scaled.mT @ columns, kept)
        if self._whitener is None:
            u = torch.linalg.solve_triangular(factor.mT, half, upper=True)
        else:
            u = self._whitener.reshape(factor.shape).mT @ half
        squares: Tensor = (columns - scaled @ u).square().sum(-2) + u.square().sum(-2)
        return squares


def _result_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _scaled_features(features: Tensor, ratio: float | Tensor, bias_variance: float | Tensor) -> Tensor:
    """Return G = sqrt(ratio) [h, sqrt(bias_variance) 1] in float64, (..., N_c, p or p + 1)."""
    _check_tensor(features, "features")
    if features.ndim < 2 or 0 in features.shape[-2:]:
        raise StfsebError(f"features must be (..., points, features), not of shape {tuple(features.shape)}")
    if features.device.type == "cpu" and not torch.compiler.is_compiling() and not _all_finite(features):
        raise StfsebError("features contain NaN or infinite values: check the extractor and its inputs")
    h = features.detach().to(workplace(features), torch.float64)
    if isinstance(bias_variance, Tensor) or bias_variance != 0:
        bias = double(hyperparameter("bias_variance", bias_variance, remedy="use 0.0 for no bias"))
        column = h.new_ones(*h.shape[:-1], 1) * _root(bias)
        h = torch.cat((h.expand(*column.shape[:-1], -1), column), -1)
    return h * _root(ratio)


def _check_tensor(values: Any, what: str) -> None:
    if not isinstance(values, Tensor):
        raise StfsebError(f"{what} are a {type(values).__name__}: give a tensor")


def _factor(scaled: Tensor) -> Tensor:
    """Return the Cholesky factor of I + G G' or, when it is smaller, of I + G'G."""
    points, width = scaled.shape[-2:]
    gram = scaled @ scaled.mT if points <= width else scaled.mT @ scaled
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(gram + eye)
    # A failure (a condition number beyond float64, or NaN features) must show in the loss without the
    # host having to ask for it here.
    return torch.where((info == 0)[..., None, None], factor, math.nan)


def _all_finite(tensor: Tensor) -> bool:
    try:
        return bool(torch.isfinite(tensor).all())
    except RuntimeError:  # inside vmap there is no value to read
        return True


def _root(value: float | Tensor) -> float | Tensor:
    return value.sqrt()[..., None, None] if isinstance(value, Tensor) else math.sqrt(value)
