"""Gradient estimators of lower variance than one weight sample for all rows.

Flipout gives row n the weights mu + (s eps) * (r_n t_n'), with random signs r_n, t_n: a draw from the same
symmetric factorised posterior for every row, from one eps. Local reparameterisation draws the outputs of a
linear layer, which are Gaussian and independent between rows: N(W x + b, (s_W^2) x^2 + s_b^2). It is exact
only where a weight meets each row once, so for `F.linear` on inputs (N, in), not for convolutions, whose
positions share their weights.

Wen et al., Flipout, ICLR 2018, https://arxiv.org/abs/1803.04386
Kingma, Salimans and Welling, Variational dropout and the local reparameterization trick, NeurIPS 2015,
https://arxiv.org/abs/1506.02557
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stfseb.errors import StfsebError
from stfseb.methods.layer_calls import LINEAR, LayerCall, call_parts, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

LOCAL = "local"
FLIPOUT = "flipout"
_FLOOR = 1e-16  # under the root of local reparameterisation: its slope at zero is infinite


def covered(calls: list[LayerCall], estimator: str) -> list[LayerCall]:
    """Return the calls to which an estimator applies exactly."""
    if estimator == LOCAL:
        return [call for call in calls if call.kind == LINEAR and len(call.input_shape) == 2]
    return calls


class PerturbedLayers(TorchFunctionMode):
    """Perturb the outputs of calls whose weights (by id) have the standard deviations `scales`."""

    def __init__(self, estimator: str, scales: dict[int, tuple[Tensor, Tensor | None]]) -> None:
        super().__init__()
        self.estimator = estimator
        self.scales = scales
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Add the perturbation to the calls that are covered; let everything else through."""
        kwargs = kwargs or {}
        if kind_of(func) is None:
            return func(*args, **kwargs)
        x, weight, bias, options = call_parts(func, args, kwargs)
        if id(weight) not in self.scales:
            return func(*args, **kwargs)
        if id(weight) in self.seen:
            raise StfsebError(
                f"a weight of shape {tuple(weight.shape)} is used twice in one forward pass, which "
                f"estimator='{self.estimator}' cannot follow: use estimator='reparameterisation'"
            )
        self.seen.add(id(weight))
        weight_scale, bias_scale = self.scales[id(weight)]
        if self.estimator == LOCAL:
            bias_variance = None if bias_scale is None else bias_scale.square()
            variance = func(x.square(), weight_scale.square(), bias_variance)
            return func(x, weight, bias) + (variance + _FLOOR).sqrt() * torch.randn_like(variance)
        mean = func(x, weight, bias, **options)
        signs_in, signs_out = _signs(x, kind_of(func)), _signs(mean, kind_of(func))
        shift = func(x * signs_in, weight_scale * torch.randn_like(weight_scale), None, **options)
        if bias_scale is not None:
            noise = bias_scale * torch.randn_like(bias_scale)
            shift = shift + (noise if kind_of(func) == LINEAR else noise.view(-1, *(1,) * (shift.ndim - 2)))
        return mean + shift * signs_out


def _signs(like: Tensor, kind: str | None) -> Tensor:
    """Draw one sign per row and channel (the last dimension of a linear call, the second of a convolution)."""
    shape = [1] * like.ndim
    shape[0] = like.shape[0]
    channel = like.ndim - 1 if kind == LINEAR else 1
    shape[channel] = like.shape[channel]
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(0.5).mul_(2).sub_(1)
