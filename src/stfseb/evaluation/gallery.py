"""Small pictures of the images a summary names, to lie beside the numbers in a record."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from stfseb.data.images import ImageSet


def gallery(
    summary: Mapping[str, Any], test: ImageSet, ood: Mapping[str, ImageSet] | None = None
) -> dict[str, dict[str, list[dict[str, str]]]]:
    """Return the extreme images of `summary` as PNG data addresses with captions.

    `{"test": {"most": [{"src", "caption"}, ...], "least": [...]}, "ood/NAME": {"most": [...]}}`; the names of
    the classes are those of `test`.
    """
    extremes = summary["extremes"]
    found = {"test": {kind: _pictures(rows, test, test.classes) for kind, rows in extremes["test"].items()}}
    for name, kinds in extremes["ood"].items():
        if ood is not None and name in ood:
            found[f"ood/{name}"] = {k: _pictures(r, ood[name], test.classes) for k, r in kinds.items()}
    return found


def data_uri(image: Tensor) -> str:
    """Return one uint8 image (C, H, W), grey or colour, as a PNG data address."""
    from PIL import Image

    channels = len(image)
    if channels not in (1, 3):
        raise StfsebError(f"an image of {channels} channels cannot be shown; 1 (grey) or 3 (colour) can")
    pixels = image.detach().cpu().permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _pictures(rows: Sequence[Mapping[str, Any]], images: ImageSet, classes: Sequence[str]) -> list[dict[str, str]]:
    return [{"src": data_uri(images.images[row["index"]]), "caption": _caption(row, classes)} for row in rows]


def _caption(row: Mapping[str, Any], classes: Sequence[str]) -> str:
    """Say what the network takes the image for, how sure it is, and what it is when that differs."""

    def name(index: int) -> str:
        return classes[index] if index < len(classes) else f"class {index}"

    # A space that does not break keeps the sign at its number.
    said = f"{name(row['prediction'])}, {100 * row['confidence']:.1f}\N{NO-BREAK SPACE}%"
    if row.get("label", row["prediction"]) == row["prediction"]:
        return said
    return f"{said} (is {name(row['label'])})"
