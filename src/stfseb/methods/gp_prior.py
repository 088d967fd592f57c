"""The Gaussian process prior of GFSVI: zero mean, independent classes, one stationary kernel on pixels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import vmap

from stfseb.distributions import workplace
from stfseb.errors import StfsebError, unknown
from stfseb.kernels import RBF, Kernel, Matern
from stfseb.methods.kernel_fit import SMOOTHNESS
from stfseb.methods.settings import check_positive

if TYPE_CHECKING:
    from stfseb.methods.kernel_fit import FittedKernel


class GPPrior(nn.Module):
    """A kernel on flattened images; its hyper-parameters are buffers, so that a saved model keeps them.

    gpytorch fits the kernel (`kernel_fit`); in a training step the library's own kernels, which are the same
    functions, evaluate it without waiting for the device.
    """

    length_scale: Tensor
    variance: Tensor

    def __init__(self, kernel: str) -> None:
        super().__init__()
        if kernel not in SMOOTHNESS:
            raise unknown("kernel", str(kernel), SMOOTHNESS)
        self.kernel = kernel
        self.register_buffer("length_scale", torch.tensor(math.nan, dtype=torch.float64))
        self.register_buffer("variance", torch.tensor(math.nan, dtype=torch.float64))
        self.by_hand = False
        self._known = False

    def set(self, length_scale: float, variance: float) -> None:
        """Fix the hyper-parameters; no fit changes them from then on."""
        check_positive(length_scale=length_scale, variance=variance)
        self._fill(length_scale, variance)
        self.by_hand = True

    def take(self, fitted: FittedKernel) -> None:
        """Take the hyper-parameters of a fit."""
        self._fill(fitted.length_scale, fitted.variance)
        self.by_hand = False

    def covariance(self, x: Tensor) -> Tensor:
        """Return K (N, N) in float64 for N inputs of any shape, in the network's scale."""
        kernel, pixels = self._ready(x)
        return kernel(pixels, pixels)

    def covariances(self, sets: Tensor) -> Tensor:
        """Return K (k, N, N) in float64 for k sets of N flattened inputs, (k, N, D)."""
        kernel, pixels = self._ready(sets)
        found: Tensor = vmap(kernel)(pixels, pixels)
        return found

    def _fill(self, length_scale: float, variance: float) -> None:
        self.length_scale.fill_(length_scale)
        self.variance.fill_(variance)

    def _ready(self, x: Tensor) -> tuple[Kernel, Tensor]:
        """Return the kernel, and the inputs where and as exactly as it is evaluated."""
        if not self._known:  # looked at once: reading a value on a card waits for it
            if not math.isfinite(float(self.length_scale)):
                raise StfsebError("the kernel has not been fitted: call prepare(x, y) before training (`fit` does)")
            self._known = True
        place = workplace(x)
        length_scale, variance = (v.to(place, torch.float64) for v in (self.length_scale, self.variance))
        smoothness = SMOOTHNESS[self.kernel]
        kernel: Kernel = RBF(length_scale, variance)
        if math.isfinite(smoothness):
            kernel = Matern(smoothness, length_scale, variance)
        return kernel, x.detach().to(place, torch.float64)
