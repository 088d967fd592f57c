"""Contact sheets: many small images on one PNG, with names for the rows and the columns."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

GAP = 2  # pixels between images
MARGIN = 16
TEXT = 13  # height of the letters in pixels
INK, PAPER, QUIET = (34, 34, 34), (255, 255, 255), (120, 120, 120)


def contact_sheet(
    images: Tensor,
    rows: int,
    columns: int,
    titles: Sequence[str] = (),
    column_titles: Sequence[str] = (),
    heading: str = "",
    footnote: str = "",
    scale: int | None = None,
) -> bytes:
    """Return a PNG with up to rows x columns images, filled row by row.

    `images` is uint8 (N, C, H, W); `titles` name the rows at the left, `column_titles` the columns above.
    Small images are enlarged by a whole factor without smoothing, so that every pixel can be seen.
    """
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    if rows < 1 or columns < 1 or not len(images):
        raise StfsebError(f"a contact sheet of {rows} x {columns} with {len(images)} images would be empty")
    height, width = int(images.shape[2]), int(images.shape[3])
    factor = scale or max(1, round(56 / max(height, width)))
    cell = (width * factor + GAP, height * factor + GAP)
    font, small, large = (ImageFont.load_default(size) for size in (TEXT, TEXT - 2, TEXT + 5))
    left = MARGIN + (round(max(font.getlength(title) for title in titles)) + 10 if titles else 0)
    top = MARGIN + (TEXT + 18 if heading else 0) + (TEXT + 8 if column_titles else 0)
    bottom = MARGIN + (TEXT + 8 if footnote else 0)
    across = left + columns * cell[0] + MARGIN
    for text, face in ((heading, large), (footnote, small)):
        across = max(across, MARGIN * 2 + round(face.getlength(text)))
    sheet = Image.new("RGB", (across, top + rows * cell[1] + bottom), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN - 4), heading, INK, large)
    draw.text((MARGIN, sheet.height - MARGIN - TEXT + 4), footnote, QUIET, small)
    for row, title in enumerate(titles[:rows]):
        draw.text((left - 8, top + row * cell[1] + cell[1] // 2), title, INK, font, anchor="rm")
    for column, title in enumerate(column_titles[:columns]):
        draw.text((left + column * cell[0] + cell[0] // 2, top - 6), title, INK, font, anchor="ms")
    for index, image in enumerate(images[: rows * columns]):
        array = np.ascontiguousarray(image.permute(1, 2, 0).cpu().numpy())
        tile = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).convert("RGB")
        place = (left + index % columns * cell[0], top + index // columns * cell[1])
        sheet.paste(tile.resize((width * factor, height * factor), Image.Resampling.NEAREST), place)
    out = io.BytesIO()
    sheet.save(out, "PNG", optimize=True)
    return out.getvalue()
