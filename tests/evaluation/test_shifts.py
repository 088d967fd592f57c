"""Rotation against scikit-image, exact quarter turns, and its speed."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from scipy import ndimage
from skimage.transform import rotate as reference

from stfseb.errors import StfsebError
from stfseb.evaluation.shifts import ANGLES, rotate


def digits(count: int = 3, channels: int = 1, height: int = 28, width: int = 28) -> torch.Tensor:
    """Blurred noise: as smooth as photographs, not symmetric in any way."""
    noise = np.random.default_rng(0).random((count, channels, height, width))
    return torch.from_numpy(ndimage.gaussian_filter(noise, (0, 0, 1.5, 1.5)))


def test_angles():
    assert ANGLES == (-30, -25, -20, -15, -10, -5, 0, 5, 10, 15, 20, 25, 30)


@pytest.mark.parametrize("degrees", [*ANGLES, 77.7, 180, -123])
@pytest.mark.parametrize(("height", "width"), [(28, 28), (32, 32), (20, 31)])
def test_equals_scikit_image(degrees, height, width):
    images = digits(2, 3, height, width)
    got = rotate(images, degrees)
    for image, turned in zip(images, got, strict=True):
        for plane, result in zip(image, turned, strict=True):
            expected = reference(plane.numpy(), degrees, order=1, mode="constant", cval=0)
            np.testing.assert_allclose(result.numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_quarter_turns_are_exact(turns):
    images = torch.randint(0, 256, (4, 3, 28, 28), dtype=torch.uint8)
    assert torch.equal(rotate(images, 90 * turns), images.rot90(turns, (2, 3)))


def test_positive_angles_turn_counter_clockwise():
    """A bright spot on the right moves up."""
    images = torch.zeros(1, 1, 29, 29)
    images[0, 0, 14, 24] = 1
    row, column = divmod(int(rotate(images, 30).argmax()), 29)
    assert (row, column) == (9, 23)


def test_uint8_is_the_float_result_rounded():
    images = (digits(5, 3, 32, 32) * 255).to(torch.uint8)
    expected = (rotate(images.double() / 255, 25) * 255).round()
    difference = (rotate(images, 25).double() - expected).abs()
    assert difference.max() <= 1
    assert (difference > 0).double().mean() < 1e-3, "float32 may round a half the other way, rarely"
    assert torch.equal(rotate(images, 0), images)


def test_zeros_outside_and_parts_of_a_large_set():
    images = torch.ones(5000, 1, 8, 8)
    got = rotate(images, 30)
    assert got[0, 0, 0, 0] == 0
    assert torch.equal(got[0], got[-1])
    assert torch.equal(rotate(images[:0], 30), images[:0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_ten_thousand_images_in_a_second(dtype):
    images = torch.zeros(10_000, 1, 28, 28, dtype=dtype)

    def seconds():
        start = time.perf_counter()
        rotate(images, 10)
        return time.perf_counter() - start

    assert any(seconds() < 1 for _ in range(10))  # a fifth of that on an idle machine; others may share it


def test_bad_input_is_named():
    with pytest.raises(StfsebError, match=r"\(28, 28\)"):
        rotate(torch.zeros(28, 28), 5)
    with pytest.raises(StfsebError, match="nan"):
        rotate(torch.zeros(1, 1, 28, 28), float("nan"))
    with pytest.raises(StfsebError, match="int64"):
        rotate(torch.zeros(1, 1, 28, 28, dtype=torch.int64), 5)
