"""How the figures look, in one place: colours, type, and saving for screen, page and paper.

Colours are Okabe and Ito's, which people with any common colour vision tell apart; every method keeps its
colour and marker in all figures, and markers differ, so that print in grey works too.
"""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stfseb.report.records import plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1c2733", "#65717f", "#dde3ea", "#ffffff"
FAMILIAR = "#8a97a6"
UNFAMILIAR = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

_METHODS = {
    "stfseb": ("#d55e00", "*"),
    "fseb": ("#0072b2", "o"),
    "gfsvi": ("#009e73", "s"),
    "mcdropout": ("#56b4e9", "D"),
    "mfvi": ("#cc79a7", "^"),
    "map": ("#8a97a6", "v"),
}
# Of lines that may run along one another: each is seen in the gaps of those above it.
_LINES: dict[str, Any] = {
    "gfsvi": (0, (6, 2)),
    "mcdropout": (0, (3, 1.5)),
    "mfvi": (0, (5, 1.5, 1, 1.5)),
    "map": (0, (1, 1.2)),
}
_SPARE = (("#e69f00", "P"), ("#7a5195", "X"), ("#b8a400", "h"), ("#3a6b35", "p"))

_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.6,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "text.parse_math": False,  # names of sets and methods are not formulas
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's type
    "svg.hashsalt": "stfseb",
    "pdf.fonttype": 42,
}


def look(method: str, place: int = 0) -> dict[str, Any]:
    """Return colour, marker and emphasis of a method; `place` picks among spare looks for unknown ones."""
    key = plain(method)
    colour, marker = _METHODS.get(key) or _SPARE[place % len(_SPARE)]
    ours = key == "stfseb"
    return {"color": colour, "marker": marker, "line": _LINES.get(key, "-"), "ours": ours, "zorder": 5 if ours else 3}


def plain_ticks(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2 and 5 times powers of ten, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())  # which would write over each other


def short_name(text: str) -> str:
    """Shorten a name to what a figure can hold; a leading underscore would hide it from legends."""
    text = " ".join(text.split()).lstrip("_") or text
    if len(text) > 28 and text.endswith(")"):
        text = text.partition(" (")[0]  # what is in brackets stands in the table
    return text if len(text) <= 28 else text[:27] + "…"


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside with the project's style, without touching the caller's matplotlib settings."""
    import matplotlib as mpl

    with mpl.rc_context(_RC):
        yield


def rendered(figure: Figure, kind: str, description: str = "") -> bytes:
    """Return the figure as 'png' (for screens), 'pdf' or 'svg' (for papers), the same bytes every time.

    A PNG carries the `description`, if there is one, in its metadata.
    """
    buffer = io.BytesIO()
    said = {"Description": description} if description else {}
    dates: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": said}
    with styled():
        figure.savefig(buffer, format=kind, dpi=160, metadata=dates[kind])
    return buffer.getvalue()


def inline_svg(figure: Figure, label: str, name: str) -> str:
    """Return the figure as SVG for a page, its greys left to the page's light or dark colours.

    `name` makes the ids inside unique on the page; `label` is read aloud in place of the drawing.
    """
    from markupsafe import escape

    with styled():
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in ((INK, "ink"), (MUTED, "muted"), (GRID, "grid"), (PAPER, "paper")):
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    opening, rest = text.split(">", 1)
    # The drawing shrinks with the page and grows no further than where its type is as large as the page's.
    widest = round(figure.get_figwidth() * 72 * 1.4)
    kept = [part for part in opening.split() if not part.startswith(("width=", "height=", "xmlns"))]
    return f'{" ".join(kept)} style="max-width: {widest}px" role="img" aria-label="{escape(label)}">{rest}'
