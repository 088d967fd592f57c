"""Draw docs/images/cifar10-c.png and mnist-c.png: every corruption type and severity beside the clean image.

python scripts/make_corruption_sheets.py DATA_FOLDER
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import torch
from PIL import Image

from stfseb.data.corruptions import CIFAR10_C, CIFAR10_C_EXTRA, MNIST_C, load
from stfseb.data.readers import read
from stfseb.data.sheet import contact_sheet

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PHOTOGRAPH = 82  # of the CIFAR-10 test set: a car before leaves, where blur, noise and colour all show


def beside(sheets: list[bytes]) -> bytes:
    """Put sheets side by side."""
    parts = [Image.open(io.BytesIO(sheet)) for sheet in sheets]
    whole = Image.new("RGB", (sum(part.width for part in parts), max(part.height for part in parts)), "white")
    left = 0
    for part in parts:
        whole.paste(part, (left, 0))
        left += part.width
    out = io.BytesIO()
    whole.save(out, "PNG", optimize=True)
    return out.getvalue()


def cifar10_c(folder: Path) -> bytes:
    clean = read("cifar10", folder, "test").take(slice(PHOTOGRAPH, PHOTOGRAPH + 1))
    types = CIFAR10_C + CIFAR10_C_EXTRA
    sets = load("cifar10-c", clean, folder, types=types, workers=1)
    half = (len(types) + 1) // 2
    sheets = []
    for kinds, heading, footnote in (
        (types[:half], "CIFAR-10-C, severity 1 to 5", "generated from the clean image"),
        (types[half:], " ", "* published beside the benchmark's 15 types"),
    ):
        tiles = [clean.images if level == 0 else sets[kind, level].images for kind in kinds for level in range(6)]
        names = [kind.replace("_", " ") + (" *" if kind in CIFAR10_C_EXTRA else "") for kind in kinds]
        columns = ["clean", "1", "2", "3", "4", "5"]
        sheets.append(contact_sheet(torch.cat(tiles), len(kinds), 6, names, columns, heading, footnote, scale=3))
    return beside(sheets)


def mnist_c(folder: Path) -> bytes:
    test = read("mnist", folder, "test")
    assert test.labels is not None
    first = torch.stack([(test.labels == digit).nonzero()[0, 0] for digit in range(10)])
    clean = test.take(first)
    sets = load("mnist-c", clean, folder, workers=1)
    tiles = torch.cat([clean.images, *(sets[kind, 0].images for kind in MNIST_C)])
    names = ["clean", *(kind.replace("_", " ") for kind in MNIST_C)]
    return contact_sheet(
        tiles, len(names), 10, names, (), "MNIST-C", "generated from the clean digits in the first row", scale=2
    )


def main() -> None:
    folder = Path(sys.argv[1])
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, draw in (("cifar10-c", cifar10_c), ("mnist-c", mnist_c)):
        sheet = draw(folder)
        (IMAGES / f"{name}.png").write_bytes(sheet)
        print(f"{name}.png: {len(sheet):,} bytes")


if __name__ == "__main__":
    main()
