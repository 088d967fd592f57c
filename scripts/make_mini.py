"""Make the arrays of the embedded task `mini` from the published files of three data sets.

    python scripts/make_mini.py [DATA_FOLDER] [--out FOLDER]

DATA_FOLDER holds `fashion-mnist/`, `kmnist/` and `mnist/` under their publishers' file names (default: what
STFSEB_DATA names). Everything is seeded. The letters are drawn by FreeType, whose antialiasing may differ by a
grey level between versions: what counts is the file in the package, whose fingerprints the tests know.
"""

from __future__ import annotations

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

Array = NDArray[np.uint8]

SEED = 20261115
LETTERS = "ABCDEFGHIJ"
FONTS = [
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta",
    "cmr10", "cmb10", "cmss10", "cmti10", "cmtt10", "cmmi10",
]  # fmt: skip
SCALE = 8  # letters are drawn eight times too large and reduced, so that slant and weight stay smooth


def idx(path: Path, header: int) -> Array:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)[header:]


def published(folder: Path, split: str) -> tuple[Array, Array]:
    images = idx(folder / f"{split}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    return images, idx(folder / f"{split}-labels-idx1-ubyte.gz", 8)


def balanced(
    images: Array, labels: Array, counts: list[int], rng: np.random.Generator, seen: set[bytes]
) -> list[tuple[Array, Array]]:
    """Draw disjoint class-balanced parts, in random order, without any image twice."""
    parts: list[list[int]] = [[] for _ in counts]
    for label in range(10):
        pool = iter(rng.permutation(np.flatnonzero(labels == label)))
        for part, count in zip(parts, counts, strict=True):
            need = count // 10
            while need:
                row = int(next(pool))
                if (pixels := images[row].tobytes()) not in seen:
                    seen.add(pixels)
                    part.append(row)
                    need -= 1
    orders = [rng.permutation(part) for part in parts]
    return [(images[order], labels[order]) for order in orders]


def glyph(letter: str, font: str, folder: Path, rng: np.random.Generator) -> Array:
    """Draw one letter, white on black, at a random size, place, slant and weight."""
    side = 28 * SCALE
    face = ImageFont.truetype(str(folder / f"{font}.ttf"), round(rng.uniform(20, 27) * SCALE))
    sheet = Image.new("L", (side, side))
    ImageDraw.Draw(sheet).text((side / 2, side / 2), letter, fill=255, font=face, anchor="mm")
    weight = int(rng.integers(-1, 4))  # thinner by a little, or bolder by up to three eighths of a pixel a side
    if weight > 0:
        sheet = sheet.filter(ImageFilter.MaxFilter(2 * weight + 1))
    elif weight < 0:
        sheet = sheet.filter(ImageFilter.MinFilter(3))
    box = sheet.getbbox()
    assert box is not None
    # Centre the ink, then slant about the centre.
    sheet = ImageChops.offset(sheet, (side - box[0] - box[2]) // 2, (side - box[1] - box[3]) // 2)
    slant = rng.uniform(-0.22, 0.22)
    sheet = sheet.transform(
        (side, side), Image.Transform.AFFINE, (1, slant, -slant * side / 2, 0, 1, 0), Image.Resampling.BICUBIC
    )
    left, top, right, bottom = sheet.getbbox() or (0, 0, side, side)
    across = min(left, side - right, 2 * SCALE)
    along = min(top, side - bottom, 2 * SCALE)
    sheet = ImageChops.offset(sheet, int(rng.integers(-across, across + 1)), int(rng.integers(-along, along + 1)))
    return np.asarray(sheet.resize((28, 28), Image.Resampling.BOX))


def glyphs(count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    import matplotlib as mpl

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    labels = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), count // 10))
    seen: set[bytes] = set()
    images = []
    for label in labels:
        while True:
            image = glyph(LETTERS[label], FONTS[rng.integers(len(FONTS))], folder, rng)
            if image.tobytes() not in seen:
                break
        seen.add(image.tobytes())
        images.append(image)
    return np.stack(images), labels


def make(folder: Path) -> dict[str, Array]:
    rng = np.random.default_rng(SEED)
    seen: set[bytes] = set()
    fashion = folder / "fashion-mnist"
    train, validation = balanced(*published(fashion, "train"), [4000, 1000], rng, seen)
    (test,) = balanced(*published(fashion, "t10k"), [2000], rng, seen)
    (kmnist,) = balanced(*published(folder / "kmnist", "t10k"), [2000], rng, set())
    (mnist,) = balanced(*published(folder / "mnist", "t10k"), [2000], rng, set())
    parts = {
        "train": train, "validation": validation, "test": test,
        "kmnist": kmnist, "mnist": mnist, "glyphs": glyphs(2000, rng),
    }  # fmt: skip
    arrays = {}
    for name, (images, labels) in parts.items():
        arrays[f"{name}_images"], arrays[f"{name}_labels"] = images, labels.astype(np.uint8)
    return arrays


def main() -> None:
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default=os.environ.get("STFSEB_DATA"), type=Path)
    parser.add_argument("--out", default=here / "src/stfseb/data/embedded", type=Path)
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("name the data folder, or set STFSEB_DATA")
    target = arguments.out / "mini.npz"
    temporary = target.with_suffix(".tmp.npz")
    np.savez_compressed(temporary, **make(arguments.data))
    temporary.replace(target)
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
