"""MNIST-C recipes: the deterministic ones exact against independent computations, the others by their draws."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import ndimage
from skimage.transform import AffineTransform, warp

from stfseb.data.corruptions import MNIST_C, digits
from stfseb.data.corruptions.recipes import corrupted


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Strokes like those of digits: thick random curves with soft edges, (12, 28, 28)."""
    out = np.zeros((12, 28, 28))
    draws = rng(7)
    for image in out:
        at, heading = draws.uniform(9, 18, 2), draws.uniform(0, 2 * np.pi)
        for _ in range(40):
            heading += draws.normal(0, 0.4)
            at = np.clip(at + 0.8 * np.array([np.sin(heading), np.cos(heading)]), 5, 22)
            image[tuple(np.rint(at).astype(int))] = 1
    thick = ndimage.gaussian_filter(out, (0, 1.0, 1.0))
    return np.clip(255 * 4 * thick, 0, 255).astype(np.uint8)


def test_brightness_value_by_value():
    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    got = digits.brightness(levels, rng()).ravel()
    for level, result in enumerate(got.tolist()):
        assert result == round(min(level / 255 + 0.5, 1.0) * 255)  # Python's round is half to even, like numpy's


def test_stripe_column_by_column(images):
    got = digits.stripe(images, rng())
    for column in range(28):
        inverted = column in {0, 1, 2, 3, 4, 5, 6, 21, 22, 23, 24, 25, 26, 27}
        expected = 255 - images[:, :, column] if inverted else images[:, :, column]
        np.testing.assert_array_equal(got[:, :, column], expected)


def test_scale_in_exact_fractions(images):
    """Zoom out by 10/7 about 13.5, bilinear with zeros outside, in rational arithmetic."""
    got = digits.scale(images[:3], rng())
    reach = [Fraction(27, 2) + (Fraction(place) - Fraction(27, 2)) * Fraction(10, 7) for place in range(28)]
    for image, result in zip(images[:3].tolist(), got.tolist(), strict=True):
        for y in range(28):
            for x in range(28):
                top, left = math.floor(reach[y]), math.floor(reach[x])
                total = Fraction(0)
                for row, down in ((top, 1 - (reach[y] - top)), (top + 1, reach[y] - top)):
                    for column, right in ((left, 1 - (reach[x] - left)), (left + 1, reach[x] - left)):
                        if 0 <= row < 28 and 0 <= column < 28:
                            total += down * right * image[row][column]
                assert abs(result[y][x] - total) <= Fraction(1, 2)  # an exact half may go either way


def canny(image: np.ndarray) -> np.ndarray:
    """Canny's detector written out: sigma 1, thresholds 0.1 and 0.2, borders renormalised and never edges."""
    reach = np.arange(-4, 5)
    weights = np.exp(-(reach**2) / 2)
    weights /= weights.sum()

    def smooth(plane):
        padded = np.pad(plane, 4)
        down = sum(w * padded[i : i + 28, :] for i, w in enumerate(weights))
        return sum(w * down[:, i : i + 28] for i, w in enumerate(weights))

    eps = np.finfo(float).eps
    padded = np.pad(smooth(image) / (smooth(np.ones((28, 28))) + eps), 1, mode="symmetric")
    part = {(a, b): padded[1 + a : 29 + a, 1 + b : 29 + b] for a in (-1, 0, 1) for b in (-1, 0, 1)}
    gy = sum(w * (part[1, b] - part[-1, b]) for b, w in ((-1, 1), (0, 2), (1, 1)))
    gx = sum(w * (part[a, 1] - part[a, -1]) for a, w in ((-1, 1), (0, 2), (1, 1)))
    size = np.hypot(gx, gy)
    thin = np.zeros((28, 28))
    for y in range(1, 27):
        for x in range(1, 27):
            here, dx, dy = size[y, x], gx[y, x], gy[y, x]
            if here < 0.1:
                continue
            one, two = (1, 0) if abs(dy) >= abs(dx) else (0, 1)  # the nearest axis, and the nearest diagonal
            slope = min(abs(dx), abs(dy)) / max(abs(dx), abs(dy))
            sy, sx = (1 if dy >= 0 else -1), (1 if dx >= 0 else -1)
            sides = []
            for sign in (1, -1):
                straight = size[y + sign * sy * one, x + sign * sx * two]
                slanted = size[y + sign * sy, x + sign * sx]
                sides.append(straight + slope * (slanted - straight))
            if max(sides) <= here:
                thin[y, x] = here
    labels, _ = ndimage.label(thin > 0, np.ones((3, 3)))
    strong = set(labels[thin >= 0.2].tolist())
    return np.isin(labels, list(strong)) & (thin > 0)


def test_canny_edges_written_out(images):
    got = digits.canny_edges(images, rng())
    assert 0.01 < (got == 255).mean() < 0.5
    for image, result in zip(images, got, strict=True):
        np.testing.assert_array_equal(result, np.where(canny(image / 255), 255, 0))


def test_only_four_types_are_deterministic(images):
    same = {
        kind
        for kind in MNIST_C
        if np.array_equal(*(corrupted(images[:, None], "mnist-c", kind, 0, seed) for seed in (1, 2)))
    }
    assert same == {"brightness", "stripe", "canny_edges", "scale"}


