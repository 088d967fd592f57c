"""Student's t densities in one place, and the multivariate distribution in covariance form.

For a squared Mahalanobis distance c in n dimensions with nu degrees of freedom,

    log p = lgamma((nu+n)/2) - lgamma(nu/2) - n/2 log(pi d) - 1/2 log|K| - (nu+n)/2 log1p(c/d),

where d says what K is: the covariance (d = nu - 2, Shah et al. 2014), the scale matrix (d = nu), or the
matrix whose inverse is the curvature at the mode, as for a Gaussian (d = nu + n). As nu grows all three
become N(0, K), which is reached exactly at nu = inf.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution, Gamma, constraints
from torch.distributions.utils import lazy_property

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable

Parametrisation = Literal["covariance", "scale", "curvature"]
PARAMETRISATIONS: tuple[Parametrisation, ...] = ("covariance", "scale", "curvature")
_WITHOUT_FLOAT64 = ("mps",)
# From here on Stirling's series is exact to the last digit, while a difference of lgammas loses some.
_STIRLING = 50.0


def hyperparameter(name: str, value: float | Tensor, above: float = 0.0, remedy: str = "") -> float | Tensor:
    """Return `value` as a float or a tensor after checking that it is larger than `above`.

    Only numbers and CPU tensors are looked at: reading a CUDA tensor would stall the device, and under
    `torch.compile` or `vmap` there is no value to read.
    """
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or torch.compiler.is_compiling():
            return value
        try:
            valid = bool((value.detach() > above).all())
        except RuntimeError:  # inside vmap
            return value
        shown = str(value.tolist()) if not valid else ""
    else:
        value = float(value)
        valid, shown = value > above, f"{value:g}"
    if not valid:
        raise StfsebError(f"{name} = {shown} must be larger than {above:g}{'; ' if remedy else ''}{remedy}")
    return value


def double(value: float | Tensor) -> float | Tensor:
    """Return a tensor in float64, on the CPU where its device has none; a number as it is."""
    return value.to(workplace(value), torch.float64) if isinstance(value, Tensor) else value


def workplace(tensor: Tensor) -> torch.device:
    """Return the tensor's device, or the CPU where that device has no float64."""
    return torch.device("cpu") if tensor.device.type in _WITHOUT_FLOAT64 else tensor.device


def degrees_of_freedom(
    dof: float | Tensor, parametrisation: Parametrisation = "covariance", name: str = "dof", or_else: str = ""
) -> float | Tensor:
    """Return checked degrees of freedom: above 2 where a covariance must exist, above 0 elsewhere.

    `or_else`: what the error names beside a larger value, where there is another way.
    """
    if parametrisation == "covariance":
        remedy = "use a larger value (math.inf is the Gaussian)" + or_else
        return hyperparameter(name, dof, 2.0, remedy)
    return hyperparameter(name, dof, 0.0, "use a positive value; math.inf is the Gaussian")


def _denominator(dof: Any, dimension: int, parametrisation: Parametrisation) -> Any:
    if parametrisation == "covariance":
        return dof - 2
    return dof if parametrisation == "scale" else dof + dimension


def energy(
    quadratic: Tensor, dof: float | Tensor, dimension: int, parametrisation: Parametrisation = "covariance"
) -> Tensor:
    """Return (dof + n)/2 log1p(c/d) elementwise, or c/2 where dof is infinite.

    The Gaussian is a branch of its own: the formula approaches it only for c far below dof. A tensor of
    dofs chooses per element, with gradients that stay finite on both sides.
    """
    if isinstance(dof, float):
        if math.isinf(dof):
            return quadratic / 2
        return (dof + dimension) / 2 * torch.log1p(quadratic / _denominator(dof, dimension, parametrisation))
    finite = torch.isfinite(dof)
    inner = torch.where(finite, dof, 3.0)
    ratio = quadratic / _denominator(inner, dimension, parametrisation)
    student = (inner + dimension) / 2 * torch.log1p(ratio)
    return torch.where(finite, student, quadratic / 2)


