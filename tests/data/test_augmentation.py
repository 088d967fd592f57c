"""Flip and crop against a loop, distorted copies against turns; their draws and their behaviour on a device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates
from scipy.stats import kstest

from stfseb.data import augmentation
from stfseb.data.augmentation import distorted, flip_and_crop
from stfseb.data.images import ImageSet
from stfseb.errors import StfsebError


def loop(images: torch.Tensor, padding: int, generator: torch.Generator) -> torch.Tensor:
    """The same draws, image by image: pad with zeros, cut out, mirror."""
    count, channels, height, width = images.shape
    flips = torch.rand(count, 1, generator=generator)[:, 0] < 0.5
    tops, lefts = torch.randint(0, 2 * padding + 1, (2, count, 1), generator=generator)[..., 0].tolist()
    out = []
    for image, flip, top, left in zip(images, flips, tops, lefts, strict=True):
        padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=images.dtype)
        padded[:, padding : padding + height, padding : padding + width] = image
        cut = padded[:, top : top + height, left : left + width]
        out.append(cut.flip(2) if flip else cut)
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "padding"), [((40, 3, 32, 32), 4), ((25, 1, 28, 28), 4), ((9, 2, 5, 7), 2), ((3, 1, 4, 4), 0)]
)
def test_equals_a_loop_over_images(dtype, shape, padding):
    images = torch.randint(1, 256, shape, dtype=torch.uint8).to(dtype)
    got = flip_and_crop(images, padding, torch.Generator().manual_seed(3))
    expected = loop(images, padding, torch.Generator().manual_seed(3))
    assert got.dtype == dtype
    assert torch.equal(got, expected)


def test_every_shift_and_both_mirrors_occur_equally_often():
    """On an image of distinct pixels each of the 2 x 9 x 9 outcomes is recognised; chi-squared at 6 sigma."""
    image = torch.arange(1.0, 32 * 32 + 1).view(1, 1, 32, 32)
    count = 16_200
    got = flip_and_crop(image.expand(count, -1, -1, -1), generator=torch.Generator().manual_seed(0))
    centre = got[:, 0, 15, 15].long() - 1
    mirrored = got[:, 0, 15, 16] < got[:, 0, 15, 15]
    row = centre // 32 - 15
    column = torch.where(mirrored, centre % 32 - 16, centre % 32 - 15)
    outcome = mirrored.long() * 81 + (row + 4) * 9 + column + 4
    counts = outcome.bincount(minlength=162).double()
    assert len(counts) == 162
    statistic = ((counts - count / 162) ** 2 / (count / 162)).sum()
    assert abs(float(statistic) - 161) < 6 * (2 * 161) ** 0.5


def test_does_not_change_its_input_and_repeats_with_its_generator():
    images = torch.rand(8, 3, 32, 32)
    before = images.clone()
    one, two = (flip_and_crop(images, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(images, before)
    assert not torch.equal(one, flip_and_crop(images, generator=torch.Generator().manual_seed(6)))


def test_works_on_memory_that_is_not_contiguous():
    images = torch.randint(0, 256, (6, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    got = flip_and_crop(images, generator=torch.Generator().manual_seed(1))
    assert torch.equal(got, flip_and_crop(images.contiguous(), generator=torch.Generator().manual_seed(1)))


def test_bad_input_is_named():
    with pytest.raises(StfsebError, match=r"\(3, 32, 32\)"):
        flip_and_crop(torch.zeros(3, 32, 32))
    with pytest.raises(StfsebError, match="padding -1"):
        flip_and_crop(torch.zeros(1, 3, 32, 32), padding=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_in_a_cuda_graph():
    """A capture fails at any host synchronisation; each replay draws anew."""
    images = torch.randint(0, 256, (128, 3, 32, 32), dtype=torch.uint8, device="cuda")
    flip_and_crop(images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flip_and_crop(images)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)
    assert torch.equal(out.unique(), images.unique())


def test_a_quarter_turn_is_torchs_own(monkeypatch):
    """With the map of a quarter turn and nothing else, a copy is the turned image, pixel by pixel."""
    images = torch.randint(0, 256, (6, 2, 9, 9), dtype=torch.uint8)
    turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]]).double().expand(6, 2, 3)
    monkeypatch.setattr(augmentation, "_affine", lambda count, aspect, generator: turn)
    monkeypatch.setattr(augmentation, "INVERTED", 0.0)
    assert torch.equal(distorted(images), images.rot90(1, (2, 3)))
    monkeypatch.setattr(augmentation, "INVERTED", 1.0)
    assert torch.equal(distorted(images), 255 - images.rot90(1, (2, 3)))


@pytest.mark.parametrize(("height", "width"), [(20, 33), (9, 9), (1, 6)])
def test_copies_are_those_of_scipy(height, width):
    """The same maps in pixels, read between pixels by scipy, its borders mirrored."""
    images = torch.rand(8, 2, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.3
    generator = torch.Generator().manual_seed(5)
    angle, zoom, right, down = (2 * torch.rand(4, 8, generator=generator).double() - 1).numpy()
    inverted = torch.rand(8, 1, 1, 1, generator=generator).flatten().numpy() < 0.25
    assert 0 < inverted.sum() < 8
    y, x = np.mgrid[:height, :width].astype(float)
    y, x = y - (height - 1) / 2, x - (width - 1) / 2
    copies = distorted(images, 1, seed=5).numpy()
    for n, image in enumerate(images.numpy()):
        factor, cos, sin = np.exp(0.5 * zoom[n]), np.cos(np.pi * angle[n]), np.sin(np.pi * angle[n])
        across = factor * (cos * x - sin * y) + 0.125 * width * right[n] + (width - 1) / 2
        along = factor * (sin * x + cos * y) + 0.125 * height * down[n] + (height - 1) / 2
        for channel, pixels in enumerate(image):
            expected = map_coordinates(pixels, [along, across], order=1, mode="reflect")
            if inverted[n]:
                expected = images[:, channel].min().item() + images[:, channel].max().item() - expected
            np.testing.assert_allclose(copies[n, channel], expected, atol=1e-9)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (20, 50)])
def test_maps_turn_zoom_and_shift_whatever_the_shape(height, width):
    """In pixels each map is a turn times one factor: its columns are orthogonal and of one length."""
    maps = augmentation._affine(4000, height / width, torch.Generator().manual_seed(0)).double()
    half = torch.tensor([width, height]).double() / 2
    pixels = half[:, None] * maps[:, :, :2] / half
    products = pixels.mT @ pixels
    zoom = products[:, 0, 0].sqrt()
    assert torch.allclose(products, zoom.square()[:, None, None] * torch.eye(2).double(), atol=1e-5)
    log = zoom.log()
    assert -0.5 <= log.min() < -0.45
    assert 0.45 < log.max() <= 0.5
    angle = torch.atan2(pixels[:, 1, 0], pixels[:, 0, 0])
    assert kstest(angle.numpy(), "uniform", (-math.pi, 2 * math.pi)).pvalue > 1e-3
    shift = maps[:, :, 2] * half / torch.tensor([width, height])
    assert kstest(shift.flatten().numpy(), "uniform", (-0.125, 0.25)).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.bfloat16])
def test_distorted_copies_keep_type_and_range(dtype, monkeypatch):
    monkeypatch.setattr(augmentation, "_AT_ONCE", 10 * 75)  # in parts of ten images
    images = torch.randint(0, 256, (64, 3, 5, 5), dtype=torch.uint8)
    images = images if dtype == torch.uint8 else ((images.double() - 100) / 50).to(dtype)
    before = images.clone()
    copies = distorted(images, 3, seed=4)
    assert torch.equal(images, before)
    assert copies.shape == (192, 3, 5, 5)
    assert copies.dtype == dtype
    step = 0.02 if dtype == torch.bfloat16 else 1e-5
    assert copies.double().min() >= images.double().min() - step
    assert copies.double().max() <= images.double().max() + step
    assert torch.equal(copies, distorted(images, 3, seed=4))
    assert not torch.equal(copies, distorted(images, 3, seed=5))
    assert not torch.equal(copies[:64], copies[64:128])
    monkeypatch.setattr(augmentation, "_AT_ONCE", 2**20)
    assert torch.equal(copies, distorted(images, 3, seed=4))


def test_one_copy_in_four_is_inverted():
    """Of all-black images the white copies are the inverted ones: binomial at 5 sigma."""
    copies = distorted(torch.zeros(4000, 1, 4, 4, dtype=torch.uint8), 2)
    white = (copies == 255).all(dim=(1, 2, 3))
    assert torch.equal(white, ~(copies == 0).all(dim=(1, 2, 3)))
    assert abs(white.sum() - 2000) < 5 * (8000 * 0.25 * 0.75) ** 0.5


def test_what_cannot_be_distorted_is_said():
    with pytest.raises(StfsebError, match=r"images \(N, C, H, W\), not a tensor of shape \(5, 4\)"):
        distorted(torch.zeros(5, 4))
    for copies in (-1, 1.5, True, "2"):
        with pytest.raises(StfsebError, match=f"copies={copies}: must be a whole number of at least 0"):
            distorted(torch.zeros(5, 1, 4, 4), copies)
    with pytest.raises(StfsebError, match=r"images has dtype torch\.int64"):
        distorted(torch.zeros(5, 1, 4, 4, dtype=torch.int64))
    with pytest.raises(StfsebError, match="images has NaN or infinite values in 1 rows"):
        distorted(torch.zeros(5, 1, 4, 4).index_fill(0, torch.tensor(2), math.nan))
    with pytest.raises(StfsebError, match="each example must have a value"):
        distorted(torch.zeros(5, 1, 0, 4))
    pictures = torch.randint(0, 256, (5, 1, 4, 4), dtype=torch.uint8)
    for same in (pictures.numpy(), ImageSet("own", pictures)):
        assert torch.equal(distorted(same, 2), distorted(pictures, 2))
    assert distorted(torch.zeros(5, 1, 4, 4), 0).shape == (0, 1, 4, 4)
    assert distorted(torch.zeros(0, 1, 4, 4), 2).shape == (0, 1, 4, 4)
