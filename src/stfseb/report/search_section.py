"""The part of the page that shows searches: what the rules chose, and the trials that they chose from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stfseb.experiments.paper.plan import label_of
from stfseb.report.paper_section import grid_files
from stfseb.report.results_words import code_words
from stfseb.report.search import ranks_in_words, search_figure, search_in_words
from stfseb.report.searches import in_order, kind_in_words, search_command, search_grid, task_of, trials_in_words
from stfseb.report.style import inline_svg, rendered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stfseb.report.reading import Searches


def search_section(searches: Searches, files: dict[Path, bytes]) -> dict[str, Any] | None:
    """Return the table and the plots for the page, and add their files; None where there is no search."""
    from markupsafe import Markup

    if not searches:
        return None
    found = in_order(searches.found)
    grid = search_grid(found)
    lines = [f"{name}: {_by_now(*searches.ahead[name])}" for name in searches.ahead]
    table = None
    if grid is not None:
        grid_files(grid, files)
        made = {str(search["study"]) for search in found}
        notes = [note for note in grid.notes if note.partition(":")[0] not in made]
        table = {"html": Markup(grid.to_html()), "notes": notes, "file": f"tables/{grid.name}.json"}
    return {
        "table": table,
        "ahead": lines,
        "finals": any(search["plan"].get("shortlist") is not None for search in found),
        "plots": [plot for search in found if (plot := _plot(search, files)) is not None],
        "studies": [_about(search) for search in found],
    }


def _by_now(finished: int, asked: int, written: int) -> str:
    words = f"{finished} of {asked} trials are finished by now"
    if not written:
        return f"{words}; nothing is chosen until a worker ends"
    return f"{words}; shown are the {written} of when a worker last ended"


def _plot(search: Mapping[str, Any], files: dict[Path, bytes]) -> dict[str, Any] | None:
    from markupsafe import Markup

    lines = (f"{task_of(search)}, {label_of(search['plan']['method'])}", kind_in_words(search))
    title, figure = ", ".join(lines), search_figure(dict(search), small=True, title="\n".join(lines))
    if figure is None:
        return None
    name = "search-" + re.sub(r"[^A-Za-z0-9_-]", "-", str(search["study"]))
    for kind in ("png", "pdf"):
        files[Path("plots") / f"{name}.{kind}"] = rendered(figure, kind)
    words = f"Trials of a search, {title}: validation NLL against AUROC of held-back context images. "
    return {"svg": Markup(inline_svg(figure, words + " ".join(search_in_words(dict(search))), name))}


def _about(search: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "study": str(search["study"]),
        "trials": trials_in_words(search),
        "command": search_command(search),
        "code": code_words(search.get("code") or {}),
        "chosen": search_in_words(dict(search))[1:],
        "ranks": ranks_in_words(dict(search)),
        "notes": [str(note) for note in search.get("notes") or ()],
    }