def _log_gamma_ratio(a: Tensor, b: float) -> Tensor:
    """Return lgamma(a + b) - lgamma(a), keeping its digits for large a."""
    large = a.clamp(min=_STIRLING)

    def tail(x: Tensor) -> Tensor:
        inverse = 1 / x.square()
        return (1 / 12 - inverse * (1 / 360 - inverse / 1260)) / x

    stirling = (large - 0.5) * torch.log1p(b / large) + b * (torch.log(large + b) - 1)
    stirling = stirling + tail(large + b) - tail(large)
    small = a.clamp(max=_STIRLING)
    return torch.where(a < _STIRLING, torch.lgamma(small + b) - torch.lgamma(small), stirling)


def log_normaliser(dof: Tensor, dimension: int, parametrisation: Parametrisation = "covariance") -> Tensor:
    """Return the log density at the mode for |K| = 1, differentiable in dof; Gaussian where dof is inf."""
    finite = torch.isfinite(dof)
    inner = torch.where(finite, dof, 3.0)
    half = dimension / 2
    student = _log_gamma_ratio(inner / 2, half) - half * torch.log(
        math.pi * _denominator(inner, dimension, parametrisation)
    )
    return torch.where(finite, student, -half * math.log(2 * math.pi))


def fold(values: Tensor, batch: tuple[int, ...]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Turn every leading dimension of `values` (..., n, C) that shares a factor into further columns.

    `batch` is the factor's leading shape, aligned from the right as in broadcasting. Returns the columns,
    (kept..., n, F*C) with `kept` the dimensions where the factor differs, and the way back for a result
    with one number per column, (kept..., F*C) -> (..., C). So one factor meets all its right-hand sides in
    one solve, where plain broadcasting would copy the factor for each of them.
    """
    n, width = values.shape[-2:]
    rank = max(values.ndim - 2, len(batch))
    batch = (1,) * (rank - len(batch)) + batch
    lead = (1,) * (rank - (values.ndim - 2)) + tuple(values.shape[:-2])
    kept = [i for i in range(rank) if batch[i] != 1]
    folded = [i for i in range(rank) if batch[i] == 1]
    sizes = [batch[i] for i in kept]
    full = [batch[i] if batch[i] != 1 else lead[i] for i in range(rank)]
    order = [*kept, rank, *folded, rank + 1]
    columns = values.reshape(*lead, n, width).expand(*full, n, width).permute(order).reshape(*sizes, n, -1)

    def unfold(result: Tensor) -> Tensor:
        apart = result.reshape(*sizes, *(full[i] for i in folded), width)
        places = [*kept, *folded]
        return apart.permute(*(places.index(i) for i in range(rank)), rank)

    return columns, unfold


def kept_shape(batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the leading shape that `fold` keeps for a factor of leading shape `batch`."""
    return tuple(size for size in batch if size != 1)


class MultivariateStudentT(Distribution):
    """Multivariate Student's t with mean `loc` and *covariance* `covariance_matrix`, df > 2.

    Equals `scipy.stats.multivariate_t` with shape K(df-2)/df, and a Gaussian exactly where df is infinite.
    Sampled as a Gaussian scale mixture: x = loc + sqrt(gamma) L z with 1/gamma ~ Gamma(df/2, (df-2)/2),
    K = L L' (Shah, Wilson and Ghahramani 2014, "Student-t processes as alternatives to Gaussian processes").

    Args:
        df: degrees of freedom, a number or a tensor that broadcasts with the batch shape.
        loc: mean (..., d).
        covariance_matrix: covariance (..., d, d), or
        covariance_tril: its lower Cholesky factor.
        validate_args: as everywhere in `torch.distributions`.
    """

    arg_constraints = {  # noqa: RUF012 (the attribute torch.distributions asks for)
        "df": constraints.greater_than(2.0),
        "loc": constraints.real_vector,
        "covariance_matrix": constraints.positive_definite,
        "covariance_tril": constraints.lower_cholesky,
    }
    support = constraints.real_vector
    has_rsample = True

    def __init__(
        self,
        df: float | Tensor,
        loc: Tensor,
        covariance_matrix: Tensor | None = None,
        *,
        covariance_tril: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if (covariance_matrix is None) == (covariance_tril is None):
            raise StfsebError("give MultivariateStudentT exactly one of covariance_matrix, covariance_tril")
        matrix = covariance_matrix if covariance_matrix is not None else covariance_tril
        assert matrix is not None
        if loc.ndim < 1 or matrix.ndim < 2 or matrix.shape[-2:] != (loc.shape[-1], loc.shape[-1]):
            raise StfsebError(
                f"loc must be (..., d) and the covariance (..., d, d), not {tuple(loc.shape)} and {tuple(matrix.shape)}"
            )
        if validate_args or (validate_args is None and Distribution._validate_args):
            degrees_of_freedom(df, name="df")
        df = torch.as_tensor(df, dtype=loc.dtype, device=loc.device)
        batch = torch.broadcast_shapes(df.shape, loc.shape[:-1], matrix.shape[:-2])
        self.df = df.expand(batch)
        self.loc = loc.expand(*batch, -1)
        if covariance_matrix is not None:
            self.covariance_matrix = covariance_matrix.expand(*batch, -1, -1)
        else:
            self.covariance_tril = matrix.expand(*batch, -1, -1)
        super().__init__(batch, loc.shape[-1:], validate_args=validate_args)
        # Kept as given: an expanded distribution still has one factor.
        self._factor = matrix if covariance_tril is not None else torch.linalg.cholesky(matrix)

    def expand(
        self, batch_shape: torch.Size | list[int] | tuple[int, ...], _instance: Distribution | None = None
    ) -> MultivariateStudentT:
        """Return the distribution with a larger batch shape; nothing is copied or factored again."""
        new: MultivariateStudentT = self._get_checked_instance(  # type: ignore[no-untyped-call]
            MultivariateStudentT, _instance
        )
        batch, d = torch.Size(batch_shape), self.event_shape[0]
        new.df = self.df.expand(batch)
        new.loc = self.loc.expand((*batch, d))
        for name in ("covariance_matrix", "covariance_tril"):
            if name in self.__dict__:
                setattr(new, name, self.__dict__[name].expand((*batch, d, d)))
        new._factor = self._factor
        super(MultivariateStudentT, new).__init__(batch, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @lazy_property
    def covariance_matrix(self) -> Tensor:
        """The covariance, (batch, d, d)."""
        return (self._factor @ self._factor.mT).expand(self._extended_shape() + self.event_shape)

    @lazy_property
    def covariance_tril(self) -> Tensor:
        """The lower Cholesky factor of the covariance, (batch, d, d)."""
        return self._factor.expand(self._extended_shape() + self.event_shape)

    @property
    def mean(self) -> Tensor:
        """The mean, which exists because df > 2."""
        return self.loc

    @property
    def mode(self) -> Tensor:
        """The mode, equal to the mean."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance matrix."""
        return self._factor.square().sum(-1).expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = torch.Size()) -> Tensor:  # noqa: B008
        """Draw from the scale mixture; differentiable in df, loc and the covariance."""
        shape = self._extended_shape(torch.Size(sample_shape))
        normal = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        finite = torch.isfinite(self.df)
        df = torch.where(finite, self.df, 3.0)
        precision = Gamma(df / 2, (df - 2) / 2, validate_args=False).rsample(torch.Size(sample_shape))
        scale = torch.where(finite, precision.rsqrt(), 1.0)
        return self.loc + scale.unsqueeze(-1) * (self._factor @ normal.unsqueeze(-1)).squeeze(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, differentiable in value, df, loc and the covariance."""
        if self._validate_args:
            self._validate_sample(value)
        columns, unfold = fold((value - self.loc).unsqueeze(-1), tuple(self._factor.shape[:-2]))
        factor = self._factor.reshape(*kept_shape(self._factor.shape[:-2]), *self._factor.shape[-2:])
        white = torch.linalg.solve_triangular(factor, columns, upper=False)
        distance = unfold(white.square().sum(-2)).squeeze(-1)
        d = self.event_shape[0]
        return log_normaliser(self.df, d) - self._half_log_det() - energy(distance, self.df, d)

    def entropy(self) -> Tensor:
        """Return the differential entropy."""
        d = self.event_shape[0]
        finite = torch.isfinite(self.df)
        half = torch.where(finite, self.df, 3.0) / 2
        spread = (half + d / 2) * (torch.digamma(half + d / 2) - torch.digamma(half))
        return self._half_log_det() - log_normaliser(self.df, d) + torch.where(finite, spread, d / 2)

    def _half_log_det(self) -> Tensor:
        return self._factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).expand(self.batch_shape)