@pytest.mark.parametrize("kind", ["shear", "rotate"])
def test_signed_warps_are_one_of_two(images, kind):
    got = getattr(digits, kind)(images, rng())
    chosen = []
    for image, result in zip(images, got, strict=True):
        matches = []
        for c in (0.4, -0.4):
            a = [[1, -math.sin(c)], [0, math.cos(c)]]  # shear as scikit-image built it up to 0.20
            if kind == "rotate":
                a = [[math.cos(c), -math.sin(c)], [math.sin(c), math.cos(c)]]
            # scipy works in (row, column): the matrix turned round, about the centre
            matrix = np.array(a)[::-1, ::-1]
            expected = ndimage.affine_transform(
                np.pad(image / 255.0, 30), matrix, 43.5 - matrix @ [43.5, 43.5], order=1
            )[30:58, 30:58]
            matches.append(np.abs(result - 255 * expected).max() < 0.51)
        assert sum(matches) == 1
        chosen.append(matches.index(True))
    assert set(chosen) == {0, 1}


def test_translate_equals_a_warp_by_whole_pixels(images):
    got = digits.translate(images, rng())
    seen = set()
    for image, result in zip(images, got, strict=True):
        for x in (-3, 3):
            for y in (-3, 3):
                moved = warp(image / 255, AffineTransform(translation=(x, y)), order=1)
                if np.array_equal(result, np.rint(255 * moved)):
                    seen.add((x, y))
                    break
            else:
                continue
            break
        else:
            pytest.fail("not a shift by three pixels on each axis")
    assert len(seen) > 2


def test_noises():
    half = np.full((50, 28, 28), 85, np.uint8)
    shot = digits.shot_noise(half, rng())
    counts = np.rint(shot / 85.0)
    assert set(np.unique(shot)) == {0, 85, 170, 255}
    assert (counts == 0).mean() == pytest.approx(math.exp(-1), abs=0.015)  # Poisson(3 x 1/3)
    impulse = digits.impulse_noise(half, rng())
    assert (impulse == 0).mean() == pytest.approx(0.085, abs=0.009)
    assert (impulse == 255).mean() == pytest.approx(0.085, abs=0.009)


def test_glass_blur_exchanges_one_by_one(images):
    got = digits.glass_blur(images[:2], rng(3))
    draws = rng(3)
    x = (ndimage.gaussian_filter1d(images[:2] / 255, 0.7, axis=1, mode="nearest") * 255).astype(np.uint8).tolist()
    for _ in range(2):
        for h in range(27, 1, -1):
            for w in range(27, 1, -1):
                (dy, dx), swap = draws.integers(-1, 1, (2, 2)), draws.integers(0, 2, 2)
                for n in range(2):
                    if swap[n]:
                        a, b = h + dy[n], w + dx[n]
                        x[n][h][w], x[n][a][b] = x[n][a][b], x[n][h][w]
    expected = ndimage.gaussian_filter1d(np.array(x) / 255, 0.7, axis=1, mode="nearest")
    np.testing.assert_array_equal(got, np.rint(255 * expected))


def test_dotted_line_profile_and_gaps():
    black = np.zeros((30, 28, 28), np.uint8)
    got = digits.dotted_line(black, rng(1)) / 255
    starts, ends = rng(1).integers(0, 27, (2, 30))
    for image, start, end in zip(got, starts, ends, strict=True):
        for column in range(28):
            row = start + (end - start) * column / 27
            for y in range(28):
                d = abs(y - row)
                value = 1 + math.log(1 - d / 2.3) if d < 2.3 else 0
                expected = max(0, value) if column % 4 < 2 else 0
                assert image[y, column] == pytest.approx(expected, abs=0.5 / 255 + 1e-9)


def test_zigzag_stays_in_its_columns_and_has_six_teeth():
    black = np.zeros((40, 28, 28), np.uint8)
    got = digits.zigzag(black, rng(2)).astype(float)
    draws = rng(2)
    starts, slopes = draws.integers(0, 27, 40), draws.integers(-5, 5, 40)
    assert not got[:, :, :1].any()
    assert not got[:, :, 27:].any()
    level = [n for n in range(40) if slopes[n] == 0 and 5 <= starts[n] <= 22]
    assert level
    for n in level:
        path = [np.average(np.arange(28), weights=got[n][:, column] ** 4) - starts[n] for column in range(2, 26)]
        # tips at 2, 6, 10, ... columns from the start, in turn two rows below and two above the line
        tips = [path[place] for place in (2, 6, 10, 14, 18, 22)]
        assert np.sign(tips).tolist() == [1, -1, 1, -1, 1, -1]
        assert np.abs(tips).min() > 1


def test_fog_and_spatter(images):
    fog = digits.fog(images, rng())
    assert fog.shape == images.shape
    assert fog.mean() > images.mean() + 30
    mud = digits.spatter(np.full((20, 28, 28), 255, np.uint8), rng())
    assert mud.min() == pytest.approx(63, abs=3)
    assert 0.3 < (mud == 255).mean() < 0.98
