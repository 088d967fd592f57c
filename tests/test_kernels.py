"""Kernels against scikit-learn's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import kernels as sk

from stfseb.errors import StfsebError
from stfseb.kernels import RBF, FeatureKernel, Matern


@pytest.fixture
def points() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(30, 3, dtype=torch.float64, generator=generator)
    y[0] = x[0]  # a pair at distance zero
    return x, y


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5, math.inf])
@pytest.mark.parametrize("length_scale", [0.7, [0.5, 1.0, 3.0]])
def test_stationary_kernels_equal_scikit_learns(
    points: tuple[torch.Tensor, torch.Tensor], smoothness: float, length_scale: float | list[float]
) -> None:
    x, y = points
    scale = length_scale if isinstance(length_scale, float) else torch.tensor(length_scale, dtype=torch.float64)
    ours = RBF(scale, 1.7) if math.isinf(smoothness) else Matern(smoothness, scale, 1.7)
    theirs = 1.7 * sk.Matern(length_scale, nu=smoothness)(x.numpy(), y.numpy())
    np.testing.assert_allclose(ours(x, y).numpy(), theirs, rtol=1e-12, atol=1e-14)


def test_feature_kernel_and_image_inputs() -> None:
    images = torch.rand(5, 1, 4, 4, dtype=torch.float64)
    flat = images.flatten(1)
    torch.testing.assert_close(RBF(2.0)(images, images), RBF(2.0)(flat, flat))
    weight = torch.randn(16, 7, dtype=torch.float64)
    kernel = FeatureKernel(lambda x: x.flatten(1) @ weight, tau1=0.3)
    torch.testing.assert_close(kernel(images, images[:2]), 0.3 * flat @ weight @ weight.T @ flat[:2].T)
    line = torch.linspace(0, 1, 4, dtype=torch.float64)
    torch.testing.assert_close(Matern(1.5)(line, line), Matern(1.5)(line[:, None], line[:, None]))


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5, math.inf])
def test_hyperparameters_have_gradients_even_at_distance_zero(smoothness: float) -> None:
    x = torch.tensor([[0.0], [0.0], [1.3]], dtype=torch.float64)
    scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    variance = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)

    def matrix(s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return RBF(s, v)(x, x) if math.isinf(smoothness) else Matern(smoothness, s, v)(x, x)

    assert torch.autograd.gradcheck(matrix, (scale, variance))


def test_bad_settings_are_named() -> None:
    with pytest.raises(StfsebError, match=r"smoothness = 2 .*0\.5, 1\.5 or 2\.5"):
        Matern(2.0)
    with pytest.raises(StfsebError, match=r"length_scale = -1"):
        RBF(-1.0)
    with pytest.raises(StfsebError, match=r"variance = 0"):
        Matern(0.5, 1.0, 0.0)
    with pytest.raises(StfsebError, match=r"tau1 = 0"):
        FeatureKernel(lambda x: x, 0.0)
