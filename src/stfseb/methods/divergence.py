"""The regularised KL divergence between Gaussians, and sums whose parts are differentiated one by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class GaussianDivergence:
    """KL( N(m, S + e I) || N(0, K + e I) ) for one K and many (m, S), e = gamma mean(diag K), in float64.

    Of several K (leading indices) it has the factors and inverses, for `factored`.
    """

    def __init__(self, covariance: Tensor, gamma: float | Tensor) -> None:
        self.size = covariance.shape[-1]
        self.gamma = gamma
        self.nugget = gamma * covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
        self.factor = self._cholesky(covariance, "the prior's covariance")
        self.precision = _inverse(self.factor)

    @classmethod
    def factored(cls, factor: Tensor, precision: Tensor, nugget: Tensor, gamma: float | Tensor) -> GaussianDivergence:
        """Return the divergence from a prior whose factor and inverse, with the nugget, are known already."""
        made = cls.__new__(cls)
        made.size, made.gamma, made.nugget = factor.shape[-1], gamma, nugget
        made.factor, made.precision = factor, precision
        return made

    def __call__(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return the sum over the leading index of means (n, N) and covariances (n, N, N)."""
        place = self.factor.device
        loose = covariance.to(place)
        factor = self._cholesky(loose.detach(), "the linearised network's covariance")
        result: Tensor = _Divergence.apply(mean.to(place), loose, self.nugget, self.precision, factor)  # type: ignore[no-untyped-call]
        log_det = 2 * self.factor.diagonal().log().sum()
        return result + len(mean) * (log_det - self.size) / 2

    def _cholesky(self, covariance: Tensor, what: str) -> Tensor:
        eye = torch.eye(self.size, dtype=covariance.dtype, device=covariance.device)
        factor, info = torch.linalg.cholesky_ex(covariance + self.nugget[..., None, None] * eye)
        if factor.device.type == "cpu" and bool((info != 0).any()):
            raise StfsebError(f"{what} is not positive definite with gamma={float(self.gamma):g}: use a larger gamma")
        # Elsewhere a failure shows as NaN in the loss, without waiting for the device.
        return torch.where((info == 0)[..., None, None], factor, math.nan)


class _Divergence(torch.autograd.Function):
    """1/2 sum [ m' P m + tr(P R) - log det R ], R = S + e I, with its gradient P m, (P - R^{-1}) / 2 written out."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, covariance: Tensor, nugget: Tensor, precision: Tensor, factor: Tensor
    ) -> Tensor:
        """Return the sum, given the prior's inverse and R's Cholesky factor."""
        pulled = mean @ precision
        ctx.save_for_backward(pulled, (precision - _inverse(factor)) / 2)
        trace = (precision * covariance).sum() + len(mean) * nugget * precision.diagonal().sum()
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum()
        return ((pulled * mean).sum() + trace - log_det) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        """Scale the two gradients."""
        pulled, slope = ctx.saved_tensors
        return outer * pulled, outer * slope, None, None, None


def _inverse(factor: Tensor) -> Tensor:
    """Return (L L')^{-1}."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor)
    half: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
    return half.mT @ half


class _Known(torch.autograd.Function):
    """A value whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        """Return the value and keep the gradients."""
        del parameters
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        """Scale the kept gradients."""
        return None, None, *(None if g is None else g * outer.to(g.dtype) for g in ctx.gradients)


def with_gradients(part: Callable[[Any, bool], Tensor], pieces: Sequence[Any], parameters: Sequence[Tensor]) -> Tensor:
    """Return sum(part(piece, create_graph)) over the pieces, holding the graph of one piece at a time.

    The gradient with respect to `parameters` is taken piece by piece and attached to the result.
    """
    wanted = torch.is_grad_enabled()
    total: Tensor | None = None
    sums: list[Tensor | None] = [None] * len(parameters)
    for piece in pieces:
        with torch.enable_grad():
            value = part(piece, wanted)
            if wanted:
                found = torch.autograd.grad(value, parameters, allow_unused=True)
                sums = [a if b is None else b if a is None else a + b for a, b in zip(sums, found, strict=True)]
        total = value.detach() if total is None else total + value.detach()
        del value
    assert total is not None
    out: Tensor = _Known.apply(total, sums, *parameters) if wanted else total  # type: ignore[no-untyped-call]
    return out
