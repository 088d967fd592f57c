"""One HTML page with everything about a set of runs, and the same plots and tables as files beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task, task_names
from stfseb.files import replacing
from stfseb.report import figures, shifts, tables
from stfseb.report.arrange import Arranged, arranged
from stfseb.report.cards import cards_of
from stfseb.report.headline import headline_section
from stfseb.report.paper import retold
from stfseb.report.paper_section import paper_section
from stfseb.report.provenance import data_rows, run_details, setting_in_words, warnings_of
from stfseb.report.records import SHARED, Record, check, groups, missing_sets, ood_families, shared_device, title_of
from stfseb.report.search_section import search_section
from stfseb.report.style import inline_svg, rendered
from stfseb.report.words import listed

if TYPE_CHECKING:
    import os

    from matplotlib.figure import Figure

    from stfseb.experiments.paper import Plan
    from stfseb.report.grid import Grid
    from stfseb.report.reading import Searches

Draw = Callable[..., "Figure | None"]
MOST = 60  # rows of runs with other settings on the page


@dataclass(frozen=True)
class Plot:
    """A figure of the report: its file name, how it is drawn, and what it says in words."""

    name: str
    draw: Draw
    title: str
    caption: str
    panels: bool = True  # several panels, which stand one under the other on a phone


PLOTS = (
    Plot(
        "headline",
        figures.headline,
        "Accuracy against telling unfamiliar images apart",
        "Right is more accurate on familiar images, up is better at noticing unfamiliar ones. Where there are "
        "several seeds, lines are one standard deviation and small dots single seeds.",
    ),
    Plot(
        "confidence",
        figures.confidence,
        "Confidence on familiar and unfamiliar images",
        "Grey are the test images, lines the unfamiliar sets. A method that knows what it does not know has its "
        "lines on the left and its grey on the right. The vertical axis is stretched below 2 %.",
    ),
    Plot(
        "roc",
        figures.roc,
        "Finding unfamiliar images at every threshold",
        "Flag every image whose confidence is below a threshold: how many unfamiliar images are caught, against "
        "how many test images are flagged by mistake. Mean over seeds; the dashed line is chance.",
    ),
    Plot(
        "reliability",
        figures.reliability,
        "Reliability",
        "On the dashed line, answers given with 80 % confidence are right 80 % of the time. Above it a method is "
        "too modest, below it too sure. The area of a dot grows with the number of test images in its bin.",
    ),
    Plot(
        "rotation",
        shifts.rotation,
        "Turned test images",
        "Accuracy, NLL and ECE when the test images are turned; mean over seeds, bands are one standard deviation. A "
        "method that knows what it does not know loses accuracy as the others do, and its NLL and ECE stay low.",
    ),
    Plot(
        "risk-coverage",
        figures.risk_coverage,
        "Errors when unsure images are left out",
        "Answer only the images a method is surest of: the errors that remain. Lower is better.",
        panels=False,
    ),
    Plot(
        "cost",
        figures.cost,
        "Cost against quality",
        "Wall-clock time of training on the machine named below.",
        panels=False,
    ),
    Plot(
        "validation",
        figures.validation,
        "Validation loss",
        "One line a run; the dot is the epoch that was kept.",
        panels=False,
    ),
    Plot(
        "terms",
        figures.terms,
        "Parts of the objective",
        "Nats per example, first seed of each method; a term that a method does not have is not drawn. Scales differ.",
    ),
)


def write_report(
    records: Sequence[Record],
    folder: str | os.PathLike[str],
    title: str,
    *,
    plans: Sequence[Plan] = (),
    missing: Mapping[str, str] | None = None,
    searches: Searches | None = None,
) -> Path:
    """Write `report.html` into `folder`, with `plots/` (PNG and PDF) and `tables/` (Markdown and LaTeX).

    The page is one self-contained file: it loads nothing, and opens on any machine. Returns its path. Of a folder
    with many kinds of runs, tables and plots compare those at the presets; the others are listed by what differs.

    Args:
        records: run records; with "parts" where rotation or corruptions were measured.
        folder: where the page goes.
        title: of the page.
        plans: tables of the paper that were asked for; those that the records have runs for are found.
        missing: why runs of the plans are missing, by their ids.
        searches: those of the folder (`read_searches`); with some, there may be no records.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    kept = check(records) if records or not searches else []
    out = Path(folder)
    order = {name: place for place, name in enumerate(task_names())}
    tasks = dict(sorted(arranged(kept).items(), key=lambda entry: order.get(entry[0], len(order))))
    slugs = _slugs(tasks)
    files: dict[Path, bytes] = {}
    paper = paper_section(kept, tasks, plans, missing or {}, files)
    headline = headline_section({task: entry.main for task, entry in tasks.items()}, files)
    sections = [_section(entry, slugs[task], files) for task, entry in tasks.items()]
    searched = None if searches is None else search_section(searches, files)
    environment = Environment(
        loader=PackageLoader("stfseb.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["setting"] = setting_in_words
    page = environment.get_template("report.html").render(
        title=title, sections=sections, headline=headline, paper=paper, runs=len(kept), anchors=_anchors(sections),
        searches=searched,
    )  # fmt: skip
    # The page last: where it exists, what it was made with exists too.
    files[Path("report.html")] = page.encode()
    for name, content in files.items():
        with replacing(out / name) as part:
            part.write_bytes(content)
    return out / "report.html"


def title_for(folder: Path) -> str:
    """Return the title of a results folder's page."""
    name = folder.resolve().name
    return "Results" if name == "results" else f"Results in {name}"


def _section(entry: Arranged, slug: str, files: dict[Path, bytes]) -> dict[str, Any]:
    from markupsafe import Markup

    records = entry.main
    made = tables.tables(records)
    main, *more = made
    corrupted = shifts.corruption_grids(records)
    both: list[tables.Table | Grid] = [*made, *corrupted]
    files[Path("tables") / f"{slug}.md"] = "\n".join(t.to_markdown() for t in both).encode()
    files[Path("tables") / f"{slug}.tex"] = "\n".join(t.to_latex() for t in both).encode()
    return {
        "slug": slug,
        "title": title_of(records),
        "cards": cards_of(main),
        "main": {"html": Markup(main.to_html()), "notes": main.notes},
        "more": [{"html": Markup(t.to_html()), "title": t.title, "notes": t.own_notes} for t in more],
        "corrupted": [{"html": Markup(t.to_html()), "title": t.title, "notes": t.notes} for t in corrupted],
        "others": _others(entry, slug, files),
        "notes": list(dict.fromkeys([*_conditions(entry), *_said(records)])),
        "plots": [plot for p in PLOTS if (plot := _plot(p, records, slug, files))],
        "galleries": _galleries(records),
        "missing": missing_sets(records),
        "data": data_rows(records),
        "warnings": warnings_of(records),
        "runs": [run_details(record) for group in groups(records) for record in group.records],
        "ood": list(ood_families(records)),
        "bins": next((r["summary"]["bins"] for r in records if (r.get("summary") or {}).get("bins")), 15),
    }


def _said(records: Sequence[Record]) -> list[str]:
    """Return what the runs say of their data, as sentences begin."""
    words = [retold(str(note)) for record in records for note in record.get("notes") or []]
    return [f"Context{w[7:]}" if w.startswith("context ") else w for w in words]  # the names of sets stay as they are


def _conditions(entry: Arranged) -> list[str]:
    """Say how the runs above were trained, where that is not the task's own way."""
    own = load_task(entry.main[0]["task"]).training if entry.training else {}
    words = []
    for name, value in entry.training.items():
        usual = f"the task's own {_trained(own[name])}" if name in own else "the default"
        words.append(f"{name.replace('_', ' ')} {_trained(value)} instead of {usual}")
    lines = [f"Trained with {listed(words)}"] if words else []
    return lines + ([f"Context: {entry.context}, not the task's own"] if entry.context else [])


def _trained(value: Any) -> str:
    """Return a setting of training in words; null is one, too: no patience, say."""
    return "none" if value is None else setting_in_words(value)


def _others(entry: Arranged, slug: str, files: dict[Path, bytes]) -> dict[str, Any] | None:
    """Return the table of runs with other settings; beyond `MOST` rows only the file beside the page has them."""
    from markupsafe import Markup

    if not entry.others:
        return None
    whole = tables.main_table(entry.others)
    files[Path("tables") / f"{slug}-other-settings.md"] = whole.to_markdown().encode()
    table = whole.cut(MOST)
    return {
        "html": Markup(table.to_html()),
        "count": len(entry.others),
        "left": len(whole.groups) - len(table.groups),
        "file": f"tables/{slug}-other-settings.md",
        "runs": [(g.label, [str(r.get("id", "")) for r in g.records]) for g in table.groups],
    }


def _anchors(sections: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the id inside the page of every run that is on it, safe whatever the run's id holds."""
    shown = [run["id"] for s in sections for run in s["runs"]]
    shown += [run for s in sections if s["others"] for _, ids in s["others"]["runs"] for run in ids]
    return {name: f"run-{number}" for number, name in enumerate(dict.fromkeys(shown))}


def _plot(plot: Plot, records: Sequence[Record], slug: str, files: dict[Path, bytes]) -> dict[str, Any] | None:
    from markupsafe import Markup

    figure = plot.draw(records)
    if figure is None:
        return None
    name = f"{slug}-{plot.name}"
    for kind in ("png", "pdf"):
        files[Path("plots") / f"{name}.{kind}"] = rendered(figure, kind)
    caption = f"{plot.caption} {SHARED}" if plot.name == "cost" and shared_device(records) else plot.caption
    words = f"{plot.title}, {title_of(records)}. {caption}"
    narrow = plot.draw(records, columns=1) if plot.panels and len(figure.axes) > 1 else None
    return {
        "title": plot.title,
        "caption": caption,
        "name": name,
        "wide": Markup(inline_svg(figure, words, name)),
        "narrow": None if narrow is None else Markup(inline_svg(narrow, words, f"{name}-narrow")),
    }


def _galleries(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the pictures of the first seed of each method that has them, by kind."""
    titles = {"most": "most certain", "least": "least certain"}
    kinds: dict[str, dict[str, Any]] = {}
    for group in groups(records):
        pictured = next((r["images"] for r in group.records if r.get("images")), None)
        for source, sorts in (pictured or {}).items():
            for sort, pictures in sorts.items():
                name = source.removeprefix("ood/")
                where = "test images" if source == "test" else f"unfamiliar images ({name})"
                heading = f"The {titles.get(sort, sort)} {where}"
                if source != "test" and sort == "most":
                    heading = f"Unfamiliar images ({name}) that fool each method most"
                kinds.setdefault(heading, {"title": heading, "rows": []})
                kinds[heading]["rows"].append({"label": group.label, "pictures": _safe(pictures)})
    return list(kinds.values())


def _safe(pictures: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Keep only pictures that are data: a record must not make the page load or run anything."""
    return [
        {"src": str(p["src"]), "caption": str(p.get("caption", ""))}
        for p in pictures
        if re.fullmatch(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+", str(p.get("src", "")))
    ]


def _slugs(tasks: Mapping[str, Any]) -> dict[str, str]:
    """Return a file name for each task, unique and safe whatever its name holds."""
    slugs: dict[str, str] = {}
    for task in tasks:
        base = slug = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-") or "task"
        number = 2
        while slug in slugs.values():
            slug, number = f"{base}-{number}", number + 1
        slugs[task] = slug
    return slugs
